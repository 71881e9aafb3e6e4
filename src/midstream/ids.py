"""Small named types for numbers that must not be confused.

They cost nothing at run time (``typing.NewType``) and make signatures explicit.
"""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)
"""One micro-batch; equal to Spark's batch id."""

Run = NewType("Run", int)
"""The n-th try at an epoch by one driver process. Tasks of an earlier run are fenced."""

StageIndex = NewType("StageIndex", int)
"""Position of a stage in the plan's chain, starting at 0."""

PartitionId = NewType("PartitionId", int)
"""Spark's partition number within a stage."""

Revision = NewType("Revision", int)
"""Number of a configuration of the job; every change creates the next one."""

WireId = NewType("WireId", int)
"""Number of a wire in a plan: rows of one output port on their way to a later stage."""

BinId = NewType("BinId", int)
"""A fixed slice of a key space."""

ExecutorId = NewType("ExecutorId", str)
"""Spark's name of an executor: the processes on one host that share a base. Unique within an application."""

Origin = NewType("Origin", int)
"""Where rows enter a stage: the number of a wire, or a negative number for an inlet."""

InputPosition = dict[Origin, int]
"""A task's progress in its input: rows taken, by origin. A missing origin means 0."""

Digest = NewType("Digest", str)
"""Hex SHA-256 of a blob in the checkpoint's store."""

BINS = 256
"""Bins per keyed operator. Fixed, because state and routing are addressed by bin."""
