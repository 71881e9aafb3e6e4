"""Tiny named types: the numbers that must not be mistaken for one another.

They cost nothing at run time (``typing.NewType``) and make signatures say what they mean.
"""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)
"""One micro-batch; equal to Spark's batch id."""

Run = NewType("Run", int)
"""The n-th try at an epoch within one life of the driver. Tasks of an earlier run are fenced."""

StageIndex = NewType("StageIndex", int)
"""Position of a stage in the plan's straight chain, from 0."""

PartitionId = NewType("PartitionId", int)
"""Spark's partition number within a stage."""

Revision = NewType("Revision", int)
"""Number of a configuration of the job; every change makes the next one."""

WireId = NewType("WireId", int)
"""Number of a wire in a plan: rows of one output port on their way to a later stage."""

BinId = NewType("BinId", int)
"""A fixed slice of a key space."""

Origin = NewType("Origin", int)
"""Where rows enter a stage: the number of a wire, or a negative one for an inlet."""

InputPosition = dict[Origin, int]
"""How far a task is in its input: rows taken, by origin. An origin that is not named has given none."""

Digest = NewType("Digest", str)
"""Hex SHA-256 of a blob in the checkpoint's store."""

BINS = 256
"""Bins per keyed operator. Fixed, because state and routing are addressed by bin."""
