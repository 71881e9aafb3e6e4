"""Attempts of tasks on the local runtime: advanced a slice at a time, by whoever wants."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Protocol

import pyarrow as pa

from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    Accepted,
    Exhausted,
    FromTask,
    Refused,
    StageChange,
    TaskFailed,
    TaskId,
    TaskOrder,
    TaskStarted,
    ToTask,
    WorkerId,
    WorkerJoined,
)
from midstream.engine.clock import Clock
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.errors import Fenced, OperatorFailed
from midstream.runtime.reporting import failure_of
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess

__all__ = ["Attempt", "World", "peer_of"]

MAX_SLICE = 64


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

    def told(self, task: TaskId) -> StageChange | None:
        """The change that this task has been told of since it last asked."""


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


class Attempt:
    """One attempt of a task."""

    def __init__(self, world: World, task: TaskId, batches: Sequence[pa.RecordBatch]) -> None:
        self.task = task
        self._world = world
        self._coordinator = world.coordinator
        self._output: list[pa.RecordBatch] = []
        self._steps = self._work(batches)

    def step(self) -> list[pa.RecordBatch] | None:
        """Advance; the output once the task has finished, else ``None``. Raises :class:`Fenced` when refused."""
        return self._output if next(self._steps, True) else None

    def close(self) -> None:
        """Die, wherever it is."""
        self._steps.close()

    def _work(self, batches: Sequence[pa.RecordBatch]) -> Generator[bool]:
        world = self._world
        worker = WorkerId("local", self.task.attempt)
        self._ask(WorkerJoined(worker))
        order = self._ask(TaskStarted(self.task, worker))
        assert isinstance(order, TaskOrder)
        world.resources.forget_all_but(order.live)
        yield False
        run: TaskRun | None = None
        revision = order.revision
        try:
            run = TaskRun(
                self.task,
                order,
                world.resources,
                world.access,
                clock=world.clock,
                sizer=SeededSizer(world.rng),
            )
            for ready in run.run(batches):
                self._output += ready
                yield False
                self._attend(run)
            report = run.finish()
            yield False  # its changes are written, but nobody knows yet
        except OperatorFailed as error:
            self._ask(TaskFailed(self.task, failure_of(error), revision if run is None else run.revision))
            raise
        finally:
            if run is not None:
                run.close()
        self._ask(report)

    def _attend(self, run: TaskRun) -> None:
        """Between slices: what a worker process does on Spark."""
        change = self._world.told(self.task)
        if change is not None:
            asked = run.offer(change)
            if isinstance(asked, Exhausted):
                self._world.say(asked, self._coordinator)
            elif asked is not None:
                if isinstance(self._ask(asked), Accepted):
                    run.switch()
                else:
                    run.stay()
        if (reached := run.reached()) is not None:
            self._world.say(reached, self._coordinator)

    def _ask(self, message: FromTask) -> ToTask:
        answer = self._world.say(message, self._coordinator)
        if isinstance(answer, Refused):
            raise Fenced(answer.reason)
        return answer
