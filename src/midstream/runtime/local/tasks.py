"""Attempts of tasks on the local runtime: advanced a slice at a time, by their caller.

An attempt runs :mod:`midstream.runtime.attempt`, as on Spark. This module simulates its surroundings: its own process,
and the thread of that process that listens for changes. In reality there is one thread, which plays the listener at all
moments at which that could run (:meth:`Attempt.listen`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow as pa

from midstream.control.coordinator import Coordinator
from midstream.control.messages import FromTask, Refused, StageChange, TaskId, ToTask, WorkerId, WorkerJoined
from midstream.engine.clock import Clock
from midstream.engine.control_order import ControlOrder
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import Fenced
from midstream.ids import BinId, Digest
from midstream.runtime.attempt import run_attempt
from midstream.runtime.known_assignments import KnownAssignments
from midstream.runtime.local.executors import LocalExecutor
from midstream.runtime.switch_lock import SwitchLock
from midstream.runtime.task import TaskRun
from midstream.state.lineage import Lineage

__all__ = ["Attempt", "World", "peer_of"]

MAX_SLICE = 64
HEARD_BETWEEN_SLICES = 0.5
HEARD_WITHIN_A_SLICE = 0.2
"""Chances that a message under way arrives at a moment of each kind. A slice has many such moments."""


class World(Protocol):
    """What an attempt needs from its runtime."""

    resources: Resources
    rng: random.Random
    clock: Clock

    @property
    def coordinator(self) -> Coordinator:
        """The current driver's coordinator."""

    def say(self, message: FromTask, to: Coordinator) -> ToTask:
        """Deliver a message and return the answer."""

    def told(self, task: TaskId, chance: float) -> StageChange | None:
        """The change for this task, if there is one and its message arrives now, which depends on the chance."""

    def asked(self, task: TaskId, chance: float) -> Sequence[ControlOrder]:
        """The fast control operations for this task whose messages arrive now."""


class SeededSizer(SliceSizer):
    """Slices of random length: results must not depend on where slices end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(rows=rng.randint(1, MAX_SLICE))

    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        """Draw another length, whatever this slice took."""
        self.rows = self._rng.randint(1, MAX_SLICE)


def peer_of(worker: WorkerId) -> bytes:
    """The address of an attempt's worker; each attempt has its own worker."""
    return str(worker).encode()


class _Turn:
    """Used instead of a lock. There is one thread, so it only records whether the task is within a slice."""

    def __init__(self) -> None:
        self._is_taken = False

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; return whether that succeeded."""
        assert not (blocking and self._is_taken), "nothing else runs, so this would wait forever"
        is_free, self._is_taken = not self._is_taken, True
        return is_free

    def release(self) -> None:
        """Release the lock."""
        self._is_taken = False


class _HearingClock:
    """The world's clock. Operators are timed within slices, so it can let messages arrive there."""

    def __init__(self, attempt: Attempt, clock: Clock) -> None:
        self._attempt = attempt
        self.wall_us = clock.wall_us
        self._stopwatch_ns = clock.stopwatch_ns

    def stopwatch_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""
        self._attempt.listen(HEARD_WITHIN_A_SLICE)
        return self._stopwatch_ns()


class Attempt:
    """One attempt of a task, and the :class:`~midstream.runtime.attempt.TaskHost` that it runs in."""

    def __init__(self, world: World, executor: LocalExecutor, task: TaskId, batches: Sequence[pa.RecordBatch]) -> None:
        self.task = task
        self.executor = executor
        self.name = WorkerId("local", task.attempt, executor.name)
        self.resources = world.resources
        self.state = executor.state
        self.retirement = executor.retirement
        self.clock: Clock = _HearingClock(self, world.clock)
        self._world = world
        self._coordinator = world.coordinator
        self._lock: SwitchLock | None = None
        self._output: list[pa.RecordBatch] = []
        self._steps = self._work(batches)

    def step(self) -> list[pa.RecordBatch] | None:
        """Advance; return the output once the task has finished, else ``None``. Raises :class:`Fenced` if refused."""
        return self._output if next(self._steps, True) else None

    def close(self) -> None:
        """Kill the attempt, wherever it is."""
        self._steps.close()

    def _work(self, batches: Sequence[pa.RecordBatch]) -> Generator[bool]:
        self.ask(WorkerJoined(self.name))
        with contextlib.closing(run_attempt(self.task, self, self._arriving(batches))) as pauses:
            for ready in pauses:
                self._output += ready
                yield False
                self.listen(HEARD_BETWEEN_SLICES)

    def _arriving(self, batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches; messages may arrive while the task waits for each."""
        for batch in batches:
            self.listen(HEARD_BETWEEN_SLICES)
            yield batch

    def listen(self, chance: float) -> None:
        """Play the thread that listens for changes, if it gets its turn now."""
        if self._lock is None:
            return
        if (change := self._world.told(self.task, chance)) is not None:
            self._lock.tell(change, self._post)
        for order in self._world.asked(self.task, chance):
            self._lock.handle(order, self._post)

    # ── the process ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def known(self) -> KnownAssignments:
        """The assignments sent to its executor; all of its tasks run in one process."""
        return self.executor.known

    @known.setter
    def known(self, known: KnownAssignments) -> None:
        self.executor.known = known

    def ask(self, message: FromTask) -> ToTask:
        """Return the coordinator's answer. Raises :class:`Fenced` if it refuses."""
        answer = self._world.say(message, self._coordinator)
        if isinstance(answer, Refused):
            raise Fenced(answer.reason)
        return answer

    def _post(self, message: FromTask) -> None:
        self._world.say(message, self._coordinator)

    def sizer(self, program: Digest) -> SliceSizer:
        """Slices of random length."""
        return SeededSizer(self._world.rng)

    def forget_all_but(self, live: Collection[Digest]) -> None:
        """Drop everything that no task of the job will use any more; other tasks of this process hold what they use."""
        self.resources.forget_all_but(live)

    @contextlib.contextmanager
    def attending(self, task: TaskId, work: TaskRun) -> Iterator[SwitchLock]:
        """Within this block, the task is notified of changes."""
        self.executor.prefetcher.task_begins(task.epoch)
        with SwitchLock(work, self.ask, self._post, _Turn()) as self._lock:
            yield self._lock

    def free(self, lineage: Lineage, bins: Collection[BinId]) -> None:
        """Free bins when the executor gets its turn."""
        self.executor.prefetcher.free(lineage, bins)

    def keep(self, operator: str, bins: Collection[BinId]) -> None:
        """Do not free bins that are needed again."""
        self.executor.prefetcher.keep(operator, bins)

    def watched(self, task: TaskId, order: ControlOrder, operator: str, handler: str) -> AbstractContextManager[None]:
        """Time does not pass by itself here, so a call that does not return is not noticed."""
        return contextlib.nullcontext()

    def after_task(self, program: Digest) -> None:
        """Nothing to do: other tasks of this process are running."""
