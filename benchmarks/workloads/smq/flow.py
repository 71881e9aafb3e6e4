"""SMQ as a flow, in several plans, and the edits that lead from one to another.

Numbers are stamped in the first stage, with the time at which they are worked on: so the rows that come out say when
the last number went through an old plan, and the first one through its successor. A filter behind the stamp lets every
fifth (or tenth) number pass; a second counter is keyed by another column, and so stands behind an exchange of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import Flow, GeneratorSource, Insert, Remove, State, Stream, Update
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["BASE", "DIGITS", "INSTANCES", "RUN", "Change", "Every", "Plan", "Stamp", "flow", "numbers"]

INSTANCES = 80
RUN = 10
"""Numbers in a row that belong to one instance; so a filter by number leaves some for each of them."""
DIGITS = 10
COUNTED = "n bigint, instance bigint, digit bigint, at double, count bigint, tally bigint"
FILTER, TALLY, BY_DIGIT = "every", "tally", "by digit"


@dataclass(frozen=True)
class Plan:
    """What the flow has beside source, stamp, counter and sink."""

    nth: int = 1
    """One number in this many passes; with 1 there is no filter."""
    has_tally: bool = False
    """Whether there is a second counter."""

    def passes(self, n: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which numbers come out.

        >>> Plan(nth=5).passes(np.array([4, 5])).tolist()
        [False, True]
        """
        passing: npt.NDArray[np.bool_] = n % self.nth == 0
        return passing


BASE = Plan()


# ── the flow ──────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(rate: Schedule | float, **options: Any) -> GeneratorSource:
    """The source: a number, its instance, and a digit that runs through all instances."""
    return GeneratorSource(_numbers, "n bigint, instance bigint, digit bigint", rate, **options)


def _numbers(indexes: Indexes, _: np.random.Generator) -> dict[str, Any]:
    return {"n": indexes, "instance": indexes // RUN % INSTANCES, "digit": indexes // (RUN * INSTANCES) % DIGITS}


@dataclass(frozen=True)
class Stamp:
    """Notes when a number is worked on, and costs some CPU time."""

    cost_us: float

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Stamp a number."""
        at, until = time.time(), time.thread_time_ns() + round(1000 * self.cost_us)
        while time.thread_time_ns() < until:
            pass
        return {**row, "at": at}


@dataclass(frozen=True)
class Every:
    """The filter: it goes by the number's value, so an epoch that is run again gives the same rows."""

    nth: int

    def __call__(self, row: dict[str, Any]) -> bool:
        """Whether a number passes."""
        return bool(row["n"] % self.nth == 0)


def count(instance: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """Number the rows of an instance."""
    seen = state.get(0) + 1
    state.set(seen)
    return {**{name: row[name] for name in ("n", "instance", "digit", "at")}, "count": seen, "tally": None}


def tally(digit: int, row: dict[str, Any], state: State) -> dict[str, Any]:
    """Number the rows of a digit."""
    seen = state.get(0) + 1
    state.set(seen)
    return {**row, "tally": seen}


def flow(source: Any, sink: SinkTarget, cost_us: float, plan: Plan = BASE) -> Flow:
    """The flow, as a script says it that has this plan."""
    flow = Flow("smq")
    rows = flow.source("numbers", source).map("stamp", Stamp(cost_us), adds="at double")
    if plan.nth > 1:
        rows = _filtered(rows, plan.nth)
    rows = rows.key_by("by instance", "instance").process("count", count, returns=COUNTED, one_to_one=True)
    if plan.has_tally:
        rows = _counted(rows)
    rows.sink("out", sink)
    return flow


def _filtered(rows: Stream, nth: int) -> Stream:
    return rows.filter(FILTER, Every(nth))


def _counted(rows: Stream) -> Stream:
    return rows.key_by(BY_DIGIT, "digit").process(TALLY, tally, one_to_one=True)


# ── changes of its plan ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Change:
    """From one plan to another.

    >>> Change(Plan(nth=5), Plan()).edits()
    [Remove(operator='every')]
    """

    before: Plan
    after: Plan

    def edits(self) -> list[Insert | Remove | Update]:
        """What ``job.update`` is given: all of it is one change."""
        found: list[Insert | Remove | Update] = []
        was, now = self.before.nth, self.after.nth
        if was == 1 < now:
            found.append(Insert(lambda rows: _filtered(rows, now), after="stamp"))
        elif now == 1 < was:
            found.append(Remove(FILTER))
        elif was != now:
            found.append(Update(FILTER, Every(now)))
        if self.after.has_tally and not self.before.has_tally:
            found.append(Insert(_counted, after="count"))
        elif self.before.has_tally and not self.after.has_tally:
            found += [Remove(TALLY), Remove(BY_DIGIT)]
        return found
