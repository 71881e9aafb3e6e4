"""Has executors load the state of bins before they own them; see :class:`.Warming`.

A stage keeps its places as long as its number of partitions stays the same. If that changes, the engine places all
partitions anew, so bins may come to another executor although their partition stays the same. Therefore the runtime is
asked to propose places for the new number, state that will move is loaded there, and the proposal is adopted with the
step that changes the number. The same happens when partitions are spread anew because executors have joined.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from midstream.checkpoint.committed_state import CommittedState
from midstream.control.messages import PrefetchRequest
from midstream.control.placement import Placement
from midstream.ids import BinId, ExecutorId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.runtime.edge import Edge

__all__ = ["BYTES_PER_S", "ExecutorWarming"]

BYTES_PER_S = 32 << 20
"""Most bytes of state that an executor loads ahead in a second, so that its tasks are not slowed down."""

_log = logging.getLogger("midstream")

_NOWHERE = -1
"""Used instead of an executor if it is unknown where a partition runs."""
_Places = Mapping[PartitionId, ExecutorId]
_Coming = dict[tuple[ExecutorId, StageIndex], frozenset[BinId]]


class ExecutorWarming:
    """Called with the driver's lock held, when an epoch begins. ``prefetch`` passes requests on to executors."""

    def __init__(self, placement: Placement, edge: Edge, prefetch: Callable[[Sequence[PrefetchRequest]], None]) -> None:
        self._placement = placement
        self._edge = edge
        self._prefetch = prefetch
        self._proposed: dict[int, _Places | None] = {}
        """By number of partitions: where they would be; None until the runtime has proposed that."""
        self._spreading: frozenset[int] = frozenset()
        """Numbers of partitions that stay the same, but are spread anew with the next step."""

    def want(self, now: Assignments, later: Sequence[Assignments]) -> None:
        """From now on, executors load the state that they will own under any of these assignments, and nothing else."""
        bins: dict[tuple[ExecutorId, StageIndex], set[BinId]] = defaultdict(set)
        for then in later:
            for key, numbers in (self._coming(now, then) or {}).items():
                bins[key] |= numbers
        wanted = tuple(
            PrefetchRequest(executor, stage, tuple(sorted(numbers)), BYTES_PER_S)
            for (executor, stage), numbers in sorted(bins.items())
        )
        if not later:
            self._proposed.clear()
            self._spreading = frozenset()
        if wanted != self._placement.requests:
            self._prefetch(wanted)

    def are_warm(self, now: Assignments, then: Assignments, committed: CommittedState) -> bool:
        """Whether executors have loaded what they will own, except for the changes of the last epoch. True where places
        are unknown."""
        coming = self._coming(now, then)
        if coming is None:
            return False
        for (executor, stage), numbers in coming.items():
            warm = self._placement.warmth(executor, stage)
            if not numbers <= warm.bins or warm.epoch < committed.epoch - 1:
                return False
        return True

    def cold(self, now: Assignments, then: Assignments) -> int | None:
        """How many bins executors have not loaded yet; None while it is being found out which."""
        coming = self._coming(now, then)
        if coming is None:
            return None
        return sum(len(numbers - self._placement.warmth(*key).bins) for key, numbers in coming.items())

    def flip(self, now: Assignments, then: Assignments) -> None:
        """The next epoch begins with these assignments: stages with another number of partitions go where proposed."""
        for number in {each.partitions for stage, each in then.items() if self._is_anew(now[stage], each)}:
            if self._proposed.get(number):
                self._edge.adopt_places(number)
        self._spreading = frozenset()

    def spread(self, assignments: Assignments) -> None:
        """With the next flip, partitions of stages with these numbers of partitions get other executors."""
        self._spreading = frozenset(each.partitions for each in assignments.values())

    def _is_anew(self, now: Assignment, then: Assignment) -> bool:
        return now.partitions != then.partitions or then.partitions in self._spreading

    def _coming(self, now: Assignments, then: Assignments) -> _Coming | None:
        """By executor and stage: the bins that it does not own yet; None while that is being found out."""
        found: _Coming = {}
        for stage, wanted in then.items():
            here = self._placement.of(stage)
            there = self._places(stage, now[stage], wanted)
            if there is None:
                return None
            names = sorted({*here.values(), *there.values()})
            was, at = _hosts(now[stage], here, names), _hosts(wanted, there, names)
            comes = (was != at) & (was != _NOWHERE) & (at != _NOWHERE)
            for number in np.unique(at[comes]).tolist():
                bins = np.flatnonzero(comes & (at == number))
                found[names[number], stage] = frozenset(map(BinId, bins.tolist()))
        return found

    def _places(self, stage: StageIndex, now: Assignment, then: Assignment) -> _Places | None:
        if not self._is_anew(now, then):
            return self._placement.of(stage)
        if then.partitions not in self._proposed:
            self._proposed[then.partitions] = None
            self._edge.meanwhile(lambda: self._propose(then.partitions))
        return self._proposed[then.partitions]

    def _propose(self, partitions: int) -> None:
        try:
            self._proposed[partitions] = self._edge.propose_places(partitions)
        except Exception as error:  # the engine could not; then everything is read when it is taken over
            _log.warning("where %d partitions will run is unknown: %s", partitions, error)
            self._proposed[partitions] = {}


def _hosts(assignment: Assignment, places: _Places, names: Sequence[ExecutorId]) -> npt.NDArray[np.int64]:
    """By bin: the position of the executor where its owner runs."""
    hosts = np.full(assignment.partitions, _NOWHERE)
    for partition, name in places.items():
        if partition < assignment.partitions:
            hosts[partition] = names.index(name)
    return hosts[assignment.owner_array]
