"""Every message between coordinator and task, and every event and instruction of the coordinator.

All are frozen msgspec structs. Those that cross the channel or are kept in a journal are tagged with their name, so
that one decoder reads them all.
"""

from __future__ import annotations

import msgspec

from midstream.data.times import EpochTimes, Watermarks
from midstream.ids import Digest, Epoch, InputPosition, PartitionId, Revision, Run, StageIndex, WireId
from midstream.metrics import OperatorStats
from midstream.state.files import FileRef
from midstream.state.lineage import Rewrite
from midstream.storage.table_files import SinkFile


class TaskId(msgspec.Struct, frozen=True, order=True):
    """One attempt of one partition of one stage in one run of an epoch.

    ``attempt`` is Spark's task attempt id, unique within the application: a retried, speculative or recomputed task
    is another attempt of the same partition.
    """

    epoch: Epoch
    run: Run
    stage: StageIndex
    partition: PartitionId
    attempt: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}.{self.run} stage {self.stage} partition {self.partition} attempt {self.attempt}"


# ── task → coordinator ────────────────────────────────────────────────────────────────────────────────────────────


class WorkerId(msgspec.Struct, frozen=True, order=True):
    """A Python worker process."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}"


class TaskStarted(msgspec.Struct, frozen=True, tag=True):
    """A task asks what to run. ``worker`` is where it can be told of changes."""

    task: TaskId
    worker: WorkerId | None = None


class SwitchRequested(msgspec.Struct, frozen=True, tag=True):
    """A task asks to switch to a revision at this position, before it has emitted anything of it."""

    task: TaskId
    revision: Revision
    position: InputPosition


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Rows of a revision have reached these operators in a task. Posted: nobody waits for an answer."""

    task: TaskId
    revision: Revision
    operators: tuple[str, ...]


class Exhausted(msgspec.Struct, frozen=True, tag=True):
    """A task that was to switch has taken all of its input, and calls no function any more: it only has to write what
    it knows. Posted, as :class:`Reached` is."""

    task: TaskId
    revision: Revision


class StateChange(msgspec.Struct, frozen=True):
    """What a task did to the state of one operator: the file of its changes, and files that replace older ones."""

    delta: FileRef | None
    rewrites: tuple[Rewrite, ...] = ()


class TaskFinished(msgspec.Struct, frozen=True, tag=True):
    """A task has emitted everything.

    Rows by wire: ``received`` and ``sent`` let the coordinator prove that none was lost between stages, ``emitted``
    counts those put on each wire that starts in this stage. ``states`` tells by operator where its changes are,
    ``event_times`` by source the latest that was seen; ``widest_row`` how many bytes the rows of a source were at most,
    on average over a batch.
    """

    task: TaskId
    operators: tuple[OperatorStats, ...]
    received: dict[WireId, int]
    sent: dict[WireId, int]
    emitted: dict[WireId, int]
    states: dict[str, StateChange] = {}
    event_times: dict[str, int] = {}
    widest_row: int = 0
    audit: str | None = None
    """The file of what was recorded for the auditor, if that was wanted."""
    samples: dict[str, bytes] = {}
    """A few rows that operators met, encoded as frames are."""
    files: dict[str, tuple[SinkFile, ...]] = {}
    """By sink: the files that this attempt has staged."""
    began_at: float = 0.0
    """By the worker's clock."""
    ended_at: float = 0.0


class TaskFailure(msgspec.Struct, frozen=True):
    """Why the user's code failed, ready to show: no object in it needs the user's classes to be read."""

    operator: str
    error: str
    row: str | None
    traceback: str


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """The user's code failed in a task; the task fails too, and Spark decides whether to retry it.

    ``revision`` is the one under which it failed.
    """

    task: TaskId
    failure: TaskFailure
    revision: Revision = Revision(0)


class WorkerJoined(msgspec.Struct, frozen=True, tag=True):
    """A worker process listens: for changes, and for the end of the job, when it closes its functions."""

    worker: WorkerId


class WorkerReleased(msgspec.Struct, frozen=True, tag=True):
    """A worker process has closed its functions."""

    worker: WorkerId


# ── coordinator → task ────────────────────────────────────────────────────────────────────────────────────────────


class AuditOrder(msgspec.Struct, frozen=True):
    """Tasks are to record their operations for the auditor: by which column rows are told apart, and where to write."""

    column: str
    location: str


class StageChange(msgspec.Struct, frozen=True):
    """What the tasks of a stage must know of a change that takes effect within an epoch.

    ``program`` is the stage's under the new revision. Chunks that pass one of ``heads`` after it has switched carry the
    new revision; all other operators go by the revision that a chunk carries.
    """

    revision: Revision
    program: Digest
    heads: tuple[str, ...] = ()


class TaskOrder(msgspec.Struct, frozen=True, tag=True):
    """What a task runs: the configuration, never guessed, always given.

    ``program`` is the digest of the stage's program in the blob store, which also says which bins the task owns and
    where it sends rows. ``lineages`` holds, encoded, the state from which the stage's operators go on. If a change is
    on its way, ``switch_at`` says where the task's heads switch: nowhere (None), or as soon as the rows of a wire are
    at this position, which for a wire that is not named is before its first row.
    ``live`` names all blobs that some task may still be told to use; a worker forgets what it has loaded of others.
    """

    revision: Revision
    program: Digest
    times: EpochTimes = EpochTimes(clock=0)
    lineages: dict[str, bytes] = {}
    change: StageChange | None = None
    switch_at: InputPosition | None = None
    audit: AuditOrder | None = None
    live: tuple[Digest, ...] = ()


