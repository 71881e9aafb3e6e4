"""Explains a change to the user before it is made."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.change.prepare import PreparedChange
from midstream.drawing.change_picture import change_to_svg, change_to_text
from midstream.flow.knobs import knob_value
from midstream.planner.change_plan import ChangePlan, Scheduler, crossings

__all__ = ["Explanation"]

HAND_OVER_MS = 5000.0
"""Longest pause between two epochs when sources change, approximately (measured with three generators: 2.0 s,
and 4.7 s on a busy machine)."""
MESSAGE_MS = 3.0
"""Approximate round trip of a message to a task (measured: 1.5 to 5 ms under load)."""


@dataclass(frozen=True)
class Explanation:
    """The effect that a change would have. ``epoch_ms`` is the current duration of an epoch, if known."""

    prepared: PreparedChange
    epoch_ms: float | None = None

    @property
    def plan(self) -> ChangePlan:
        """The operators that change together, and where the change begins."""
        return self.prepared.plan

    @property
    def expected_wait_ms(self) -> tuple[float, float | None]:
        """The least and the most milliseconds until it would be in effect; the most is None if not known."""
        soon = knob_value(self.prepared.before.knobs, "slice") / 1000 + MESSAGE_MS
        if self.prepared.hands_over:
            return 0.0, None if self.epoch_ms is None else self.epoch_ms + HAND_OVER_MS
        if self.plan.scheduler is Scheduler.REPLAY:
            return soon, self.epoch_ms
        if self.prepared.flush is not None:  # a whole epoch of the old plan comes before it
            return self.epoch_ms or 0.0, None if self.epoch_ms is None else 2 * self.epoch_ms
        if self.prepared.from_next_epoch:
            return 0.0, self.epoch_ms
        may_take_all = crossings(self.prepared.after.plan, self.plan) or self.prepared.begun.has_side_entrance
        return (soon, self.epoch_ms) if may_take_all else (soon, soon)

    def to_svg(self) -> str:
        """A picture of the flow, with the operators that change together in colour."""
        return change_to_svg(self.prepared.merged.graph, self.plan, self.prepared.merged)

    def _repr_svg_(self) -> str:
        """How a notebook shows it."""
        return self.to_svg()

    def __str__(self) -> str:
        crossed = () if self.prepared.from_next_epoch else crossings(self.prepared.after.plan, self.plan)
        least, most = self.expected_wait_ms
        until = "the time that the running epoch still takes" if most is None else f"{most:.0f} ms"
        wait = f"about {least:.0f} ms" if most == least else f"up to {until}"
        lines = [
            change_to_text(self.prepared.merged.graph, self.plan, self.prepared.merged),
            "",
            self.prepared.describe(),
        ]
        lines += [f"  travels with the rows of {wire.port} to stage {wire.target}" for wire in crossed]
        return "\n".join([*lines, f"  expected wait: {wait}"])
