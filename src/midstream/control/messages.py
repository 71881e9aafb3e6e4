"""Every message between coordinator and task, and every event and instruction of the coordinator.

All are frozen msgspec structs. Those that cross the channel or are kept in a journal are tagged with their name, so
that one decoder reads them all. Those that come in thousands are no business of Python's garbage collector
(``gc=False``): they hold what was decoded or is frozen, so they are never part of a cycle.
"""

from __future__ import annotations

import msgspec

from midstream.data.times import EpochTimes, Watermarks
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import (
    BinId,
    Digest,
    Epoch,
    ExecutorId,
    InputPosition,
    PartitionId,
    Revision,
    Run,
    StageIndex,
    WireId,
)
from midstream.metrics import OperatorStats
from midstream.state.files import FileRef
from midstream.state.lineage import Rewrite
from midstream.storage.table_files import SinkFile

Places = dict[StageIndex, dict[PartitionId, ExecutorId]]
"""By stage and partition: the executor that ran it."""


class TaskId(msgspec.Struct, frozen=True, order=True, gc=False):
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


class WorkerId(msgspec.Struct, frozen=True, order=True, gc=False):
    """A Python worker process, and the executor that it belongs to: several of them may share a host."""

    host: str
    pid: int
    executor: ExecutorId = ExecutorId("")

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}"


class TaskStarted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A task asks what to run. ``worker`` is the process to notify of changes, ``assignments`` names those that this
    process knows already."""

    task: TaskId
    worker: WorkerId | None = None
    assignments: Digest = Digest("")


class SwitchRequested(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A task asks to switch to a revision at this position, before it has emitted any row under it."""

    task: TaskId
    revision: Revision
    position: InputPosition