class Switch(msgspec.Struct, frozen=True, tag=True):
    """The fast control message: a running task is to switch as soon as it can, and to say where it did."""

    task: TaskId
    change: StageChange


class Stay(msgspec.Struct, frozen=True, tag=True):
    """The task must not switch after all, or nobody wants it to: it goes on under the revision that it has."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The coordinator has noted the report."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This attempt is not wanted: its epoch or run is over."""

    reason: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """The job ends: close the functions this process holds open for it."""


OperationMessage = SwitchRequested | Reached | Exhausted
"""What tasks say to an operation. Those of them that are :data:`Posted` expect no answer."""
Posted = Reached | Exhausted
FromTask = TaskStarted | TaskFinished | TaskFailed | OperationMessage | WorkerJoined | WorkerReleased
ToTask = TaskOrder | Switch | Stay | Accepted | Refused | Release


# ── events that only the driver makes ─────────────────────────────────────────────────────────────────────────────


class EpochOpened(msgspec.Struct, frozen=True, tag=True):
    """The driver starts a run of an epoch.

    ``programs`` holds one digest per stage, in order, ``partitions`` the number of partitions of each stage behind an
    exchange, ``lineages`` by stage the state of its operators. ``clock`` is the driver's, ``watermarks`` are those of
    the epoch before. ``on_trial`` is the revision that can still be rolled back, if there is one. ``live`` names the
    blobs of all configurations that the driver may still open an epoch with.
    """

    epoch: Epoch
    run: Run
    revision: Revision
    programs: tuple[Digest, ...]
    partitions: dict[StageIndex, int] = {}
    lineages: dict[StageIndex, dict[str, bytes]] = {}
    clock: int = 0
    watermarks: Watermarks = Watermarks({})
    on_trial: Revision | None = None
    audit: AuditOrder | None = None
    live: tuple[Digest, ...] = ()
    closing: bool = False
    """No rows will follow: what is open is closed, whatever the watermark."""


class ChangeBegun(msgspec.Struct, frozen=True, tag=True):
    """The driver wants a change to take effect within the run in progress.

    ``programs`` are the stages' under the new revision. Operators by stage: ``heads``, which are told to switch, and
    ``followers``, which are updated but behind an exchange: rows bring them the news.
    """

    revision: Revision
    programs: tuple[Digest, ...]
    heads: dict[StageIndex, tuple[str, ...]]
    followers: dict[StageIndex, tuple[str, ...]]
    has_side_entrance: bool = False
    """Rows can come to an updated operator past the heads; these meet it as it was before until the epoch ends."""
    live: tuple[Digest, ...] = ()
    """The blobs of the configuration that it leads to."""


class EpochSealed(msgspec.Struct, frozen=True, tag=True):
    """Spark says that every job of the epoch succeeded; the coordinator must agree before it is committed."""

    epoch: Epoch
    run: Run


class EpochAbandoned(msgspec.Struct, frozen=True, tag=True):
    """The run will not be finished: it failed or was cancelled. Its tasks are fenced from here on."""

    epoch: Epoch
    run: Run


class JobEnding(msgspec.Struct, frozen=True, tag=True):
    """No epoch will be opened any more; workers are to close what they hold."""


class Received(msgspec.Struct, frozen=True, tag=True):
    """A message arrived from a peer of the channel."""

    peer: bytes
    message: FromTask


Event = EpochOpened | ChangeBegun | EpochSealed | EpochAbandoned | JobEnding | Received


# ── instructions ──────────────────────────────────────────────────────────────────────────────────────────────────


class SwitchPoint(msgspec.Struct, frozen=True):
    """Where the tasks of a partition switch: nowhere in this epoch (None), or at a position."""

    stage: StageIndex
    partition: PartitionId
    position: InputPosition | None


class Send(msgspec.Struct, frozen=True):
    """Give a message to a peer."""

    peer: bytes
    message: ToTask


class Commit(msgspec.Struct, frozen=True):
    """The epoch is whole: write its manifest, then let Spark commit the batch.

    ``revision`` is the one that the next epoch begins with; ``switches`` tells where tasks switched to it.
    """

    epoch: Epoch
    revision: Revision
    operators: tuple[OperatorStats, ...]
    tasks: int
    emitted: dict[WireId, int]
    states: dict[str, tuple[StateChange, ...]] = {}
    watermarks: Watermarks = Watermarks({})
    widest_row: int = 0
    switches: tuple[SwitchPoint, ...] = ()
    audits: tuple[str, ...] = ()
    samples: dict[str, bytes] = {}
    files: dict[str, tuple[SinkFile, ...]] = {}
    spans: dict[StageIndex, tuple[float, float]] = {}
    """By stage: when its first task began and its last one ended, by the workers' clocks."""


class Reject(msgspec.Struct, frozen=True):
    """The epoch is not whole although Spark thinks so; the driver must run it again or fail. Never expected."""

    epoch: Epoch
    reason: str


class ChangeNoted(msgspec.Struct, frozen=True):
    """Something happened to the change in progress, in one task or (``task`` is None) in the whole run.

    ``in_effect`` says that from here on no row of this epoch meets an updated operator as it was before.
    """

    revision: Revision
    task: TaskId | None
    what: str
    operators: tuple[str, ...]
    in_effect: bool


class GiveUpRun(msgspec.Struct, frozen=True):
    """A revision that can still be rolled back has failed: no use in letting Spark retry its tasks."""

    epoch: Epoch
    run: Run


Instruction = Send | Commit | Reject | ChangeNoted | GiveUpRun
