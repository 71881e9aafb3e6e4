"""Records which executor runs what, and what each has loaded ahead, from commits and reports. Pure.

Migrations rely on this. It chooses partitions for bins by :meth:`Placement.of`, has the takers load
bins with :meth:`midstream.runtime.driver.Driver.prefetch`, and sees their progress in :meth:`Placement.warmth`: an
executor whose bins are warm at the newest committed epoch reads nothing but that epoch's delta when it takes them over.
Nothing here is durable: after a restart of the driver, the first commit tells where partitions run, and whoever wanted
something loaded must ask again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from midstream.control.messages import Commit, Places, Prefetched, PrefetchRequest
from midstream.errors import FlowError
from midstream.ids import BinId, Epoch, ExecutorId, PartitionId, StageIndex
from midstream.planner.assignment import Assignments

__all__ = ["ExecutorShare", "Placement", "Warmth", "require_possible", "unevenness"]


class ExecutorShare(msgspec.Struct, frozen=True):
    """An executor, and its part of the job in the last committed epoch."""

    name: str
    partitions: dict[int, tuple[int, ...]] = {}
    """By stage behind an exchange: the partitions that ran there."""
    bins: dict[int, int] = {}
    """By stage behind an exchange: how many bins these partitions own."""


@dataclass(frozen=True)
class Warmth:
    """What an executor has loaded ahead for a stage: bins, as they were after an epoch."""

    epoch: Epoch
    bins: frozenset[BinId]
    bytes: int = 0
    """Bytes read for it so far, over all reports."""
    seconds: float = 0.0
    error: str | None = None
    """Why the newest attempt broke off, if it did."""


class Placement:
    """The record of one life of the driver. Two threads write to it, each its own part; what readers get never changes.

    >>> from midstream.control.messages import WorkerId
    >>> from midstream.ids import Revision
    >>> placement, stage = Placement(), StageIndex(1)
    >>> placement.committed(Commit(Epoch(4), Revision(1), (), 2, {}, places={stage: {PartitionId(0): ExecutorId("a")}}))
    >>> placement.of(stage)
    {0: 'a'}
    >>> placement.wanted((PrefetchRequest(ExecutorId("b"), stage, (BinId(3),), bytes_per_s=1_000_000),))
    >>> report = Prefetched(WorkerId("host", 7, ExecutorId("b")), stage, Epoch(4), (BinId(3),), bytes=100)
    >>> placement.noted(report)
    >>> placement.warmth(ExecutorId("b"), stage).bins
    frozenset({3})
    """

    def __init__(self) -> None:
        self.places: Places | None = None
        """The placement of the last epoch committed in this life of the driver."""
        self.requests: tuple[PrefetchRequest, ...] = ()
        """The newest requests to load ahead."""
        self._warm: dict[tuple[ExecutorId, StageIndex], Warmth] = {}

    def committed(self, commit: Commit) -> None:
        """An epoch is committed."""
        self.places = commit.places

    def wanted(self, requests: tuple[PrefetchRequest, ...]) -> None:
        """From now on, executors are to load this. Reports about other bins are forgotten, because nothing keeps them
        true."""
        self.requests = requests
        kept = {(each.executor, each.stage) for each in requests}
        self._warm = {key: warm for key, warm in self._warm.items() if key in kept}

    def noted(self, report: Prefetched) -> None:
        """An executor has reported. Reports may come twice, late, and in any order; the newest state counts, as long as
        somebody wants it."""
        key = report.worker.executor, report.stage
        before = self._warm.get(key)
        if before is not None and before.epoch > report.epoch:
            return
        if all(key != (request.executor, request.stage) for request in self.requests):
            return
        self._warm[key] = Warmth(
            report.epoch,
            frozenset(report.bins),
            report.bytes + (0 if before is None else before.bytes),
            report.seconds + (0.0 if before is None else before.seconds),
            report.error,
        )

    def warmth(self, executor: ExecutorId, stage: StageIndex) -> Warmth:
        """What an executor has loaded ahead for a stage, by its own reports."""
        return self._warm.get((executor, stage), Warmth(Epoch(-1), frozenset()))

    def of(self, stage: StageIndex) -> dict[PartitionId, ExecutorId]:
        """The executors where the partitions of a stage ran in the last committed epoch, as far as they are known."""
        return (self.places or {}).get(stage, {})

    def seen(self) -> frozenset[ExecutorId]:
        """The executors on which anything ran in the last committed epoch."""
        return frozenset(name for found in (self.places or {}).values() for name in found.values())

    def shares(self, assignments: Assignments, alive: frozenset[ExecutorId]) -> tuple[ExecutorShare, ...]:
        """The part of each executor, by name: of those that are alive, and of those that ran something."""
        return tuple(self._share(name, assignments) for name in sorted(alive | self.seen()))

    def _share(self, name: ExecutorId, assignments: Assignments) -> ExecutorShare:
        partitions: dict[int, tuple[int, ...]] = {}
        bins: dict[int, int] = {}
        for stage, assignment in assignments.items():
            own = sorted(each for each, at in self.of(stage).items() if at == name)
            if own:
                partitions[stage] = tuple(own)
                bins[stage] = sum(len(assignment.owned_by(partition)) for partition in own)
        return ExecutorShare(str(name), partitions, bins)


def unevenness(places: Mapping[PartitionId, ExecutorId], executors: Collection[ExecutorId]) -> int:
    """The difference between the most and the fewest partitions of an executor; 0 and 1 are as even as possible.

    >>> three_to_one = {PartitionId(n): ExecutorId("b" if n == 3 else "a") for n in range(4)}
    >>> unevenness(three_to_one, {ExecutorId("a"), ExecutorId("b")})
    2
    """
    counts = Counter(dict.fromkeys(executors, 0))
    counts.update(places.values())
    return max(counts.values(), default=0) - min(counts.values(), default=0)


def require_possible(request: PrefetchRequest, assignments: Assignments) -> None:
    """Refuse a request for a stage or a bin that does not exist. Raises :class:`FlowError`."""
    assignment = assignments.get(request.stage)
    if assignment is None:
        raise FlowError(
            f"executor {request.executor} cannot load ahead for stage {request.stage}: stages behind an exchange "
            f"are {', '.join(map(str, sorted(assignments))) or 'none'}"
        )
    if unknown := [number for number in request.bins if not 0 <= number < assignment.bins]:
        raise FlowError(f"there is no bin {unknown[0]}; the bins of a stage are 0 to {assignment.bins - 1}")
    if request.bytes_per_s < 1:
        raise FlowError(
            f"executor {request.executor} cannot load ahead at {request.bytes_per_s} bytes a second; give 1 or more"
        )
