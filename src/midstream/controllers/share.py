"""A budget of cores, or of rows per epoch, shared by several jobs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.controllers.controller import Proposal
from midstream.controllers.situation import Situation
from midstream.errors import FlowError
from midstream.flow.edits import Rescale, Tune

__all__ = ["Share", "SharedBudget"]

SETTLES = 3
"""Epochs after an operation that are not looked at."""
LOOK = 5
"""Epochs by which it is judged what a job needs."""
WORTH_MORE, WORTH_LESS = 0.1, 0.2
"""A change below this share of what a job has is not worth an operation, unless the jobs have too much together. What
a job takes varies, so it is not cut for a little."""
HEADROOM = 1.25
"""By this factor a job gets more than it was seen to take: what it takes varies."""
TAKES_ALL = 0.95
"""Of its limit of rows: an epoch that takes so much may have left rows behind."""
UTILISATION, IS_SHORT = 0.7, 0.85
"""How busy a partition should be, as a share of a core, and above which it needs help."""
FALLING_BEHIND = 0.1
"""A job whose lag grows by this many seconds each second cannot keep up."""
OTHER_LOAD = 1.3
"""By this factor the rows per second must have fallen for what was learnt to be forgotten."""


@dataclass(frozen=True)
class _JobSample:
    """What an epoch says of a job."""

    need: float
    """How much of the budget would have been enough."""
    is_short: bool
    """Whether more would have been of use."""
    rate: float
    """Rows per second."""


@dataclass(frozen=True)
class _JobShare:
    """What is known of a job, and what it has of the budget."""

    held: float = math.inf
    """The most that it may take until it is seen again: no other job gets any of it."""
    aim: float = math.inf
    """What it is coming down to, until what it gives up is free."""
    size: float | None = None
    """What it was set to when it was looked at last; infinite if it has no limit. None if it was never looked at."""
    need: float = math.inf
    """How much is enough for it; infinite if that is not known."""
    is_short: bool = False
    """Whether more would be of use to it."""
    settling: int = SETTLES
    samples: tuple[_JobSample, ...] = ()
    lag_ms: float | None = None
    was_cut: bool = False
    """Whether its size comes from a cut that was thought to leave enough."""
    too_little: tuple[float, float] | None = None
    """The size that such a cut has left although it was not enough, and the rows per second then."""


@dataclass(frozen=True)
class SharedBudget:
    """How a budget is divided now. A value that is replaced, never changed."""

    shares: Mapping[str, _JobShare] = field(default_factory=dict)

    def without(self, job: str) -> SharedBudget:
        """A job is gone, and what it had is free."""
        return SharedBudget({name: own for name, own in self.shares.items() if name != job})

    def held_by_others(self, job: str) -> float:
        """The most that all other jobs may take."""
        return sum(own.held for name, own in self.shares.items() if name != job)


@dataclass(frozen=True)
class Share:
    """Shares a budget between several jobs, so that all of them together never take more.

    A job that needs less than its share gets what it needs, and the others get the rest, by their weights: no job can
    get more but from one that has less for its weight. What a job gives up counts as free only once its change is
    complete; until then nobody else gets it. Which jobs they are is said by :class:`midstream.Sharing`, which attaches
    this to all of them.

    It is pure: a value, and functions of situations. So it can be tested without a job, like a controller.

    :param rows_per_epoch: most rows of an epoch of all jobs together. For jobs whose sources are all a
        :class:`midstream.GeneratorSource`, whose knob ``rows_per_epoch`` is tuned.
    :param cores: most partitions of all jobs together. A partition keeps one core busy at most. For jobs with stages
        behind an exchange, which are rescaled.
    :param weights: by job, how much of what is short it gets in proportion to others; 1 for those that are not named.
    :param least: what each job has in any case.

    >>> share = Share(rows_per_epoch=9_000, weights={"orders": 2})
    >>> share.split({"orders": math.inf, "audit": math.inf})
    {'orders': 6000, 'audit': 3000}
    >>> share.split({"orders": 1_000, "audit": math.inf})
    {'orders': 1000, 'audit': 8000}
    >>> Share(rows_per_epoch=9_000, cores=4)
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: Share: give either rows_per_epoch= or cores=
    """

    rows_per_epoch: int | None = None
    cores: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    least: int = 1

    def __post_init__(self) -> None:
        if (self.rows_per_epoch is None) == (self.cores is None):
            raise FlowError("Share: give either rows_per_epoch= or cores=")
        for what, number in ((self._what, self.total), ("least", self.least)):
            if type(number) is not int or number < 1:
                raise FlowError(f"Share: {what}={number!r:.40} must be a whole number from 1 on")
        if not isinstance(self.weights, Mapping):
            raise FlowError(f"Share: weights={self.weights!r:.60} must be a dict of numbers by the names of jobs")
        given: Mapping[Any, Any] = self.weights
        for job, weight in given.items():
            if not (isinstance(weight, int | float) and 0 < weight < math.inf):
                raise FlowError(f"Share: weights={{{job!r}: {weight!r:.40}}} must be a number above 0")

    @property
    def total(self) -> int:
        """All that there is to share."""
        found = self.cores if self.rows_per_epoch is None else self.rows_per_epoch
        assert found is not None
        return found

    def first(self, jobs: Sequence[str]) -> SharedBudget:
        """The budget of these jobs, of which nothing is known yet. Raises :class:`FlowError` if they cannot share it.

        >>> Share(cores=3).first(["a", "b", "c", "d"])
        Traceback (most recent call last):
        ...
        midstream.errors.FlowError: Share: cores=3 is too little for 4 jobs that have at least 1 each
        >>> Share(cores=3, weights={"c": 2}).first(["a", "b"])
        Traceback (most recent call last):
        ...
        midstream.errors.FlowError: Share: weights are given for 'c', which is none of the jobs: 'a', 'b'
        """
        if not jobs:
            raise FlowError("Share: there are no jobs to share between")
        if strangers := [each for each in self.weights if each not in jobs]:
            raise FlowError(
                f"Share: weights are given for {', '.join(map(repr, strangers))}, which is none of the jobs: "
                f"{', '.join(map(repr, jobs))}"
            )
        if self.total < self.least * len(jobs):
            raise FlowError(
                f"Share: {self._what}={self.total} is too little for {len(jobs)} jobs that have at least "
                f"{self.least} each"
            )
        return SharedBudget({job: _JobShare() for job in jobs})

    def split(self, needs: Mapping[str, float]) -> dict[str, int]:
        """What each job should have, by what each needs; infinite stands for as much as it can get.

        Nobody gets more than it needs while another one is short. If all have enough, the rest is divided as well.
        """
        most = {job: max(float(self.least), need) for job, need in needs.items()}
        weights = {job: float(self.weights.get(job, 1.0)) for job in needs}
        spare = self.total - sum(most.values())
        if spare >= 0:
            every = sum(weights.values())
            exact = {job: need + spare * weights[job] / every for job, need in most.items()}
            most = dict.fromkeys(most, math.inf)
        else:
            low, high = 0.0, self.total / min(weights.values())
            for _ in range(60):  # the level to which all are filled, as long as they need it; halved to the last bit
                level = (low + high) / 2
                exact = {job: min(most[job], max(self.least, weights[job] * level)) for job in needs}
                low, high = (low, level) if sum(exact.values()) > self.total else (level, high)
            exact = {job: min(most[job], max(self.least, weights[job] * low)) for job in needs}
        found = {job: math.floor(part + 1e-6) for job, part in exact.items()}
        for _ in range(self.total - sum(found.values())):  # fewer than there are jobs
            poorest = [job for job in found if found[job] + 1 <= most[job]]
            if not poorest:
                break
            found[min(poorest, key=lambda job: (found[job] + 1) / weights[job])] += 1
        return found

    def decide(self, job: str, seen: Situation, budget: SharedBudget) -> tuple[Sequence[Proposal], SharedBudget]:
        """An epoch of a job is committed: what it should change, most often nothing, and how the budget stands then."""
        if job not in budget.shares:
            return (), budget
        own = self._noted(seen, budget.shares[job])
        budget = _with(budget, job, own)
        if seen.in_progress is not None or own.settling:
            return (), budget
        others = budget.held_by_others(job)
        expected = sum(min(each.held, each.aim) for name, each in budget.shares.items() if name != job)
        is_too_much = own.held + expected > self.total
        if not is_too_much and not any(each.is_short for each in budget.shares.values()):
            return (), budget
        wanted = self.split({name: each.need for name, each in budget.shares.items()})
        others_are_short = any(
            each.is_short and each.held < wanted[name] for name, each in budget.shares.items() if name != job
        )
        fewer = self._whole(wanted[job], seen)
        least_cut = 1.0 if is_too_much else max(1.0, WORTH_LESS * own.held)
        if own.held - fewer >= least_cut and (is_too_much or others_are_short):
            size = fewer
            budget = _with(budget, job, replace(own, aim=float(size)))
            why = f"all jobs may take more than {self.total}" if is_too_much else "others are short, and it is not"
        else:
            size = self._whole(min(wanted[job], self.total - others), seen)
            if not own.is_short or size - own.held < max(1.0, WORTH_MORE * own.held):
                return (), budget
            budget = _with(budget, job, replace(own, held=float(size)))
            why = "it is short, and so much is free"
        operation = Rescale(size) if self.rows_per_epoch is None else Tune(rows_per_epoch=size // _sources(seen))
        figures = {self._what: float(size), "of": float(self.total)}
        for name, value in (("has", own.held), ("needs", own.need), ("others may take", others)):
            if math.isfinite(value):
                figures[name] = value
        return (Proposal(operation, f"{size} of {self.total} {self._told}: {why}", figures),), budget

    # ── what a job says ───────────────────────────────────────────────────────────────────────────────────────────

    def _noted(self, seen: Situation, own: _JobShare) -> _JobShare:
        """What is known of a job after one more epoch."""
        size = self._size(seen)
        if seen.in_progress is not None:  # it may come to the new size, or go back to the old one
            return replace(own, held=max(own.held, size), settling=SETTLES, samples=(), lag_ms=None)
        if size != own.size:  # free is what it gave up only when that is seen twice: a trial may just have failed
            was_cut = own.size is not None and size < own.size and math.isfinite(own.need)
            own = replace(own, held=max(own.held, size), aim=size, size=size, was_cut=was_cut)
            return replace(own, settling=SETTLES, samples=(), lag_ms=None)
        own = replace(own, held=size, aim=math.inf)
        if own.settling:
            return replace(own, settling=own.settling - 1, lag_ms=seen.lag_ms)
        sample = self._sample(seen, size, own.lag_ms)
        samples = (*own.samples, sample)[-LOOK:]
        own = replace(own, samples=samples, lag_ms=seen.lag_ms)
        return own if len(samples) < LOOK else self._judged(own, size)

    def _judged(self, own: _JobShare, size: float) -> _JobShare:
        """What a job needs, after some epochs with the same size."""
        rate = statistics.median(each.rate for each in own.samples)
        if 2 * sum(each.is_short for each in own.samples) > LOOK:
            too_little = (size, rate) if own.was_cut else own.too_little
            return replace(own, need=math.inf, is_short=True, too_little=too_little)
        need = float(math.ceil(max(each.need for each in own.samples)))
        too_little = own.too_little
        if too_little is not None and rate * OTHER_LOAD < too_little[1]:
            too_little = None
        if too_little is not None:
            need = max(need, math.ceil(HEADROOM * too_little[0]))
        return replace(own, need=need, is_short=False, too_little=too_little)

    def _sample(self, seen: Situation, size: float, lag_ms: float | None) -> _JobSample:
        rate = seen.observation.rows_per_s
        if self.rows_per_epoch is not None:
            took = _rows(seen) * _sources(seen)
            return _JobSample(HEADROOM * took, took >= TAKES_ALL * size, rate)
        busy = max((seen.busy_of(stage) for stage in seen.stages), default=0.0)
        elapsed_ms = seen.observation.elapsed_ms
        grown = 0.0 if lag_ms is None or not elapsed_ms else (seen.lag_ms - lag_ms) / elapsed_ms
        return _JobSample(busy / UTILISATION, busy >= IS_SHORT * size or grown >= FALLING_BEHIND, rate)

    def _size(self, seen: Situation) -> float:
        """What a job may take now."""
        if self.rows_per_epoch is None:
            return float(max((stage.partitions for stage in seen.stages), default=1))
        limit = seen.knobs.get("rows_per_epoch")
        return math.inf if limit is None else float(limit * _sources(seen))

    def _whole(self, size: float, seen: Situation) -> int:
        """What a job can be set to, of a size: the knob is a limit for each of its sources."""
        if not math.isfinite(size):
            return 0  # nothing is known yet of what others have
        each = 1 if self.rows_per_epoch is None else _sources(seen)
        return max(1, math.floor(size) // each) * each

    @property
    def _what(self) -> str:
        return "cores" if self.rows_per_epoch is None else "rows_per_epoch"

    @property
    def _told(self) -> str:
        return "cores" if self.rows_per_epoch is None else "rows per epoch"


def _with(budget: SharedBudget, job: str, own: _JobShare) -> SharedBudget:
    return SharedBudget({**budget.shares, job: own})


def _sources(seen: Situation) -> int:
    """How many sources a job has: its limit of rows is one for each."""
    return max(1, len(seen.observation.sources))


def _rows(seen: Situation) -> int:
    """Rows of the source that gave most."""
    return max((each.rows for each in seen.observation.sources), default=seen.observation.rows_in)
