"""What a step of a migration may cost, and what it has cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget", "StepCost"]


@dataclass(frozen=True)
class StepCost:
    """What a finished step has cost: what it moved, and how long its epoch took where others had taken ``steady_ms``
    before the migration; 0 if that is not known."""

    bins: int
    bytes: int
    epoch_ms: float
    steady_ms: float


@dataclass(frozen=True)
class Budget:
    """What a step may add to its epoch: milliseconds, or bytes of state that are moved; or both.

    Without either, it is a share of what epochs take without moves.
    """

    ms: float | None = None
    bytes: int | None = None
