"""How much a step of a migration may move, so that its epoch stays within a budget of time. Pure.

An epoch may be long because much was moved in it, because rows have piled up, or because the machine is busy. If all of
that counted as the price of the moves, steps would become ever smaller on a busy machine, down to one bin, whose effect
cannot be told from noise; they would never grow again. Therefore two things are kept apart:

- the *level* is what an epoch takes without moves. It is measured: an epoch that is far from what was expected is
  followed by one without moves, and so are some steps of a long migration;
- the *price* of a byte is what epochs take above their level, by least squares, because large steps are less subject to
  chance. It may be negative, because of noise; that does not last.

Bins that their takers have loaded ahead cost next to nothing, but any step costs something, however small it is, and
epochs vary by more than a budget. By a price, steps of one bin would stay steps of one bin. So what is loaded ahead is
free, until twice in a row an epoch with as much of it is longer than any without moves, by more than the budget.

While the level is far above the usual one, rows have piled up, and only a part of the budget is used. That part does
not keep shrinking, because a level that lasts becomes the usual one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from midstream.planner.step_cost import Budget, StepCost

__all__ = ["StepBudget"]

SHARE_OF_EPOCH = 0.2
"""Default budget of a migration: this share of the level."""
LEAST_SHARE_OF_EPOCH = 0.05
"""Smallest budget of time, as a share of the level: anything less cannot be told from noise."""
MEMORY = 0.3
"""Weight of the newest step among those that the price of a byte is learnt from."""
CAUTION = 2.5
"""This multiple of the usual error of predictions is left unused of a budget, so that few epochs exceed it."""
LEAST_SHARE = 0.25
"""The least share of a budget that is used, however much epochs vary, and however many rows have piled up."""
CATCHING_UP = 1.5
"""An epoch whose level is this multiple of the usual is catching up with rows."""
HABIT = 0.1
"""Weight of the newest level in the usual one."""
SURE = 2.0
"""A price is believed if it is this multiple of its standard error."""
LEVEL_MEMORY = 0.5
"""Weight of the newest epoch without moves in a level that was measured in one epoch, too."""
STEPS_PER_PAUSE = 8
"""After this many steps that were limited by their price, the level is measured again."""


@dataclass
class StepBudget:
    """The known level and price, and the size of the next step that follows from them.

    >>> budget = StepBudget(Budget(ms=20.0))
    >>> for load in (1e6, 2e6):
    ...     budget.learn(load, StepCost(1, int(load), 100.0 + 1e-5 * load, steady_ms=100.0))
    >>> budget.wants_pause, round(budget.largest_load())
    (False, 2000000)
    """

    budget: Budget
    wants_pause: bool = False
    """Whether to measure the level by an epoch without moves."""
    _level_ms: float = 0.0
    _is_level_usual: bool = True
    """Whether the level is from before the migration: the median of many epochs, which is reliable."""
    _usual_ms: float = 0.0
    _cost: float = 0.0
    _load: float = 0.0
    _deviation_ms: float = 0.0
    _held: tuple[float, float] | None = None
    """Load and time of an epoch that is learnt when the level is known."""
    _limited: int = 0
    """Steps since the level was measured that were limited by their price."""
    _is_free: bool = False
    """Whether the newest step was loaded ahead, and such steps are not known to have a price."""
    _has_price: bool = False
    """Whether what is loaded ahead has turned out to have a price."""
    _doubtful: float = math.inf
    """The load of a free step whose epoch was too long; it is tried again."""
    _range_ms: float = 0.0
    """How much longer than usual epochs without moves are at most."""

    @property
    def ms(self) -> float:
        """Milliseconds that a step may add to its epoch."""
        named = SHARE_OF_EPOCH * self._level_ms if self.budget.ms is None else self.budget.ms
        return max(named, LEAST_SHARE_OF_EPOCH * self._level_ms)

    def largest_load(self) -> float:
        """The largest load that keeps nearly every epoch within the budget; infinite if loads seem to cost nothing, or
        if time does not matter."""
        if self._is_free:
            return self._doubtful
        price = self._price
        if price <= SURE * self._price_error or not self._is_timed:
            return math.inf
        ms = self.ms
        if self._level_ms > CATCHING_UP * self._usual_ms:
            ms *= max(LEAST_SHARE, self._usual_ms / self._level_ms)
        return max(LEAST_SHARE * ms, ms - CAUTION * self._deviation_ms) / price

    def learn(self, load: float, step: StepCost, *, was_limited: bool = False) -> None:
        """A step of this load is committed; no load is a pause."""
        if not self._is_timed:
            return
        if not self._level_ms:
            self._level_ms = self._usual_ms = step.steady_ms or step.epoch_ms
        self._usual_ms += HABIT * (self._level_ms - self._usual_ms)
        if not load:
            self._learn_level(step.epoch_ms)
            return
        self._is_free, self._range_ms = step.is_loaded and not self._has_price, step.longest_ms - step.steady_ms
        excess = step.epoch_ms - self._level_ms
        if self._is_free:
            self.wants_pause = excess > self._noise_ms
        else:
            self._limited += was_limited
            is_surprising = abs(excess - self._price * load) > self._noise_ms
            self.wants_pause = is_surprising or self._limited >= STEPS_PER_PAUSE
        if self.wants_pause:
            self._held = load, step.epoch_ms
        else:
            self._learn_step(load, step.epoch_ms)

    @property
    def _is_timed(self) -> bool:
        return self.budget.ms is not None or self.budget.bytes is None

    @property
    def _price(self) -> float:
        return self._cost / self._load if self._load else 0.0

    @property
    def _price_error(self) -> float:
        """The standard error of the price: epochs of small steps tell nothing where epochs vary much."""
        known = (2 - MEMORY) / MEMORY * self._load
        return self._deviation_ms / math.sqrt(known) if known else 0.0

    @property
    def _noise_ms(self) -> float:
        """An epoch that is further than this from what was expected is not so by chance, or matters even if it is."""
        return self.ms + max(0.0, self._range_ms) if self._is_free else max(self.ms, CAUTION * self._deviation_ms)

    def _learn_level(self, epoch_ms: float) -> None:
        change = epoch_ms - self._level_ms
        if abs(change) > self._noise_ms:
            self._level_ms, self._is_level_usual = epoch_ms, False
        elif not self._is_level_usual:
            self._level_ms += LEVEL_MEMORY * change
        self.wants_pause, self._limited = False, 0
        if self._held is not None:
            self._learn_step(*self._held)
            self._held = None

    def _learn_step(self, load: float, epoch_ms: float) -> None:
        if self._is_free:
            is_long = epoch_ms - self._level_ms > self._noise_ms
            self._has_price = is_long and self._doubtful < math.inf
            self._doubtful = load if is_long else math.inf
            self._is_free = not self._has_price
        if not self._is_free:
            self._learn_price(load, epoch_ms)

    def _learn_price(self, load: float, epoch_ms: float) -> None:
        extra_ms = epoch_ms - self._level_ms
        if self._load:
            surprise = abs(extra_ms - self._price * load)
            self._deviation_ms += MEMORY * (surprise - self._deviation_ms)
        self._cost = MEMORY * extra_ms * load + (1 - MEMORY) * self._cost
        self._load = MEMORY * load * load + (1 - MEMORY) * self._load