class Reached(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Rows of a revision have reached these operators in a task. Posted: there is no answer."""

    task: TaskId
    revision: Revision
    operators: tuple[str, ...]


class Exhausted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A task that was to switch has taken all of its input and calls no more functions: it only has to write its
    state. Posted, as :class:`Reached` is."""

    task: TaskId
    revision: Revision


class StateChange(msgspec.Struct, frozen=True):
    """A task's changes to the state of one operator: the file of its changes, and files that replace older ones."""

    delta: FileRef | None
    rewrites: tuple[Rewrite, ...] = ()
    sizes: tuple[int, ...] = ()
    """Bytes of keys and values in each bin of the delta."""


class TaskFinished(msgspec.Struct, frozen=True, tag=True):
    """A task has emitted everything.

    Rows by wire: ``received`` and ``sent`` let the coordinator prove that none was lost between stages, ``emitted``
    counts those put on each wire that starts in this stage. ``states`` has the files of changes by operator,
    ``event_times`` the latest event time seen by source; ``widest_row`` is the largest average of bytes per row over
    a batch of a source.
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
    """The file with the operations recorded for the auditor, in audit mode."""
    samples: dict[str, bytes] = {}
    """A few rows that operators processed, encoded like frames."""
    files: dict[str, tuple[SinkFile, ...]] = {}
    """By sink: the files that this attempt has staged."""
    state_read: int = 0
    """Bytes of state files that it had to read, because its executor's base lacked their rows."""
    began_at: float = 0.0
    """When the task began, by the worker's clock."""
    ended_at: float = 0.0
    bin_rows: dict[StageIndex, bytes] = {}
    """By the stage that rows with a key went to: the number of rows of each bin (:func:`.pack_counts`)."""
    memory: int = 0
    """Resident memory of the worker's process at the end of the task, in bytes."""
    controls: tuple[ControlReport, ...] = ()
    """The results of the control operations in the task's order."""


class TaskFailure(msgspec.Struct, frozen=True):
    """Why the user's code failed, as text: reading it needs none of the user's classes."""

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
    operation: int = 0
    """The number of the control operation whose handler failed, if one did."""


class Handled(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A task has run the handlers of a fast control operation. Posted: there is no answer."""

    task: TaskId
    report: ControlReport


class WorkerJoined(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A worker process has begun to listen for changes, and for the end of the job, when it closes its functions."""

    worker: WorkerId


class WorkerReleased(msgspec.Struct, frozen=True, tag=True):
    """A worker process has closed its functions, or a relay has found it gone."""

    worker: WorkerId


class RelayJoined(msgspec.Struct, frozen=True, tag=True):
    """A worker process is about to hand messages on between the coordinator and the workers beside it."""

    worker: WorkerId


class Prefetched(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer to :class:`Prefetch`, posted when it is done with it. ``bins`` are those that its base now has
    for every operator named in the request, as they were after ``epoch``; ``bytes`` of files were read for that."""

    worker: WorkerId
    stage: StageIndex
    epoch: Epoch
    bins: tuple[BinId, ...]
    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    """Why it gave up, if it did. It is asked again with the next epoch."""


TaskNumbers = tuple[StageIndex, PartitionId, int]
"""What tells a task from others of its run: its stage, its partition, and the attempt."""


class Said(msgspec.Struct, frozen=True, gc=False):
    """What a worker behind a relay has said. ``worker`` is the relay's own number for it.

    If several tasks have said the same, ``message`` is that of the first, and ``tasks`` names all of them.
    """

    worker: int
    message: WorkerJoined | WorkerReleased | Prefetched | Reached | Exhausted | Handled
    tasks: tuple[TaskNumbers, ...] = ()


class FromRelay(msgspec.Struct, frozen=True, tag=True, gc=False):
    """What the workers behind a relay have said, each of them in this order."""

    said: tuple[Said, ...]


# ── coordinator → task ────────────────────────────────────────────────────────────────────────────────────────────


class AuditOrder(msgspec.Struct, frozen=True):
    """Tasks must record their operations for the auditor: the column that identifies rows, and where to write."""

    column: str
    location: str


class StageChange(msgspec.Struct, frozen=True, gc=False):
    """What the tasks of a stage must know about a change that takes effect within an epoch.

    ``program`` is the stage's program under the new revision. Chunks that pass one of ``heads`` after it has switched
    carry the new revision; all other operators use the revision that a chunk carries.
    """

    revision: Revision
    program: Digest
    heads: tuple[str, ...] = ()


class TaskOrder(msgspec.Struct, frozen=True, tag=True):
    """What a task runs. A task never guesses its configuration.

    ``program`` is the digest of the stage's program in the blob store. ``assignments`` names the owners of all bins:
    those that the task owns, and the destinations of its rows; ``owners`` is the document itself, unless the task's
    process knows it. ``lineages`` holds the encoded lineages of the stage's operators. If a change is
    in progress, ``switch_at`` is where the task's heads switch: nowhere (None), or as soon as the rows of a wire are
    at this position, which for a wire that is not named is before its first row.
    ``live`` names all blobs that a task may still need; a worker drops all others that it has loaded.
    ``beside`` has the partitions of the stage that ran on the task's executor in the last committed epoch, and
    ``awaited`` the bins that this executor prefetches for the stage; the bins of both stay in its base. None: not
    known. ``controls`` are the control operations in progress; each of the ``senders`` tasks of the stage before sends
    messages of those that are not fast. ``knobs`` has those that do not have their defaults, ``flushed`` the operators
    that close everything open.
    """

    revision: Revision
    program: Digest
    times: EpochTimes = EpochTimes(clock=0)
    lineages: dict[str, bytes] = {}
    change: StageChange | None = None
    switch_at: InputPosition | None = None
    audit: AuditOrder | None = None
    live: tuple[Digest, ...] = ()
    beside: tuple[PartitionId, ...] | None = None
    awaited: tuple[BinId, ...] = ()
    knobs: dict[str, int] = {}
    flushed: tuple[str, ...] = ()
    assignments: Digest = Digest("")
    owners: bytes | None = None
    controls: tuple[ControlOrder, ...] = ()
    senders: int = 0


class Handle(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A running task must run the handlers of a fast control operation as soon as it can."""

    task: TaskId
    order: ControlOrder


class Switch(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The fast control message: a running task must switch as soon as it can, and report where it did."""

    task: TaskId
    change: StageChange


class Stay(msgspec.Struct, frozen=True, tag=True):
    """The task must not switch, or no longer has to: it continues under its current revision."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The coordinator has noted the report."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This attempt is not wanted: its epoch or run is over."""

    reason: str


class Prefetch(msgspec.Struct, frozen=True, tag=True):
    """Load these bins into the executor's base in the background: partitions that run there will own them soon.

    ``lineages`` has the committed state after ``epoch``, by operator of the stage. Sent again with every epoch, so that
    the base follows; a worker drops what it has not begun when a later one arrives, and may get any of them twice.
    """

    stage: StageIndex
    epoch: Epoch
    lineages: dict[str, bytes]
    bins: tuple[BinId, ...]
    bytes_per_s: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """The job ends: close the functions this process holds open for it."""


class ToWorkers(msgspec.Struct, frozen=True, tag=True, gc=False):
    """For a relay: tell these workers, each of which it knows by a number of its own.

    If the message is for a task, ``tasks`` has the task of each worker, and ``message`` is that for the first.
    """

    message: Handle | Switch | Release | Prefetch
    workers: tuple[int, ...]
    tasks: tuple[TaskNumbers, ...] = ()


OperationMessage = SwitchRequested | Reached | Exhausted
"""Messages from tasks to an operation. Those that are :data:`Posted` expect no answer."""
Posted = Reached | Exhausted | Handled
FromWorker = WorkerJoined | WorkerReleased | Prefetched | RelayJoined
"""Messages of a process, in whatever run."""
FromTask = TaskStarted | TaskFinished | TaskFailed | OperationMessage | Handled | FromWorker | FromRelay
ToTask = TaskOrder | Handle | Switch | Stay | Accepted | Refused | Release | Prefetch | ToWorkers


# ── events that only the driver makes ─────────────────────────────────────────────────────────────────────────────


class PrefetchRequest(msgspec.Struct, frozen=True):
    """An executor should load the bins of a stage into its base, reading at most ``bytes_per_s``."""

    executor: ExecutorId
    stage: StageIndex
    bins: tuple[BinId, ...]
    bytes_per_s: int


class EpochOpened(msgspec.Struct, frozen=True, tag=True):
    """The driver starts a run of an epoch.

    ``programs`` holds one digest per stage, in order, ``partitions`` the number of partitions of each stage behind an
    exchange, ``assignments`` the digest of the document ``owners`` (:func:`.pack_assignments`), ``lineages`` the
    lineages of each stage's operators. ``clock`` is the driver's, ``watermarks`` are those
    of the previous epoch. ``on_trial`` is the revision that can still be rolled back, if any. ``live`` names the
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
    """No rows will follow: all open windows close, whatever the watermark."""
    places: Places | None = None
    """Where partitions ran in the last committed epoch, if that is known."""
    prefetch: tuple[PrefetchRequest, ...] = ()
    """What executors should load ahead, as in :class:`PrefetchWanted`."""
    controls: tuple[ControlOrder, ...] = ()
    """The control operations that begin with this run."""
    knobs: dict[str, int] = {}
    """The knobs that tasks go by, as far as they do not have their defaults; see :mod:`midstream.flow.knobs`."""
    flushed: tuple[str, ...] = ()
    """Operators that close all that is open at the end of this epoch, whatever the watermark."""
    assignments: Digest = Digest("")
    owners: bytes = b""


class PrefetchWanted(msgspec.Struct, frozen=True, tag=True):
    """From now on, executors load ahead what these requests say, and nothing else."""

    requests: tuple[PrefetchRequest, ...]


class ChangeBegun(msgspec.Struct, frozen=True, tag=True):
    """The driver wants a change to take effect within the run in progress.

    ``programs`` are the stages' programs under the new revision. Operators by stage: ``heads``, which are told to
    switch, and ``followers``, which are updated but behind an exchange: the rows carry the new revision to them.
    """

    revision: Revision
    programs: tuple[Digest, ...]
    heads: dict[StageIndex, tuple[str, ...]]
    followers: dict[StageIndex, tuple[str, ...]]
    has_side_entrance: bool = False
    """Rows can reach an updated operator without passing a head; they meet its old version until the epoch ends."""
    live: tuple[Digest, ...] = ()
    """The blobs of the new configuration."""


class ControlBegun(msgspec.Struct, frozen=True, tag=True):
    """The driver wants the tasks that are at work to run the handlers of a fast control operation."""

    order: ControlOrder


class EpochSealed(msgspec.Struct, frozen=True, tag=True):
    """Spark reports that every job of the epoch succeeded; the coordinator must agree before it is committed."""

    epoch: Epoch
    run: Run


class EpochAbandoned(msgspec.Struct, frozen=True, tag=True):
    """The run will not be finished: it failed or was cancelled. Its tasks are fenced from now on."""

    epoch: Epoch
    run: Run


class JobEnding(msgspec.Struct, frozen=True, tag=True):
    """No more epochs will be opened; workers must close their functions."""


class Received(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A message arrived from a peer of the channel."""

    peer: bytes
    message: FromTask


Event = EpochOpened | PrefetchWanted | ChangeBegun | ControlBegun | EpochSealed | EpochAbandoned | JobEnding | Received


# ── instructions ──────────────────────────────────────────────────────────────────────────────────────────────────


class SwitchPoint(msgspec.Struct, frozen=True):
    """Where the tasks of a partition switch: nowhere in this epoch (None), or at a position."""

    stage: StageIndex
    partition: PartitionId
    position: InputPosition | None


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a peer."""

    peer: bytes
    message: ToTask


class Commit(msgspec.Struct, frozen=True):
    """The epoch is whole: write its manifest, then let Spark commit the batch.

    ``revision`` is the one that the next epoch begins with; ``switches`` has the points where tasks switched to it.
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
    bin_rows: dict[StageIndex, tuple[bytes, ...]] = {}
    """By stage: the rows of each bin that arrived, as each sender counted them (:func:`.pack_counts`)."""
    busy_us: dict[StageIndex, dict[PartitionId, int]] = {}
    """By stage and partition: the time that operators worked."""
    places: Places = {}
    """Where partitions ran. Those of workers that do not know their executor are left out."""
    state_read: int = 0
    """Bytes of state files that tasks read, because the bases of their executors lacked the rows."""
    worker_memory: int = 0
    """Resident memory of the largest worker, in bytes."""
    controls: dict[int, tuple[ControlReport, ...]] = {}
    """By number of a control operation that is complete: the reports of tasks, in the order of stages and partitions.
    """


class Reject(msgspec.Struct, frozen=True):
    """The epoch is not whole although Spark thinks so; the driver must run it again or fail. Never expected."""

    epoch: Epoch
    reason: str


class ChangeNoted(msgspec.Struct, frozen=True, gc=False):
    """Something happened to the change in progress, in one task or (``task`` is None) in the whole run.

    ``in_effect`` means that from now on no row of this epoch meets the old version of an updated operator.
    """

    revision: Revision
    task: TaskId | None
    what: str
    operators: tuple[str, ...]
    in_effect: bool


class ControlNoted(msgspec.Struct, frozen=True):
    """A fast control operation is complete: all tasks that were at work have run its handlers, or have ended."""

    number: int
    reports: tuple[ControlReport, ...]
    missed: int
    """Tasks that ended before they could."""


class GiveUpRun(msgspec.Struct, frozen=True):
    """A revision or a control operation that can be taken back has failed, so Spark need not retry its tasks."""

    epoch: Epoch
    run: Run


class PrefetchNoted(msgspec.Struct, frozen=True):
    """An executor has said what it has loaded ahead."""

    report: Prefetched


Instruction = Send | Commit | Reject | ChangeNoted | ControlNoted | GiveUpRun | PrefetchNoted
