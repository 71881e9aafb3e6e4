"""The log of blocking control operations in the checkpoint location. Others change nothing, so they are not in it."""

from __future__ import annotations

import enum

from midstream.checkpoint.entry_log import EntryLog, Numbered
from midstream.ids import Digest, Epoch

__all__ = ["ControlLog", "ControlOutcome", "ControlRecord"]


class ControlOutcome(enum.StrEnum):
    """How a control operation ended, or that it is still pending."""

    PENDING = "pending"
    """It waits for its epoch, or for its handlers."""
    COMPLETE = "complete"
    """All handlers have returned; for a blocking operation, in a committed epoch."""
    FAILED = "failed"
    """A handler failed or took too long. Nothing of it counts."""


class ControlRecord(Numbered, frozen=True):
    """A control operation: who, when, what, and how it ended."""

    name: str
    mode: str
    operators: tuple[str, ...]
    program: Digest
    """The blob with the operation and its configurations."""
    requested_at: float
    by: str
    note: str | None = None
    time_limit_s: float = 10.0
    result_limit: int = 256 * 1024
    is_begun: bool = False
    """Whether a run was opened with it."""
    restarts: int = 0
    """How often another driver went on with it after it had begun."""
    outcome: ControlOutcome = ControlOutcome.PENDING
    epoch: Epoch | None = None
    """The epoch in which it was complete."""
    tasks: int = 0
    """How many tasks ran handlers."""
    missed: int = 0
    """Of a fast operation: tasks that ended before they could."""
    ended_at: float | None = None
    error: str | None = None


class ControlLog(EntryLog[ControlRecord]):
    """Blocking control operations of one job, in the order in which they were requested.

    >>> import tempfile
    >>> log = ControlLog(tempfile.mkdtemp())
    >>> log.keep(ControlRecord(log.next_number(), "Count", "blocking", ("count",), Digest("ab"), 0.0, "ann@host"))
    >>> [str(record.outcome) for record in log.records()]
    ['pending']
    """

    kind = ControlRecord
    what = "the log of control operations"
    advice = "or remove the folder, which forgets all of these operations"
    loss = ""
