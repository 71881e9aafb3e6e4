"""Tables that sinks own: who writes to one, and the column that tells epochs apart."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EPOCH_COLUMN", "SinkOwner"]

EPOCH_COLUMN = "epoch"
"""The column that sinks add to rows."""


@dataclass(frozen=True)
class SinkOwner:
    """The writer of a table: a sink of a job, in one driver process."""

    job: str
    flow: str
    sink: str
    driver: str
