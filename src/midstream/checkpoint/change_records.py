"""The record of a change: who, when, what, how it was planned, and how it ended. Kept in the checkpoint."""

from __future__ import annotations

import enum
import getpass
import os
import socket
from datetime import UTC, datetime

import msgspec

from midstream.ids import Digest, Epoch, Revision

__all__ = ["NOT_STORED", "ChangeEvent", "ChangeRecord", "EditRecord", "Outcome", "UpdateRecord", "whoami"]


NOT_STORED = Digest("")
"""Digest of a function that could not be stored, such as a transform that holds a DataFrame."""


def whoami() -> str:
    """The user of this process and the machine, for the history."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Outcome(enum.StrEnum):
    """How a change ended, or that it is still pending."""

    PENDING = "pending"
    """It waits for an earlier change, or for rows to reach it."""
    APPLIED = "applied"
    """Its trial is over: epochs that ran entirely under it are committed."""
    ROLLED_BACK = "rolled back"
    """It failed; the epoch was run again without it, and nothing of it was ever committed."""
    REVERTED = "reverted"
    """It failed after an epoch in which it was in effect had been committed. That epoch stays as it is; the job
    returned to what it ran before."""
    REFUSED = "refused"
    """It was never sent to a task."""
    REWOUND = "rewound"
    """The job was rewound to an epoch before it took effect, so it counts no more than those epochs do."""


class UpdateRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="update"):
    """An :class:`~midstream.Update` of one operator. Functions are in the blob store, by digest.

    ``before`` and ``returned`` are its previous function and columns, to which a revert goes back. Columns are None if
    they follow from its inputs. ``takes`` are the columns of each of its inputs after the change, for which the
    function was written.
    """

    operator: str
    label: str
    function: Digest
    source: str
    before: Digest
    returns: str | None = None
    returned: str | None = None
    migrate: Digest | None = None
    takes: tuple[str, ...] | None = None


EditRecord = UpdateRecord
"""The record of an edit, by its ``kind``."""


class ChangeEvent(msgspec.Struct, frozen=True):
    """An event in one task (``task``) or on the driver, ``at_ms`` milliseconds after the request."""

    at_ms: float
    what: str
    task: str | None = None
    operators: tuple[str, ...] = ()


class ChangeRecord(msgspec.Struct, frozen=True):
    """One change of a job.

    ``delay_ms`` is the time from when its functions were checked and stored (which took ``preparation_ms``), until
    no row met the old version of an updated operator. ``epoch`` is the first in which it was in effect.
    """

    number: int
    revision: Revision
    requested_at: float
    by: str
    scheduler: str
    edits: tuple[EditRecord, ...]
    plan: str
    outcome: Outcome = Outcome.PENDING
    preparation_ms: float = 0.0
    delay_ms: float | None = None
    epoch: Epoch | None = None
    events: tuple[ChangeEvent, ...] = ()
    error: str | None = None
    note: str | None = None
    time_limit_s: float | None = None
    """Seconds that an epoch on trial may take, counted from when the change takes effect in it."""
    configuration: Digest | None = None
    """The blob of the new configuration; None if the change was refused, or made while the job was not running."""
    drops: bool = False
    """Whether it dropped all earlier changes: the job was started with its script alone."""

    @property
    def updates(self) -> tuple[UpdateRecord, ...]:
        """The edits that gave operators other functions."""
        return self.edits

    @property
    def operators(self) -> tuple[str, ...]:
        """The updated operators."""
        return tuple(update.operator for update in self.updates)

    @property
    def met(self) -> str | None:
        """What the change met when it took effect, in plain words; None if it is not in effect yet.

        >>> events = (ChangeEvent(0.1, "told 1 running task(s)"), ChangeEvent(8.0, "switched", "task 3.0.2.1"))
        >>> record = ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "", delay_ms=8.0, events=events)
        >>> record.met
        'met 1 running task(s), which switched within an epoch'
        """
        if self.delay_ms is None:
            return None
        switched = len({event.task for event in self.events if event.what == "switched"})
        if switched:
            return f"met {switched} running task(s), which switched within an epoch"
        if self.events[0].what.startswith("told"):
            return "came within an epoch, but no task that runs these operators had to switch"
        if self.events[0].what.startswith("no epoch is running"):
            return "fell between two epochs: no task was running"
        return "took effect at the beginning of an epoch"

    def __str__(self) -> str:
        """A line for people.

        >>> print(ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "", Outcome.APPLIED, delay_ms=3.21))
        1970-01-01 00:00:00  revision 2  by ann@host  : applied, in effect after 3.2 ms
        """
        when = datetime.fromtimestamp(self.requested_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        delay = "" if self.delay_ms is None else f", in effect after {self.delay_ms:.1f} ms"
        error = "" if self.error is None else f": {self.error.splitlines()[0]}"
        what = ", ".join(self.operators)
        return f"{when}  revision {self.revision}  by {self.by}  {what}: {self.outcome}{delay}{error}"
