"""Every message between coordinator and task, and every event and instruction of the coordinator.

All are frozen msgspec structs. Those that cross the channel or are kept in a journal are tagged with their name, so
that one decoder reads them all.
"""

from __future__ import annotations

import msgspec

from midstream.data.times import EpochTimes, Watermarks
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex, WireId
from midstream.metrics import OperatorStats
from midstream.state.files import FileRef
from midstream.state.lineage import Rewrite


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


class TaskStarted(msgspec.Struct, frozen=True, tag=True):
    """A task asks what to run."""

    task: TaskId


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


class Failure(msgspec.Struct, frozen=True):
    """Why the user's code failed, ready to show: no object in it needs the user's classes to be read."""

    operator: str
    error: str
    row: str | None
    traceback: str


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """The user's code failed in a task; the task fails too, and Spark decides whether to retry it."""

    task: TaskId
    failure: Failure


class WorkerJoined(msgspec.Struct, frozen=True, tag=True):
    """A worker process says that it holds open functions and wants to be told when to close them."""

    host: str
    pid: int


class WorkerReleased(msgspec.Struct, frozen=True, tag=True):
    """A worker process has closed its functions."""

    host: str
    pid: int


# ── coordinator → task ────────────────────────────────────────────────────────────────────────────────────────────


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """What a task runs: the configuration, never guessed, always given.

    ``program`` is the digest of the stage's program in the blob store. ``bins`` says which partition of a stage each
    bin of the key space belongs to. ``lineages`` holds, encoded, the state from which the stage's operators go on.
    """

    revision: Revision
    program: Digest
    bins: tuple[int, ...]
    times: EpochTimes = EpochTimes(clock=0)
    lineages: dict[str, bytes] = {}


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The coordinator has noted the report."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This attempt is not wanted: its epoch or run is over."""

    reason: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """The job ends: close the functions this process holds open for it."""


FromTask = TaskStarted | TaskFinished | TaskFailed | WorkerJoined | WorkerReleased
ToTask = Assignment | Accepted | Refused | Release


# ── events that only the driver makes ─────────────────────────────────────────────────────────────────────────────


class EpochOpened(msgspec.Struct, frozen=True, tag=True):
    """The driver starts a run of an epoch.

    ``programs`` holds one digest per stage, in order, ``lineages`` by stage the state of its operators. ``clock`` is
    the driver's, ``watermarks`` are those of the epoch before.
    """

    epoch: Epoch
    run: Run
    revision: Revision
    programs: tuple[Digest, ...]
    bins: tuple[int, ...]
    lineages: dict[StageIndex, dict[str, bytes]] = {}
    clock: int = 0
    watermarks: Watermarks = Watermarks({})


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


Event = EpochOpened | EpochSealed | EpochAbandoned | JobEnding | Received


# ── instructions ──────────────────────────────────────────────────────────────────────────────────────────────────


class Send(msgspec.Struct, frozen=True):
    """Give a message to a peer."""

    peer: bytes
    message: ToTask


class Commit(msgspec.Struct, frozen=True):
    """The epoch is whole: write its manifest, then let Spark commit the batch."""

    epoch: Epoch
    revision: Revision
    operators: tuple[OperatorStats, ...]
    tasks: int
    emitted: dict[WireId, int]
    states: dict[str, tuple[StateChange, ...]] = {}
    watermarks: Watermarks = Watermarks({})
    widest_row: int = 0


class Reject(msgspec.Struct, frozen=True):
    """The epoch is not whole although Spark thinks so; the driver must run it again or fail. Never expected."""

    epoch: Epoch
    reason: str


Instruction = Send | Commit | Reject
