"""The interface between the driver of epochs and a runtime: what only the runtime can do, and what a run is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from midstream.change.configuration import Configuration
from midstream.checkpoint.committed_state import CommittedState
from midstream.checkpoint.sweeper import Sweeper
from midstream.control.messages import Event, Instruction, TaskFailed
from midstream.flow.model import Graph
from midstream.ids import Epoch, ExecutorId, PartitionId, Run
from midstream.storage.table_files import SinkFile

__all__ = ["Control", "DriverCrashed", "Edge", "EpochEntry", "HandOverDue", "OpenRun", "ProcessEnded"]


class ProcessEnded(BaseException):
    """Raised by tests instead of killing this process; nothing handles it."""


class DriverCrashed(ProcessEnded):
    """Raised by tests of the local runtime, which then starts the driver again."""


class HandOverDue(Exception):
    """The next epoch has other sources than the engine reads, so the engine's query has to be handed over first."""


class Control(Protocol):
    """The driver's interface to the coordinator."""

    def tell(self, event: Event) -> Sequence[Instruction]:
        """Have the coordinator handle an event and send its messages to tasks; return what concerns the driver."""

    @property
    def failures(self) -> tuple[TaskFailed, ...]:
        """The failures that tasks of the run in progress have reported."""

    def journal(self) -> bytes:
        """The events of the newest run."""


class Edge(Protocol):
    """The runtime's part in the driver's work."""

    def make_ready(self) -> None:
        """A run of an epoch is about to begin."""

    def is_lost(self, error: BaseException) -> bool:
        """Whether a run failed although no function did, as when Spark cannot run its jobs."""

    def cancel(self, run: OpenRun, *, interrupt: bool = False) -> None:
        """Make the runtime stop computing this run soon; it then reports a failure. Returns at once.

        ``interrupt`` includes the user's functions that run on the driver.
        """

    def start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` after ``seconds``; this replaces an earlier timer."""

    def stop_timer(self) -> None:
        """Stop the timer."""

    def try_transforms(self, graph: Graph, names: Sequence[str]) -> None:
        """Call transforms on no rows; raises :class:`~midstream.errors.FlowError` if one cannot work."""

    def check_sinks(self, sinks: Graph) -> None:
        """Refuse sinks of a change that cannot be written here; raises
        :class:`~midstream.errors.MidstreamError`. ``sinks`` has no other operators."""

    def check_knobs(self, tuned: Mapping[str, int | None]) -> None:
        """Raises :class:`~midstream.errors.FlowError` if this runtime cannot set a knob that a change tunes."""

    def propose_places(self, partitions: int) -> Mapping[PartitionId, ExecutorId]:
        """Spread partitions over the executors that exist now, and return where each would be. Nothing runs there until
        :meth:`adopt_places`, so their future state can be loaded ahead. Empty if partitions do not stick to executors
        here. This replaces an earlier proposal, and takes about as long as a small epoch."""

    def adopt_places(self, partitions: int) -> None:
        """From the next run on, stages with this number of partitions run where the newest proposal says."""

    def meanwhile(self, call: Callable[[], object]) -> None:
        """Call this in the background while epochs are computed, or at once in a runtime without a background."""

    def aside(self, call: Callable[[], object], seconds: float, overdue: Callable[[], object]) -> None:
        """Call the user's code on the driver, where it may take as long as it likes: in a thread that nobody waits for,
        or at once in a runtime without threads. If it has not returned after ``seconds``, call ``overdue``, too."""

    def check_sources(self, graph: Graph, names: Sequence[str]) -> None:
        """Raises :class:`~midstream.errors.MidstreamError` if this runtime cannot hand over to sources of a flow that
        a change adds."""

    def prepare_sources(self, graph: Graph) -> None:
        """Make ready what a hand-over to the sources of a flow needs, while epochs go on.

        Raises :class:`~midstream.errors.MidstreamError` if they cannot be read.
        """

    def settle_sources(self) -> None:
        """A request has been taken or refused: drop what was prepared, unless the next hand-over needs it."""

    def await_sources(self, seconds: float) -> bool:
        """Whether the sources have said how far they reach since the last hand-over, or do so within this time."""

    def reads(self, graph: Graph) -> bool:
        """Whether the engine reads the sources of this flow now."""

    def hand_over(self) -> None:
        """No run is open, and the next epoch has other sources: end the engine's query, and have another one continue
        after the newest epoch. Returns at once."""

    def sweep(self, sweeper: Sweeper) -> None:
        """Have the sweeper remove what is due, now or during the next epochs."""

    def secure(self, run: OpenRun) -> None:
        """Sync the engine's own log of this run to disk, because a manifest is about to refer to it."""

    def at(self, step: str) -> None:
        """The driver is at this step of a commit. For tests, which may make it crash there."""


@dataclass(frozen=True)
class EpochEntry:
    """The entry of an epoch in the engine's own log; the same in every run, also after a restart."""

    clock: int
    """When the epoch was planned, in microseconds since 1970."""
    offsets: str = ""
    """Identifies the rows of the epoch."""
    closing: bool = False
    """Whether the epoch closes all windows; it has no rows, and is the job's last."""
    read: tuple[str, ...] = ()
    """How far each source is read with this epoch, in its own words, in the order of the query; empty if unknown."""


@dataclass(frozen=True)
class OpenRun:
    """A run in progress. It is over when it is committed or has failed."""

    epoch: Epoch
    run: Run
    entry: EpochEntry
    configuration: Configuration
    committed: CommittedState
    began: float
    """In seconds since 1970."""
    planned: list[float] = field(default_factory=list, compare=False)
    """When it began to compute; None before that."""
    files: dict[str, tuple[SinkFile, ...]] = field(default_factory=dict, compare=False)
    """By sink: files that were staged outside of stages, behind a transform."""
    is_over: threading.Event = field(default_factory=threading.Event, compare=False)
