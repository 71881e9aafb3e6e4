"""Simulated executors of the local runtime: each has its own base, and may be lost with it."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field, replace

from midstream.control.messages import Prefetch, WorkerId
from midstream.engine.clock import Clock
from midstream.errors import FlowError
from midstream.ids import ExecutorId, PartitionId
from midstream.runtime.known_assignments import KnownAssignments
from midstream.runtime.prefetcher import Prefetcher
from midstream.state.access import StateAccess
from midstream.state.retirement import Retirement

__all__ = ["LocalExecutor", "LocalExecutors", "check_executors"]


@dataclass
class LocalExecutor:
    """An executor: the things that its tasks share."""

    name: ExecutorId
    state: StateAccess
    prefetcher: Prefetcher
    retirement: Retirement = field(default_factory=Retirement)
    known: KnownAssignments = field(default_factory=KnownAssignments)
    inbox: list[Prefetch] = field(default_factory=list)
    """Messages on their way to it."""

    def wipe(self) -> None:
        """Delete its state. No task may be using it."""
        self.state.close()
        shutil.rmtree(self.state.local, ignore_errors=True)


def check_executors(count: int) -> int:
    """Refuse a number of executors that is not a whole number from 1 on."""
    if type(count) is not int or count < 1:
        raise FlowError(f"executors={count!r}: give a whole number, 1 or more")
    return count


class LocalExecutors:
    """The executors of a run, and which partitions stick to which. With a single one, nothing is left to chance."""

    def __init__(self, count: int, access: StateAccess, clock: Clock, rng: random.Random) -> None:
        self._access = access
        self._clock = clock
        self._rng = rng
        self._made = 0
        self._home: dict[tuple[int, int], LocalExecutor] = {}
        self._proposed: dict[int, list[LocalExecutor]] = {}
        self.all: list[LocalExecutor] = []
        for _ in range(count):
            self.add()

    @property
    def names(self) -> frozenset[ExecutorId]:
        """The names of the living executors."""
        return frozenset(each.name for each in self.all)

    def add(self) -> LocalExecutor:
        """Add an executor with an empty base."""
        name = ExecutorId(str(self._made))
        self._made += 1
        state = replace(self._access, local=os.path.join(self._access.local, name))
        worker = WorkerId("local", -self._made, name)
        self.all.append(LocalExecutor(name, state, Prefetcher(state, worker, self._clock)))
        return self.all[-1]

    def replace(self, lost: LocalExecutor) -> None:
        """Let another one take its place; its partitions move to any executors."""
        self.all.remove(lost)
        self._home = {key: home for key, home in self._home.items() if home is not lost}
        self.add()

    def of(self, partitions: int | None, partition: int) -> LocalExecutor:
        """Where a task runs. Stages with equal numbers of partitions have the same places, as on Spark. None:
        anywhere."""
        if len(self.all) == 1:
            return self.all[0]
        if partitions is None:
            return self._rng.choice(self.all)
        home = self._home.get((partitions, partition))
        if home is None:
            home = self._home[partitions, partition] = self._rng.choice(self.all)
        return home

    def propose(self, partitions: int) -> dict[PartitionId, ExecutorId]:
        """Choose new places for partitions, as evenly as possible."""
        spread = [self.all[number % len(self.all)] for number in range(partitions)]
        self._rng.shuffle(spread)
        self._proposed[partitions] = spread
        return {PartitionId(number): executor.name for number, executor in enumerate(spread)}

    def adopt(self, partitions: int) -> None:
        """Use the newest proposal, as far as its executors still exist."""
        for number, executor in enumerate(self._proposed.pop(partitions, ())):
            if executor in self.all:
                self._home[partitions, number] = executor

    def close(self) -> None:
        """Close all bases."""
        for each in self.all:
            each.state.close()
