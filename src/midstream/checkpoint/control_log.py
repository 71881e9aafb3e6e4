"""The log of blocking control operations in the checkpoint location. Others change nothing, so they are not in it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from midstream.checkpoint.entry_log import EntryLog, Numbered
from midstream.ids import Digest, Epoch

__all__ = ["ControlEntry", "ControlLog", "ControlOutcome", "ControlRecord"]


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
    is_stopped: bool = False
    """Whether the job was stopped while it was in progress; if not, it may be what the driver died of."""
    restarts: int = 0
    """How often a new driver continued it because the last one had died."""
    outcome: ControlOutcome = ControlOutcome.PENDING
    epoch: Epoch | None = None
    """The epoch in which it was complete."""
    tasks: int = 0
    """How many tasks ran handlers."""
    missed: int = 0
    """For a fast operation: how many tasks ended before they could run handlers."""
    ended_at: float | None = None
    error: str | None = None


class ControlEntry(msgspec.Struct, frozen=True):
    """An entry of the log: operations that began or ended together."""

    records: tuple[ControlRecord, ...]


class ControlLog(EntryLog[ControlRecord]):
    """Blocking control operations of one job, in the order in which they were requested.

    >>> import tempfile
    >>> log = ControlLog(tempfile.mkdtemp())
    >>> log.keep(ControlRecord(log.next_number(), "Count", "blocking", ("count",), Digest("ab"), 0.0, "ann@host"))
    >>> [str(record.outcome) for record in log.records()]
    ['pending']
    """

    kind = ControlEntry
    what = "the log of control operations"
    advice = "or remove the folder, which forgets all of these operations"
    loss = ""

    def keep(self, record: ControlRecord) -> None:
        """Add an entry, which replaces the earlier ones of this record."""
        self.keep_all((record,))

    def keep_all(self, records: Sequence[ControlRecord]) -> None:
        """Add one entry for several records, if there are any."""
        if records:
            self._write(ControlEntry(tuple(records)))

    def _records_in(self, entry: ControlEntry) -> tuple[ControlRecord, ...]:
        return entry.records
