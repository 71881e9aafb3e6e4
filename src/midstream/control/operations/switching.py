"""A change that takes effect within a run of an epoch: which tasks switch, where, and whether all have.

The rule that makes replays safe: for each partition of a stage that hosts heads there is one switch point, fixed once.
All attempts of the partition switch there, or none does. A point is fixed

* at a position, when the only attempt there is asks to switch (:meth:`ChangeInRun.apply`);
* at the beginning, when the first attempt starts after the change began;
* nowhere, when an attempt has taken all of its input under the old revision, or a second one starts while the first may
  be anywhere.

What stays behind in this way takes effect with the next epoch, which begins under the new revision.

Whether a task knows of the change decides the revision of what it says at its end (timers, totals). So this, too, is
decided once for each partition, in stages without heads as well: all attempts know of the change if the first one
started after it began or has switched; else none does. Those that do not know of it meet no rows of the new revision:
when the first attempt of a stage starts, the stage before has finished, and computing that again gives the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from midstream.control.messages import (
    ChangeBegun,
    StageChange,
    SwitchPoint,
    TaskId,
)
from midstream.ids import InputPosition, PartitionId, StageIndex

Place = tuple[StageIndex, PartitionId]
"""A partition of a stage: what attempts have in common."""


@dataclass
class Attempts:
    """The attempts of a run, by place: those that started, and the places of which one has finished."""

    started: dict[Place, set[TaskId]] = field(default_factory=dict)
    over: set[TaskId] = field(default_factory=set)
    """Finished or failed. One that was killed is not among them: nobody said so."""
    finished: set[Place] = field(default_factory=set)

    def alive(self, place: Place) -> set[TaskId]:
        """Attempts that may still be running."""
        return self.started.get(place, set()) - self.over

    def places(self, stage: StageIndex) -> list[Place]:
        """The places of a stage at which an attempt has started."""
        return sorted(place for place in self.started if place[0] == stage)


class ChangeInRun:
    """What is known of the change in this run. ``partitions`` counts those of each stage behind an exchange."""

    def __init__(self, begun: ChangeBegun, attempts: Attempts, partitions: Mapping[StageIndex, int]) -> None:
        self.begun = begun
        self._attempts = attempts
        self._partitions = partitions
        self._points: dict[Place, InputPosition | None] = {}
        self._reached: set[Place] = set()
        self._exhausted: set[Place] = set()
        self._started_before = frozenset(attempts.started)
        # What a later stage has begun to process was made before, by tasks that had not switched.
        self._too_late = any(attempts.places(stage) for stage in begun.followers)
        for stage in begun.heads:
            for place in attempts.places(stage):
                if place in attempts.finished or len(attempts.alive(place)) != 1:
                    self._points[place] = None

    @property
    def points(self) -> tuple[SwitchPoint, ...]:
        """All points that were fixed, in order."""
        return tuple(SwitchPoint(*place, position) for place, position in sorted(self._points.items()))

    def to_tell(self) -> list[tuple[TaskId, StageChange]]:
        """The running tasks that are to switch."""
        return [
            (task, self.stage_change(stage))
            for stage, heads in self.begun.heads.items()
            if heads
            for place in self._attempts.places(stage)
            if place not in self._points
            for task in self._attempts.alive(place)
        ]

    def stage_change(self, stage: StageIndex) -> StageChange:
        """The change as a task of this stage must know it."""
        return StageChange(self.begun.revision, self.begun.programs[stage], self.begun.heads.get(stage, ()))

    def start(self, place: Place, *, is_first: bool) -> InputPosition | None:
        """Where an attempt that starts now switches."""
        if not self.begun.heads.get(place[0]):
            return None
        return self._points.setdefault(place, {} if is_first else None)

    def is_known_at(self, place: Place) -> bool:
        """Whether attempts of this place know of the change. Ask after :meth:`start`."""
        return place not in self._started_before or self._points.get(place) is not None

    def apply(self, place: Place, position: InputPosition) -> bool:
        """Whether a task that asks to switch here may."""
        return self._points.setdefault(place, position) == position

    def finish(self, place: Place) -> None:
        """An attempt has finished; if it has not switched, no other one may."""
        if self.begun.heads.get(place[0]):
            self._points.setdefault(place, None)

    def exhaust(self, place: Place) -> None:
        """An attempt has taken all of its input; if it has not switched, no other one may."""
        self._points.setdefault(place, None)
        self._exhausted.add(place)

    def reach(self, place: Place) -> None:
        """Rows of the new revision have arrived there."""
        self._reached.add(place)

    @property
    def in_effect(self) -> bool:
        """Whether no row of this run meets an updated operator as it was before, from now on."""
        if self._too_late or self.begun.has_side_entrance:
            return False
        finished = self._attempts.finished
        over = finished | self._exhausted
        told = [place for stage in self.begun.heads for place in self._attempts.places(stage) if place not in over]
        if not all(self._points.get(place) is not None for place in told):
            return False
        # Behind an exchange, tasks process what is left of the old revision first.
        done = Counter(stage for stage, _ in self._reached | finished)
        return all(done[stage] >= self._partitions[stage] for stage in self.begun.followers)
