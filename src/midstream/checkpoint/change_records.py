"""The record of a change: who, when, what, how it was planned, and how it ended. Kept in the checkpoint."""

from __future__ import annotations

import enum
import getpass
import os
import socket
from datetime import UTC, datetime
from typing import Any

import msgspec

from midstream.checkpoint.entry_log import Numbered
from midstream.flow.knobs import in_words
from midstream.ids import Digest, Epoch, Revision

__all__ = [
    "NOT_STORED",
    "ChangeEvent",
    "ChangeRecord",
    "DivideRecord",
    "EditRecord",
    "ForgetRecord",
    "InsertRecord",
    "MigrationRecord",
    "MoveRecord",
    "Outcome",
    "PlanRecord",
    "RemoveRecord",
    "RescaleRecord",
    "RewireRecord",
    "StepRecord",
    "TuneRecord",
    "UpdateRecord",
    "whoami",
]


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
    """How a change ended, or that it is still pending.

    >>> from midstream import Flow, ListSource, NoopSink, Outcome, Update
    >>> from midstream.testing import ChangeAt, run_local
    >>> flow = Flow("numbers")
    >>> numbers = flow.source("in", ListSource([[{"n": 1}]] * 3, "n int"))
    >>> numbers.map("m", lambda row: row).sink("out", NoopSink())
    >>> run = run_local(flow, changes=[ChangeAt.of(1, Update("m", lambda row: {"n": row["n"] // 0}))])
    >>> run.history[0].outcome is Outcome.ROLLED_BACK
    True
    """

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
    STOPPED = "stopped"
    """A migration that ended before its last step: it was cancelled, or a step failed again and again. The bins that
    had moved stay where they are."""
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

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return self.operator

    def __str__(self) -> str:
        return f"{self.operator}: {self.label}"


class MoveRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="move"):
    """A :class:`~midstream.Move`: the new owner of each bin that moves, in the stage that ``stage`` names."""

    bins: dict[int, int]
    stage: str | None = None

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return "bins" if self.stage is None else f"bins of {self.stage}"

    def __str__(self) -> str:
        return f"{self.subject}: {len(self.bins)} move"


class RescaleRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="rescale"):
    """A :class:`~midstream.Rescale`: the new number of partitions of a stage, or of all."""

    partitions: int
    stage: str | None = None

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return "partitions" if self.stage is None else f"partitions of {self.stage}"

    def __str__(self) -> str:
        return f"{self.subject}: {self.partitions}"


class DivideRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="divide"):
    """A :class:`~midstream.Divide`: a key, or a bin, of a join that several partitions share."""

    join: str
    into: int
    spread: str
    key: dict[str, str | int | bool] | None = None
    bin: int | None = None

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        what = f"bin {self.bin}" if self.key is None else ", ".join(map(str, self.key.values()))
        return f"shares of {what} at {self.join}"

    def __str__(self) -> str:
        return f"{self.subject}: {self.into}"


class InsertRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="insert"):
    """An operator that a change added to the flow.

    ``described`` is the operator as documents of graphs have it, ``takes`` the columns of each of its inputs for which
    its function was written. The function is in the blob store, by digest, and so is the initial ``state`` it was
    given, until an epoch with it is committed.
    """

    operator: str
    described: dict[str, Any]
    function: Digest
    takes: tuple[str, ...]
    label: str = ""
    source: str = ""
    state: Digest | None = None

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return f"+{self.operator}"

    def __str__(self) -> str:
        return f"{self.subject}: {self.label}"


class RemoveRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="remove"):
    """An operator that a change removed from the flow; the fields are those of :class:`InsertRecord`.

    ``flush``: the epoch before emitted all that it held open.
    """

    operator: str
    described: dict[str, Any]
    function: Digest
    takes: tuple[str, ...]
    flush: bool = False

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return f"-{self.operator}"

    def __str__(self) -> str:
        return self.subject


class RewireRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="rewire"):
    """An operator that reads other inputs since a change: what it read ``before`` and ``after``, as ``split[left]``."""

    operator: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return f"inputs of {self.operator}"

    def __str__(self) -> str:
        return f"{self.subject}: {', '.join(self.after)}"


class ForgetRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="forget"):
    """State that an operator left when it was removed, and that was dropped while the job was not running."""

    operator: str

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return f"kept state of {self.operator}"

    def __str__(self) -> str:
        return f"{self.subject}: dropped"


class TuneRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="tune"):
    """A :class:`~midstream.Tune`: the knobs it set, in microseconds, bytes or rows, and their values ``before``.

    None is the default.
    """

    knobs: dict[str, int | None]
    before: dict[str, int | None]

    @property
    def subject(self) -> str:
        """What it changes, in a few words."""
        return f"knob{'s' if len(self.knobs) > 1 else ''} {', '.join(self.knobs)}"

    def __str__(self) -> str:
        return ", ".join(f"{name}: {in_words(name, value)}" for name, value in self.knobs.items())


PlanRecord = InsertRecord | RemoveRecord | RewireRecord
"""The record of an edit of the plan."""
EditRecord = (
    UpdateRecord
    | MoveRecord
    | RescaleRecord
    | DivideRecord
    | InsertRecord
    | RemoveRecord
    | RewireRecord
    | ForgetRecord
    | TuneRecord
)
"""The record of an edit, by its ``kind``. Each says what its ``subject`` is, and as text what it does."""


