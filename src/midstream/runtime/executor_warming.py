"""Has executors load the state of bins before it is theirs; see :class:`.Warming`.

A stage keeps its places as long as its number of partitions stays. If that changes, the engine places all partitions
anew, so bins may come to another executor although their partition stays the same. Therefore the runtime is asked
to propose places for the new number, what will be elsewhere is loaded there, and the proposal is adopted with the step
that changes the number.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from midstream.checkpoint.committed_state import CommittedState
from midstream.control.messages import PrefetchRequest
from midstream.control.placement import Placement
from midstream.ids import BinId, ExecutorId, PartitionId, StageIndex
from midstream.planner.assignment import Assignment, Assignments
from midstream.runtime.edge import Edge

__all__ = ["BYTES_PER_S", "ExecutorWarming"]

BYTES_PER_S = 32 << 20
"""Bytes of state that an executor loads ahead in a second at most, so that its tasks do not feel it."""

_log = logging.getLogger("midstream")

_Places = Mapping[PartitionId, ExecutorId]
_Coming = dict[tuple[ExecutorId, StageIndex], frozenset[BinId]]


class ExecutorWarming:
    """Called with the driver's lock held, when an epoch begins. ``prefetch`` passes requests on to executors."""

    def __init__(self, placement: Placement, edge: Edge, prefetch: Callable[[Sequence[PrefetchRequest]], None]) -> None:
        self._placement = placement
        self._edge = edge
        self._prefetch = prefetch
        self._proposed: dict[int, _Places | None] = {}
        """By number of partitions: where they would be; None until the runtime has said so."""

    def want(self, now: Assignments, later: Sequence[Assignments]) -> None:
        """From now on, executors are to load what they will have under any of these assignments, and nothing else."""
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
        if wanted != self._placement.requests:
            self._prefetch(wanted)

    def are_warm(self, now: Assignments, then: Assignments, committed: CommittedState) -> bool:
        """Whether executors have all they can have of what comes to them: at most the changes of the last epoch are
        missing. True where places are not known."""
        coming = self._coming(now, then)
        if coming is None:
            return False
        for (executor, stage), numbers in coming.items():
            warm = self._placement.warmth(executor, stage)
            if not numbers <= warm.bins or warm.epoch < committed.epoch - 1:
                return False
        return True

    def flip(self, now: Assignments, then: Assignments) -> None:
        """The next epoch begins with these assignments: stages with another number of partitions go where proposed."""
        for stage, assignment in then.items():
            if now[stage].partitions != assignment.partitions and self._proposed.get(assignment.partitions):
                self._edge.adopt_places(assignment.partitions)

    def _coming(self, now: Assignments, then: Assignments) -> _Coming | None:
        """By executor and stage: the bins that it does not have now; None if that is to be found out."""
        found: dict[tuple[ExecutorId, StageIndex], set[BinId]] = defaultdict(set)
        for stage, wanted in then.items():
            here = self._placement.of(stage)
            there = self._places(stage, now[stage], wanted)
            if there is None:
                return None
            owners = zip(now[stage].owners, wanted.owners, strict=True)
            for number, (old, new) in enumerate(owners):
                at, was = there.get(PartitionId(new)), here.get(PartitionId(old))
                if at is not None and was is not None and at != was:
                    found[at, stage].add(BinId(number))
        return {key: frozenset(numbers) for key, numbers in found.items()}

    def _places(self, stage: StageIndex, now: Assignment, then: Assignment) -> _Places | None:
        if now.partitions == then.partitions:
            return self._placement.of(stage)
        if then.partitions not in self._proposed:
            self._proposed[then.partitions] = None
            self._edge.meanwhile(lambda: self._propose(then.partitions))
        return self._proposed[then.partitions]

    def _propose(self, partitions: int) -> None:
        try:
            self._proposed[partitions] = self._edge.propose_places(partitions)
        except Exception as error:  # the engine could not; then everything is read when it is taken over
            _log.warning("it cannot be said where %d partitions will run: %s", partitions, error)
            self._proposed[partitions] = {}
