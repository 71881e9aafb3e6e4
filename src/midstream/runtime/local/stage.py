"""The running attempts of one stage on the local runtime. The runtime decides which one advances or dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from midstream.ids import StageIndex
from midstream.runtime.local.exchange import Exchanged, StageInput
from midstream.runtime.local.executors import LocalExecutor
from midstream.runtime.local.tasks import Attempt

__all__ = ["StageTasks", "thinned"]

FULL_ATTEMPTS = 4
"""Attempts of a task that die with the full probability."""
MOST_AT_ONCE = 3
"""Most attempts of a task at the same time. Spark has two. Without a limit, none would end."""


def thinned(tries: int, full: int) -> float:
    """The factor by which faults become rarer with repeated tries: half as often with each after ``full``.

    >>> [thinned(tries, 4) for tries in (1, 4, 5, 6)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return float(0.5 ** max(0, tries - full))


class StageTasks:
    """The attempts of a stage's tasks, and of tasks of the stage before whose output was lost meanwhile.

    Used until :attr:`are_done`: then ``results`` has the output of every requested partition. ``active`` is never
    empty before that.
    """

    def __init__(
        self,
        stage: StageIndex,
        data: StageInput,
        wanted: Iterable[int],
        launch: Callable[[StageIndex, int, Sequence[pa.RecordBatch]], Attempt],
    ) -> None:
        self.active: list[Attempt] = []
        self.results: dict[int, list[pa.RecordBatch]] = {}
        self._stage = stage
        self._data = data
        self._before = data if isinstance(data, Exchanged) else None
        self._wanted = frozenset(wanted)
        self._launch = launch
        self._launched: Counter[tuple[StageIndex, int]] = Counter()
        self._missing: set[int] = set()  # partitions of the stage before whose output is lost
        self._starved: set[int] = set()  # partitions that cannot start before that output is back
        for partition in sorted(self._wanted):
            self._start(stage, partition)

    @property
    def are_done(self) -> bool:
        """Whether every partition has finished once."""
        return len(self.results) == len(self._wanted)

    def thinned(self, attempt: Attempt) -> float:
        """The factor by which this attempt dies more rarely, after the earlier attempts of its task."""
        return thinned(self._launched[attempt.task.stage, attempt.task.partition], FULL_ATTEMPTS)

    def speculate(self, attempt: Attempt) -> None:
        """Start another attempt of this task, unless there are many."""
        if self._at_work(attempt.task.stage, attempt.task.partition) < MOST_AT_ONCE:
            self._start(attempt.task.stage, attempt.task.partition)

    def crash(self, attempt: Attempt) -> None:
        """This attempt dies. Another one starts if its output is needed and no other attempt is running."""
        stage, partition = attempt.task.stage, attempt.task.partition
        self.active.remove(attempt)
        attempt.close()
        is_needed = partition not in self.results if self._is_reader(stage) else partition in self._missing
        if is_needed and not self._at_work(stage, partition):
            self._start(stage, partition)

    def lose_executor(self, lost: LocalExecutor) -> None:
        """All attempts on an executor die with it."""
        for attempt in [each for each in self.active if each.executor is lost]:
            self.crash(attempt)

    def lose_input(self, attempt: Attempt) -> bool:
        """This attempt finds output of the stage before lost, and dies. Returns whether that was possible."""
        if self._before is None or self._missing or not self._is_reader(attempt.task.stage):
            return False
        sender = self._before.some_sender()
        self._missing.add(sender)
        self._start(self._before.output.stage, sender)
        self.crash(attempt)
        return True

    def step(self, attempt: Attempt) -> None:
        """Advance this attempt."""
        output = attempt.step()
        if output is None:
            return
        self.active.remove(attempt)
        if self._is_reader(attempt.task.stage):
            self.results.setdefault(attempt.task.partition, output)
        elif self._before is not None and attempt.task.partition in self._missing:
            self._missing.remove(attempt.task.partition)
            self._before.replace(attempt.task.partition, output)
            starved, self._starved = self._starved, set()
            for partition in sorted(starved):
                self._start(self._stage, partition)

    def _is_reader(self, stage: StageIndex) -> bool:
        return stage == self._stage

    def _at_work(self, stage: StageIndex, partition: int) -> int:
        return sum((each.task.stage, each.task.partition) == (stage, partition) for each in self.active)

    def _start(self, stage: StageIndex, partition: int) -> None:
        """Start an attempt, or let it wait until its input exists."""
        is_reader = self._is_reader(stage)
        if is_reader and self._missing:
            self._starved.add(partition)
            return
        assert is_reader or self._before is not None, f"stage {stage} is not at work"
        read = self._data if is_reader or self._before is None else self._before.output.read
        self._launched[stage, partition] += 1
        self.active.append(self._launch(stage, partition, read.of(partition)))
