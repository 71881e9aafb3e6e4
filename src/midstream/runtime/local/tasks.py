"""Attempts of tasks on the local runtime: advanced a slice at a time, by whoever wants.

What an attempt does is :mod:`midstream.runtime.attempt`, as on Spark. Here is what surrounds it: a process of its own,
and the thread of that process that listens for changes. There is only one thread really; it plays the other one at the
moments at which that could get in between (:meth:`Attempt._listen`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from midstream.control.coordinator import Coordinator
from midstream.control.messages import FromTask, Refused, StageChange, TaskId, ToTask, WorkerId, WorkerJoined
from midstream.engine.clock import Clock
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import Fenced
from midstream.ids import Digest
from midstream.runtime.attempt import run_attempt
from midstream.runtime.switch_lock import SwitchLock
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess

__all__ = ["Attempt", "World", "peer_of"]

MAX_SLICE = 64
HEARD_BETWEEN_SLICES = 0.5
HEARD_WITHIN_A_SLICE = 0.05
"""Chances, at each moment of the kind, that a message which is on its way arrives. A slice has many such moments."""


class World(Protocol):
    """What an attempt needs of the runtime that it lives in."""

    resources: Resources
    access: StateAccess
    rng: random.Random
    clock: Clock

    @property
    def coordinator(self) -> Coordinator:
        """The one of the driver that is alive."""

    def say(self, message: FromTask, to: Coordinator) -> ToTask:
        """Deliver a message; the answer comes back at once."""

    def told(self, task: TaskId, chance: float) -> StageChange | None:
        """The change that this task is told of now, if there is one on its way and it arrives, which has a chance."""


class SeededSizer(SliceSizer):
    """Slices of random length: results must not depend on where slices end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(rows=rng.randint(1, MAX_SLICE))

    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        """Another length, whatever this one took."""
        self.rows = self._rng.randint(1, MAX_SLICE)


def peer_of(worker: WorkerId) -> bytes:
    """Where the worker of an attempt is reached; each attempt has one of its own."""
    return str(worker).encode()


class _Turn:
    """In place of a lock. There is one thread, so all there is to say is whether the task is within a slice."""

    def __init__(self) -> None:
        self._is_taken = False

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; whether that could be done."""
        assert not (blocking and self._is_taken), "nobody else runs, so this would wait for ever"
        is_free, self._is_taken = not self._is_taken, True
        return is_free

    def release(self) -> None:
        """Let go of it."""
        self._is_taken = False


class _HearingClock:
    """The world's clock. Operators are timed within slices, so that is where messages can arrive within one."""

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

    def __init__(self, world: World, task: TaskId, batches: Sequence[pa.RecordBatch]) -> None:
        self.task = task
        self.name = WorkerId("local", task.attempt)
        self.resources = world.resources
        self.state = world.access
        self.clock: Clock = _HearingClock(self, world.clock)
        self._world = world
        self._coordinator = world.coordinator
        self._lock: SwitchLock | None = None
        self._output: list[pa.RecordBatch] = []
        self._steps = self._work(batches)

    def step(self) -> list[pa.RecordBatch] | None:
        """Advance; the output once the task has finished, else ``None``. Raises :class:`Fenced` when refused."""
        return self._output if next(self._steps, True) else None

    def close(self) -> None:
        """Die, wherever it is."""
        self._steps.close()

    def _work(self, batches: Sequence[pa.RecordBatch]) -> Generator[bool]:
        self.ask(WorkerJoined(self.name))
        with contextlib.closing(run_attempt(self.task, self, self._arriving(batches))) as pauses:
            for ready in pauses:
                self._output += ready
                yield False
                self.listen(HEARD_BETWEEN_SLICES)

    def _arriving(self, batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, for each of which the task waits."""
        for batch in batches:
            self.listen(HEARD_BETWEEN_SLICES)
            yield batch

    def listen(self, chance: float) -> None:
        """What the thread that hears of changes does, if it gets its turn now."""
        if self._lock is not None and (change := self._world.told(self.task, chance)) is not None:
            self._lock.tell(change, self._post)

    # ── the process ───────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, message: FromTask) -> ToTask:
        """The coordinator's answer. Raises :class:`Fenced` if it refuses."""
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
        """Let go of what no task of the job will use any more; other tasks of this process hold what they use."""
        self.resources.forget_all_but(live)

    @contextlib.contextmanager
    def attending(self, task: TaskId, work: TaskRun) -> Iterator[SwitchLock]:
        """Inside, the task hears of changes."""
        with SwitchLock(work, self.ask, self._post, _Turn()) as self._lock:
            yield self._lock

    def after_task(self, program: Digest) -> None:
        """Nothing: other tasks of this process are at work."""
