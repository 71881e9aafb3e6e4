"""A controller that seeks the highest throughput within a latency: it makes a step, watches, and keeps it or takes it
back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from midstream.controllers.controller import Controller, Proposal
from midstream.controllers.situation import Situation
from midstream.data.durations import duration
from midstream.errors import FlowError
from midstream.flow.edits import Tune
from midstream.flow.knobs import KNOBS, in_words

__all__ = ["Pace"]

SETTLES = 2
"""Epochs after a step that are ignored: the first one had begun before it."""
LOOK = 5
"""Epochs that a step is judged by, by the median of their latency."""
ROOM = 0.9
"""Another step is made only below this share of the objective, so that varying latency does not exceed it at once."""
OTHER_LOAD = 1.3
"""What was learnt is forgotten once the rows per second have changed by this factor."""
TRIED_AGAIN_AFTER, LONGEST = 50, 1600
"""Looks after which a value that missed the objective is tried again, as a disturbance may have been the reason; each
time that it misses again, twice as many, up to the longest."""
LIMITS = {"pace": ("50 ms", "10 s"), "rows_per_epoch": (100, 10_000_000)}
"""By knob: the values between which it is tuned by default."""


@dataclass(frozen=True)
class _Tuning:
    """What the controller remembers."""

    value: int | None = None
    """Value of the knob in the last epoch."""
    settling: int = SETTLES
    latencies: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    good: int | None = None
    """The largest value that met the objective."""
    bad: int | None = None
    """The smallest value that missed it."""
    rate: float | None = None
    """Rows per second when that was learnt."""
    patience: int = TRIED_AGAIN_AFTER
    left: int = 0
    """Looks until ``bad`` is forgotten."""
    is_trying: bool = False
    """Whether it has just been forgotten."""


@dataclass(frozen=True)
class Pace(Controller):
    """Epochs as long, or as large, as the latency allows: the longer they are, the less they cost.

    It makes one step, watches a few epochs, and continues; a step that misses the objective is taken back and
    remembered until the load has changed, or for some time: then it is tried again, ever more rarely.

    :param latency: the 95th percentile of the age of rows to keep to.
    :param knob: ``"pace"``, the least time from one epoch to the next, or ``"rows_per_epoch"``.
    :param between: the smallest and the largest value of the knob, as :class:`midstream.Tune` takes them.
    :param step: the factor by which a step changes the knob.
    :param operator: the operator whose rows are measured; default: the one with the oldest rows.

    >>> Pace(latency="1 s", between=("100 ms", "5 s")).limits
    (100000, 5000000)
    >>> Pace(latency="1 s", knob="slice")
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: Pace: knob='slice' is not tuned by latency; allowed: pace, rows_per_epoch
    """

    latency: str
    knob: str = "pace"
    between: tuple[str | int, str | int] | None = None
    step: float = 1.5
    operator: str | None = None

    touches: ClassVar[frozenset[str]] = frozenset({"knobs"})

    def __post_init__(self) -> None:
        duration(self.latency, "Pace: latency")
        if self.knob not in LIMITS:
            raise FlowError(f"Pace: knob={self.knob!r} is not tuned by latency; allowed: {', '.join(LIMITS)}")
        low, high = self.limits
        if not 0 < low < high:
            raise FlowError(f"Pace: between={self.between!r} must be two values above 0, the smaller one first")
        if not 1.05 <= self.step <= 10:
            raise FlowError(f"Pace: step={self.step} must be a factor from 1.05 to 10")

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest value of the knob, in microseconds or rows."""
        low, high = self.between or LIMITS[self.knob]
        return KNOBS[self.knob].parsed(low), KNOBS[self.knob].parsed(high)

    def first(self) -> Any:
        """Nothing is known yet."""
        return _Tuning()

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """A step up, a step back, or nothing."""
        now: _Tuning = memory
        value = self._value(seen, now)
        if seen.in_progress is not None or value != now.value:
            return (), replace(now, value=value, settling=SETTLES, latencies=(), rates=())
        if now.settling:
            return (), replace(now, settling=now.settling - 1)
        latencies = (*now.latencies, seen.latency_ms(self.operator))
        rates = (*now.rates, seen.observation.rows_per_s)
        if len(latencies) < LOOK:
            return (), replace(now, latencies=latencies, rates=rates)
        return self._judged(value, statistics.median(latencies), statistics.median(rates), now)

    def _value(self, seen: Situation, now: _Tuning) -> int:
        """The value of the knob; where it has none, the value observed."""
        value = seen.knobs.get(self.knob)
        if value is not None:
            return value
        return now.value if now.value is not None else min(self.limits[1], max(1, seen.observation.rows_in))

    @staticmethod
    def _met(value: int, now: _Tuning) -> _Tuning:
        """A value has met the objective. Now and then a larger one that did not is tried again."""
        if now.is_trying:
            now = replace(now, patience=TRIED_AGAIN_AFTER, is_trying=False)
        is_due = now.bad is not None and now.left <= 1
        return replace(
            now,
            good=max(value, now.good or 0),
            bad=None if is_due else now.bad,
            left=now.left - 1,
            is_trying=is_due,
        )

    def _judged(self, value: int, latency_ms: float, rate: float, now: _Tuning) -> tuple[Sequence[Proposal], _Tuning]:
        """The conclusion from some epochs with the same value."""
        low, high = self.limits
        objective_ms = duration(self.latency, "Pace: latency") / 1000
        if now.rate is not None and not now.rate / OTHER_LOAD <= rate <= now.rate * OTHER_LOAD:
            now = replace(now, good=None, bad=None, rate=None, patience=TRIED_AGAIN_AFTER, is_trying=False)
        now = replace(now, latencies=(), rates=(), rate=rate if now.rate is None else now.rate)
        if latency_ms > objective_ms:
            known = now.good if now.good is not None and now.good < value else None
            wanted = max(low, round(value / self.step)) if known is None else known
            patience = min(LONGEST, 2 * now.patience) if now.is_trying else now.patience
            now = replace(now, bad=value, good=known, patience=patience, left=patience, is_trying=False)
            why = "back to what met the objective" if known else "smaller"
        else:
            wanted = min(high, max(low, round(value * self.step)))
            now = self._met(value, now)
            if latency_ms > ROOM * objective_ms or (now.bad is not None and wanted >= now.bad):
                wanted = value
            why = "there is room"
        if wanted == value or (wanted > value and latency_ms > objective_ms):
            return (), now
        figures = {"latency p95 ms": round(latency_ms, 1), "objective ms": objective_ms, "rows/s": round(rate, 1)}
        reason = f"rows are {latency_ms:.0f} ms old at {in_words(self.knob, value)}: {why}"
        knobs: dict[str, Any] = {self.knob: wanted}
        return (Proposal(Tune(**knobs), reason, figures),), now
