"""A controller that gives a job as many partitions, and executors, as its load needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar

from midstream.controllers.controller import Controller, Executors, Proposal
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.controllers.situation import Situation, StageLoad
from midstream.data.durations import duration
from midstream.errors import FlowError
from midstream.flow.edits import Rescale

__all__ = ["AutoScale"]

PATIENCE, LONG_PATIENCE = 3, 10
"""Epochs that must agree before there are more partitions, or fewer."""
SETTLES = 2
"""Epochs after an operation that are ignored."""
MARGIN = 0.8
"""Fewer partitions must need at most this share of the wanted utilisation; otherwise varying load would bring them back
at once."""
LEAST_CAPACITY = 0.5
"""Least share of a core that operators have when a job cannot keep up; Spark and the exchange take the rest."""
FALLING_BEHIND = 0.1
"""A job whose lag grows by this many seconds per second cannot keep up."""
MOST_GROWTH = 1.0
TRY_AFTER, LONGEST_WAIT = 50, 2_000
"""Epochs in which all is well until fewer partitions are tried than are known to be enough, the first time and at most;
each try that fails doubles them."""
TRY_SHARE = 4
"""A try takes away one partition, or this part of them if that is more."""
TRY_LAG = 1.5
"""A try has failed if epochs are longer by more than this factor, besides what fewer partitions explain."""
SPARE = 30
"""Epochs in which executors must have been spare before one is given back."""
USEFUL = 0.9
"""If more than this share of the latency remains, more partitions were of no use."""


@dataclass(frozen=True)
class _StageSample:
    """What one epoch tells about a stage."""

    demand: float
    """Cores that its operators would keep busy if the job kept up."""
    latency_ms: float
    share: float
    """How busy a partition was, of a core."""
    growth: float
    """Seconds by which the lag grew in a second."""
    lag_ms: float


@dataclass(frozen=True)
class _Try:
    """How things were before fewer partitions were tried."""

    partitions: int
    capacity: float
    lag_ms: float


@dataclass(frozen=True)
class _Missed:
    """A try that has failed: as many partitions, or fewer, are tried again for such a demand after a long wait."""

    partitions: int
    demand: float
    wait: int


@dataclass(frozen=True)
class _Learnt:
    """What is known of a stage besides its newest epochs."""

    capacity: float = 1.0
    """How much of a core a partition keeps busy when the job cannot keep up, as far as is known."""
    was_behind: bool = False
    """Whether the job could not keep up in the last epochs."""
    calm: int = 0
    """Epochs in which all was well."""
    before: _Try | None = None
    """If the newest change was a try."""
    missed: _Missed | None = None
    """The newest try that has failed."""

    def wait_for(self, partitions: int, demand: float) -> int:
        """Calm epochs until so few partitions are tried."""
        missed = self.missed
        is_other = missed is None or partitions > missed.partitions or demand < MARGIN * missed.demand
        return TRY_AFTER if missed is None or is_other else missed.wait


class _Cause(Enum):
    """What leads to another number of partitions, where it matters later."""

    WORK = auto()
    LATENCY = auto()
    TRY = auto()


@dataclass(frozen=True)
class _Wish:
    """How many partitions a stage should have, and why."""

    partitions: int
    why: str = ""
    cause: _Cause = _Cause.WORK


@dataclass(frozen=True)
class _Scaling:
    """What the controller remembers."""

    settling: int = 1
    lag_ms: float | None = None
    samples: dict[str, tuple[_StageSample, ...]] = field(default_factory=dict)
    learnt: dict[str, _Learnt] = field(default_factory=dict)
    """By stage."""
    spare: int = 0
    """Epochs in which fewer executors would have been enough."""
    for_latency: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By stage: latency and demand before it got more partitions for the latency alone."""
    asked: int = 0
    """Executors that the cluster manager was asked for last."""


