"""The budget of a step of a migration, and the cost of a finished step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget", "StepCost"]


@dataclass(frozen=True)
class StepCost:
    """The cost of a finished step: what it moved, and how long its epoch took, compared with ``steady_ms`` before the
    migration; 0 if that is unknown."""

    bins: int
    bytes: int
    epoch_ms: float
    steady_ms: float
    longest_ms: float = 0.0
    """The longest of the epochs without a step of which ``steady_ms`` is the median."""
    is_loaded: bool = False
    """Whether the takers had all of it before, but for the changes of the last epoch."""


@dataclass(frozen=True)
class Budget:
    """The limit of a step: milliseconds that it adds to its epoch, bytes of state that it moves, or both.

    Without either, it is a share of the time that epochs take without moves.
    """

    ms: float | None = None
    bytes: int | None = None