class StepRecord(msgspec.Struct, frozen=True):
    """A step of a migration: what moved, and how long its epoch took, where others take ``steady_ms``.

    ``bytes`` is the state of the bins as estimated from the files, ``read`` what tasks had to read of it (None: not
    measured). ``step_ms`` is the time that the driver took for it before the epoch could begin, ``waited`` the number
    of epochs for which the step waited until its takers were warm.
    """

    epoch: Epoch
    bins: int
    bytes: int
    epoch_ms: float
    steady_ms: float
    step_ms: float = 0.0
    waited: int = 0
    read: int | None = None


class MigrationRecord(msgspec.Struct, frozen=True):
    """How the moves of a change are made in steps. Assignments are documents, by the name of their stage.

    ``first`` is where the bins were when it began, ``target`` where they are to be; both are empty until then. A
    migration that was reversed goes back to ``first``.
    """

    strategy: str
    prewarm: bool = False
    budget_ms: float | None = None
    budget_bytes: int | None = None
    at_epoch: Epoch | None = None
    """The first epoch in which bins may move."""
    at_time: int | None = None
    """The event time, in microseconds since 1970, that the watermark must have reached before an epoch in which bins
    move."""
    first: dict[str, Any] = {}
    target: dict[str, Any] = {}
    is_reversed: bool = False
    bins: int = 0
    """Number of bins that are to move, or have moved when it has ended."""
    bytes: int = 0
    """Bytes of their state, estimated."""
    steps: tuple[StepRecord, ...] = ()
    """Set when it has ended: its steps in this life of the driver, the newest ones if there are very many."""


class ChangeEvent(msgspec.Struct, frozen=True):
    """An event in one task (``task``) or on the driver, ``at_ms`` milliseconds after the request."""

    at_ms: float
    what: str
    task: str | None = None
    operators: tuple[str, ...] = ()


class ChangeRecord(Numbered, frozen=True):
    """One change of a job.

    ``delay_ms`` is the time from when its functions were checked and stored (which took ``preparation_ms``), until
    no row met the old version of an updated operator. ``epoch`` is the first in which it was in effect.
    """

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
    deployed: bool = False
    """Whether it brought the job to what a script said: a start of that script, or of a later one, no longer needs
    it."""
    waited_ms: float | None = None
    """Milliseconds for which it waited behind earlier changes, before it could begin."""
    trial_ms: float | None = None
    """Milliseconds from then until its end."""
    ended_at: float | None = None
    """When its outcome was known, in seconds since 1970."""
    migration: MigrationRecord | None = None
    """Set if its bins move step by step. ``revision`` is then the one that the job ran; a migration makes none."""

    @property
    def updates(self) -> tuple[UpdateRecord, ...]:
        """The edits that gave operators other functions."""
        return tuple(edit for edit in self.edits if isinstance(edit, UpdateRecord))

    @property
    def operators(self) -> tuple[str, ...]:
        """The updated operators."""
        return tuple(update.operator for update in self.updates)

    @property
    def new_functions(self) -> tuple[str, ...]:
        """The operators that were updated or inserted."""
        return (*self.operators, *(edit.operator for edit in self.edits if isinstance(edit, InsertRecord)))

    @property
    def tuned(self) -> dict[str, int | None]:
        """The knobs that it set; None for the default."""
        return {
            name: value for edit in self.edits if isinstance(edit, TuneRecord) for name, value in edit.knobs.items()
        }

    @property
    def plan_edits(self) -> tuple[PlanRecord, ...]:
        """The edits that changed the plan of the flow."""
        return tuple(edit for edit in self.edits if isinstance(edit, PlanRecord))

    @property
    def decided_at(self) -> tuple[str, ...]:
        """The operators at which a row meets the change: for :func:`midstream.audit.decide`.

        Those that were updated, added or removed, and those that got other readers.
        """
        found = dict.fromkeys(self.operators)
        for edit in self.plan_edits:
            if isinstance(edit, RewireRecord):
                ends = set(edit.before) ^ set(edit.after)
            else:
                found[edit.operator] = None
                ends = {f"{each['operator']}[" for each in edit.described["inputs"]}
            found.update(dict.fromkeys(sorted(end.partition("[")[0] for end in ends)))
        return tuple(found)

    @property
    def subjects(self) -> str:
        """What all of its edits change, in a few words; empty for a change that was refused."""
        return ", ".join(edit.subject for edit in self.edits)

    @property
    def met(self) -> str | None:
        """What the change met when it took effect, in plain words; None if it is not in effect yet.

        >>> events = (ChangeEvent(0.1, "told 1 running task(s)"), ChangeEvent(8.0, "switched", "task 3.0.2.1"))
        >>> record = ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "", delay_ms=8.0, events=events)
        >>> record.met
        'met 1 running task(s), which switched within an epoch'
        """
        if self.delay_ms is None or self.migration is not None:
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
        return f"{when}  revision {self.revision}  by {self.by}  {self.subjects}: {self.outcome}{delay}{error}"