@dataclass(frozen=True)
class AutoScale(Controller):
    """As few partitions as keep up with the load and meet an objective.

    The work of a stage is the time that its operators are busy or, if the job falls behind, the time that they would be
    busy if it did not. A stage gets as many partitions as keep each busy for ``utilisation`` of the time. Three epochs
    must agree that more are needed, ten that fewer are enough. If nothing has been wrong for long, it tries whether
    even fewer are, ever more rarely if they were not.

    :param utilisation: how busy a partition should be, as a share of a core.
    :param latency: the wanted 95th percentile of the age of rows: a stage gets one more partition as long as rows are
        older, unless the last one was of no use.
    :param between: the least and the largest number of partitions. Without ``executors``, a stage never gets more than
        can run at a time.
    :param stage: the stage; default: all, the one that needs it most first.
    :param executors: the least and the largest number of executors to ask the cluster manager for, before there are
        more partitions than cores. Those that are not needed any more are drained and given back, one at a time. Where
        it cannot be asked, only partitions change.

    >>> AutoScale(latency="2 s", between=(2, 8)).between
    (2, 8)
    >>> AutoScale(utilisation=70)
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: AutoScale: utilisation=70 must be a share of a core, from 0.05 to 1
    """

    utilisation: float = 0.7
    latency: str | None = None
    between: tuple[int, int] = (1, 16)
    stage: str | None = None
    executors: tuple[int, int] | None = None

    touches: ClassVar[frozenset[str]] = frozenset({"partitions", "executors"})

    def __post_init__(self) -> None:
        if not 0.05 <= self.utilisation <= 1:
            raise FlowError(f"AutoScale: utilisation={self.utilisation} must be a share of a core, from 0.05 to 1")
        if self.latency is not None:
            duration(self.latency, "AutoScale: latency")
        for what, limits in (("between", self.between), ("executors", self.executors)):
            if limits is not None and not 1 <= limits[0] <= limits[1]:
                raise FlowError(f"AutoScale: {what}={limits!r} must be two numbers from 1 on, the smaller one first")

    def first(self) -> Any:
        """Nothing is known yet."""
        return _Scaling()

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """More or fewer partitions for the stage that needs it most, or executors for them."""
        now: _Scaling = memory
        if seen.in_progress is not None:
            return (), replace(now, settling=SETTLES, lag_ms=None, samples={})
        if now.settling:
            return (), replace(now, settling=now.settling - 1, lag_ms=seen.lag_ms)
        now = self._noted(seen, now)
        found = [(each, self._wanted(each, seen, now)) for each in self._stages(seen)]
        changes = [(stage, wish) for stage, wish in found if wish.partitions != stage.partitions]
        if not changes:
            return self._give_back(seen, now)
        stage, wish = max(changes, key=lambda each: each[1].partitions / each[0].partitions)
        return self._change(seen, replace(now, spare=0), stage, wish)

    def _stages(self, seen: Situation) -> Sequence[StageLoad]:
        if self.stage is None:
            return seen.stages
        named = seen.stage(self.stage)
        return () if named is None else (named,)

    def _noted(self, seen: Situation, now: _Scaling) -> _Scaling:
        """Its memory after one more epoch."""
        elapsed_ms = seen.observation.elapsed_ms
        grown = 0.0 if now.lag_ms is None or not elapsed_ms else (seen.lag_ms - now.lag_ms) / elapsed_ms
        growth = min(MOST_GROWTH, max(0.0, grown))
        samples, learnt = {}, dict(now.learnt)
        for stage in self._stages(seen):
            busy = seen.busy_of(stage)
            sample = _StageSample(busy * (1 + growth), seen.latency_ms(), busy / stage.partitions, growth, seen.lag_ms)
            samples[stage.name] = found = (*now.samples.get(stage.name, ())[1 - LONG_PATIENCE :], sample)
            learnt[stage.name] = self._after(learnt.get(stage.name, _Learnt()), found)
        return replace(now, lag_ms=seen.lag_ms, samples=samples, learnt=learnt)

    def _after(self, known: _Learnt, samples: Sequence[_StageSample]) -> _Learnt:
        """What is known of a stage after one more epoch."""
        newest = samples[-PATIENCE:]
        if len(newest) < PATIENCE:
            return replace(known, was_behind=False)
        if min(each.growth for each in newest) >= FALLING_BEHIND:
            # Epochs get longer and the rest weighs less, so within one time of trouble the largest share counts. What
            # an earlier one taught may have had other reasons.
            share = min(1.0, max(LEAST_CAPACITY, *(each.share for each in newest)))
            capacity = max(known.capacity, share) if known.was_behind else share
            return replace(known, capacity=capacity, was_behind=True, calm=0)
        is_calm = max(each.growth for each in newest) < FALLING_BEHIND
        return replace(known, was_behind=False, calm=known.calm + 1 if is_calm else 0)

    def _wanted(self, stage: StageLoad, seen: Situation, now: _Scaling) -> _Wish:
        have, samples = stage.partitions, now.samples[stage.name]
        low, high = self._limits(seen)
        if not low <= have <= high:
            return _Wish(min(max(have, low), high), f"{have} partitions are not within {low} to {high}")
        known = now.learnt[stage.name]
        target = self.utilisation * known.capacity
        newest = samples[-PATIENCE:]
        if len(newest) < PATIENCE:
            return _Wish(have)
        needed = [math.ceil(each.demand / target - 1e-9) for each in newest]
        if min(needed) > have:
            wanted = round(statistics.median(needed))
            if known.before is not None and known.calm < TRY_AFTER:
                wanted = known.before.partitions  # which was enough
            cores = statistics.median(each.demand for each in newest)
            return _Wish(min(high, wanted), f"its operators need {cores:.2f} cores")
        if known.before is not None and min(each.lag_ms for each in newest) > self._tolerable(known.before, have):
            why = f"{have} partitions were tried, and do not keep up as well"
            return _Wish(min(high, known.before.partitions), why)
        if self.latency is not None and self._is_late(stage, newest, now) and have < high:
            return _Wish(have + 1, f"rows are older than {self.latency}", _Cause.LATENCY)
        if len(samples) < LONG_PATIENCE or (self.latency is not None and not self._is_young(samples)):
            return _Wish(have)
        enough = max(math.ceil(each.demand / (target * MARGIN) - 1e-9) for each in samples)
        if enough < have:
            cores = max(each.demand for each in samples)
            return _Wish(max(low, enough), f"its operators need {cores:.2f} cores at most")
        fewest = self._fewest(stage, samples, low)
        if fewest < have and known.calm >= known.wait_for(fewest, samples[-1].demand):
            return _Wish(fewest, f"nothing was wrong in {known.calm} epochs, so fewer are tried", _Cause.TRY)
        return _Wish(have)

    @staticmethod
    def _tolerable(before: _Try, have: int) -> float:
        """The lag that a try may lead to: the same work is done by fewer partitions."""
        return TRY_LAG * before.lag_ms * before.partitions / have

    def _fewest(self, stage: StageLoad, samples: Sequence[_StageSample], low: int) -> int:
        """The partitions to try: a few less, and enough if they can be busy all the time."""
        enough = math.ceil(max(each.demand for each in samples) / self.utilisation - 1e-9)
        return max(low, enough, stage.partitions - max(1, stage.partitions // TRY_SHARE))

    def _is_late(self, stage: StageLoad, samples: Sequence[_StageSample], now: _Scaling) -> bool:
        """Whether rows are older than they should be, and another partition may help."""
        if min(each.latency_ms for each in samples) <= self._objective_ms:
            return False
        before = now.for_latency.get(stage.name)
        if before is None:
            return True
        latency_ms, demand = before
        was_useful = statistics.median(each.latency_ms for each in samples) <= USEFUL * latency_ms
        return was_useful or statistics.median(each.demand for each in samples) > demand / MARGIN

    def _is_young(self, samples: Sequence[_StageSample]) -> bool:
        return max(each.latency_ms for each in samples) <= self._objective_ms / 2

    @property
    def _objective_ms(self) -> float:
        assert self.latency is not None
        return duration(self.latency, "AutoScale: latency") / 1000

    def _limits(self, seen: Situation) -> tuple[int, int]:
        low, high = self.between
        asks = self.executors is not None and seen.can_ask_for_executors
        return low, high if asks else max(low, min(high, max(1, seen.cores)))

    def _change(
        self, seen: Situation, now: _Scaling, stage: StageLoad, wish: _Wish
    ) -> tuple[Sequence[Proposal], _Scaling]:
        wanted, why = wish.partitions, wish.why
        sample = now.samples[stage.name][-1]
        figures = {
            "cores needed": round(sample.demand, 3),
            "latency p95 ms": round(sample.latency_ms, 1),
            "partitions": float(stage.partitions),
        }
        asking = self._executors_for(seen, now, wanted)
        if asking is not None:
            refused = seen.last is not None and seen.last.outcome is ProposalOutcome.FAILED
            if refused and now.asked == asking:  # it has been asked for; go on with the cores that there are
                wanted = min(wanted, max(stage.partitions, seen.cores))
                if wanted == stage.partitions:
                    return (), now
            else:
                reason = f"{stage.name!r} should have {wanted} partitions, and there are {seen.cores} cores: {why}"
                found = Proposal(Executors(asking), reason, {**figures, "cores": float(seen.cores)})
                return (found,), replace(now, asked=asking)
        for_latency = dict(now.for_latency)
        if wish.cause is _Cause.LATENCY:
            newest = now.samples[stage.name][-PATIENCE:]
            for_latency[stage.name] = (statistics.median(each.latency_ms for each in newest), sample.demand)
        proposal = Proposal(Rescale(wanted, stage.name), why, figures)
        known = self._changed(now.learnt[stage.name], now.samples[stage.name], stage.partitions, wanted, wish.cause)
        learnt = {**now.learnt, stage.name: known}
        return (proposal,), replace(now, samples={}, for_latency=for_latency, learnt=learnt)

    def _changed(
        self, known: _Learnt, samples: Sequence[_StageSample], have: int, wanted: int, cause: _Cause
    ) -> _Learnt:
        """What is known of a stage whose number of partitions is about to change."""
        was_behind, known = known.was_behind, replace(known, calm=0, was_behind=False)
        if cause is _Cause.TRY:
            hoped = max(each.demand for each in samples) / (wanted * self.utilisation)
            before = _Try(have, known.capacity, statistics.median(each.lag_ms for each in samples))
            return replace(known, capacity=max(known.capacity, min(1.0, hoped)), before=before)
        if known.before is not None and wanted > have:  # the try has failed
            capacity = known.capacity if was_behind else known.before.capacity  # the newest measurement
            demand = statistics.median(each.demand for each in samples)
            wait = min(LONGEST_WAIT, 2 * known.wait_for(have, demand))
            return replace(known, capacity=capacity, before=None, missed=_Missed(have, demand, wait))
        return replace(known, before=None)

    def _give_back(self, seen: Situation, now: _Scaling) -> tuple[Sequence[Proposal], _Scaling]:
        """One executor less, if it has not been needed for long."""
        if self.executors is None or not seen.can_ask_for_executors or not seen.stages:
            return (), now
        each = max(1, seen.cores // max(1, seen.executors))
        most = max(stage.partitions for stage in seen.stages)
        enough = max(self.executors[0], math.ceil(most / each))
        if seen.executors <= enough:
            return (), replace(now, spare=0)
        if now.spare + 1 < SPARE:
            return (), replace(now, spare=now.spare + 1)
        if now.asked == seen.executors - 1 and seen.last is not None and seen.last.outcome is ProposalOutcome.FAILED:
            return (), now  # it cannot be given back
        reason = f"{enough * each} cores are enough for {most} partitions, and there are {seen.cores}"
        figures = {"cores": float(seen.cores), "partitions": float(most)}
        found = Proposal(Executors(seen.executors - 1), reason, figures)
        return (found,), replace(now, spare=0, asked=seen.executors - 1)

    def _executors_for(self, seen: Situation, now: _Scaling, partitions: int) -> int | None:
        """The number of executors that this many partitions need, if there are fewer and more can be requested."""
        if self.executors is None or not seen.can_ask_for_executors or not seen.executors:
            return None
        low, high = self.executors
        each = max(1, seen.cores // seen.executors)
        wanted = min(high, max(low, math.ceil(partitions / each)))
        return wanted if wanted > seen.executors else None
