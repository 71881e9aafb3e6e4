"""A change that takes effect within a run of an epoch: which tasks switch, where, and whether all of them have.

The rule that makes replays safe: for each partition of a stage that hosts heads there is one switch point, fixed once.
All attempts of the partition switch there, or none does. A point is fixed

* at a position, when the partition's only attempt asks to switch (:meth:`Switching.apply`);
* at the beginning, when the first attempt starts after the change began;
* nowhere, when an attempt has taken all of its input under the old revision, or a second one starts while the first may
  be anywhere.

Partitions that do not switch run the change in the next epoch, which begins under the new revision.

Whether a task knows about the change decides the revision of its end-of-epoch output (timers, totals). So this, too, is
decided once for each partition, also in stages without heads: all attempts know about the change if the first one
started after it began or has switched; otherwise none does. Those that do not know about it get no rows of the new
revision: when the first attempt of a stage starts, the stage before has finished, and a recomputation gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from midstream.control.messages import (
    Accepted,
    ChangeBegun,
    ChangeNoted,
    Commit,
    Event,
    Exhausted,
    GiveUpRun,
    Instruction,
    OperationMessage,
    Reached,
    Send,
    StageChange,
    Stay,
    Switch,
    SwitchPoint,
    SwitchRequested,
    TaskFailed,
    TaskFinished,
    TaskId,
    TaskOrder,
)
from midstream.control.run_book import Attempts, Place
from midstream.engine.control_order import ControlReport
from midstream.ids import InputPosition, StageIndex

__all__ = ["Switching"]


class Switching:
    """An :class:`~midstream.control.operations.operation.Operation`: a change takes effect within a run."""

    def __init__(self, begun: ChangeBegun, attempts: Attempts, partitions: Mapping[StageIndex, int]) -> None:
        self.begun = begun
        self._attempts = attempts
        self._partitions = partitions
        self._points: dict[Place, InputPosition | None] = {}
        # What :attr:`in_effect` depends on is kept up to date place by place, so no message costs a look at all tasks.
        self._over: set[Place] = set()
        """Places where no row meets a function any more: an attempt has finished, or has run out of rows."""
        self._old: set[Place] = set()
        """Places of heads at which rows may still meet the old version: started, not over, and switching nowhere."""
        self._done: dict[StageIndex, set[Place]] = {stage: set() for stage in begun.followers}
        """By stage of followers: the places that rows of the new revision have reached, or that have finished."""
        self._started_before = frozenset(attempts.started)
        # If a later stage has started, its input was computed before, by tasks that had not switched.
        self._too_late = any(attempts.places(stage) for stage in begun.followers)
        for stage in begun.heads:
            for place in attempts.places(stage):
                if place in attempts.finished or len(attempts.alive(place)) != 1:
                    self._points[place] = None
        for place in attempts.finished:
            self._finished(place)
        for stage in begun.heads:
            self._old.update(place for place in attempts.places(stage) if place not in self._over)

    @property
    def points(self) -> tuple[SwitchPoint, ...]:
        """All fixed points, in order."""
        return tuple(SwitchPoint(*place, position) for place, position in sorted(self._points.items()))

    def to_tell(self) -> list[tuple[TaskId, StageChange]]:
        """The running tasks to notify."""
        return [
            (task, change)
            for stage, heads in self.begun.heads.items()
            if heads
            for change in (self.stage_change(stage),)
            for place in self._attempts.places(stage)
            if place not in self._points
            for task in self._attempts.alive(place)
        ]

    def stage_change(self, stage: StageIndex) -> StageChange:
        """What a task of this stage must know about the change."""
        return StageChange(self.begun.revision, self.begun.programs[stage], self.begun.heads.get(stage, ()))

    # ── events of the run ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_over(self) -> bool:
        """It ends with the run: tasks that start later are told which revision runs."""
        return False

    def on_begun(self, listening: Mapping[TaskId, bytes]) -> list[Instruction]:
        """Tell the running tasks."""
        told: list[Instruction] = [
            Send(listening[task], Switch(task, change)) for task, change in self.to_tell() if task in listening
        ]
        return [*told, self._noted(None, f"told {len(told)} running task(s)")]

    def excludes(self, event: Event) -> str | None:
        """One change at a time."""
        if not isinstance(event, ChangeBegun):
            return None
        return f"the change to revision {self.begun.revision} is in progress"

    def on_task_started(self, task: TaskId, assignment: TaskOrder) -> TaskOrder:
        """Decide whether the attempt knows about the change, and where it switches."""
        place = (task.stage, task.partition)
        switch_at = self.start(place)
        return msgspec.structs.replace(
            assignment,
            change=self.stage_change(task.stage) if self.is_known_at(place) else None,
            switch_at=switch_at,
            live=(*assignment.live, *self.begun.live),
        )

    def on_message(self, peer: bytes, message: OperationMessage) -> list[Instruction] | None:
        """A task asks to switch, or reports its progress with the change."""
        if message.revision != self.begun.revision:
            return None
        task = message.task
        place = (task.stage, task.partition)
        match message:
            case SwitchRequested(position=position):
                if not self.apply(place, position):
                    return [Send(peer, Stay())]
                return [Send(peer, Accepted()), self._noted(task, "switched", self.begun.heads.get(task.stage, ()))]
            case Reached(operators=operators):
                self.reach(place)
                return [self._noted(task, "reached", operators)]
            case Exhausted():
                self.exhaust(place)
                return [self._noted(task, "has no rows left")]

    def on_handled(self, places: Sequence[Place], report: ControlReport) -> list[Instruction] | None:
        """That is of a control operation."""
        return None

    def on_heard_again(self, task: TaskId, peer: bytes) -> list[Instruction]:
        """Tell it again, unless where it switches is known."""
        place = (task.stage, task.partition)
        if not self.begun.heads.get(task.stage) or place in self._points or task in self._attempts.over:
            return []
        return [Send(peer, Switch(task, self.stage_change(task.stage)))]

    def on_task_ended(self, report: TaskFinished | TaskFailed) -> list[Instruction]:
        """A failure under the new revision is caused by the change, so Spark need not retry the task."""
        task = report.task
        if isinstance(report, TaskFailed):
            return [GiveUpRun(task.epoch, task.run)] if report.revision == self.begun.revision else []
        self.finish((task.stage, task.partition))
        return [self._noted(task, "finished")]

    def on_run_over(self, commit: Commit) -> Commit:
        """The next epoch begins under the new revision."""
        return msgspec.structs.replace(commit, revision=self.begun.revision, switches=self.points)

    def _noted(self, task: TaskId | None, what: str, operators: tuple[str, ...] = ()) -> ChangeNoted:
        return ChangeNoted(self.begun.revision, task, what, operators, self.in_effect)

    # ── the rule ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, place: Place) -> InputPosition | None:
        """The switch point for an attempt that starts now."""
        heads = self.begun.heads.get(place[0])
        point = self._points.setdefault(place, None if place in self._started_before else {}) if heads else None
        if heads is not None and point is None and place not in self._over:
            self._old.add(place)
        return point

    def is_known_at(self, place: Place) -> bool:
        """Whether attempts of this place know about the change. Call this after :meth:`start`."""
        return place not in self._started_before or self._points.get(place) is not None

    def apply(self, place: Place, position: InputPosition) -> bool:
        """Whether a task may switch here, as it has asked."""
        point = self._points.setdefault(place, position)
        if point is not None:
            self._old.discard(place)
        return point == position

    def finish(self, place: Place) -> None:
        """An attempt has finished; if it has not switched, no other one may."""
        if self.begun.heads.get(place[0]):
            self._points.setdefault(place, None)
        self._finished(place)

    def exhaust(self, place: Place) -> None:
        """An attempt has taken all of its input; if it has not switched, no other one may."""
        self._points.setdefault(place, None)
        self._over.add(place)
        self._old.discard(place)

    def reach(self, place: Place) -> None:
        """Rows of the new revision have reached this place."""
        if (done := self._done.get(place[0])) is not None:
            done.add(place)

    def _finished(self, place: Place) -> None:
        self._over.add(place)
        self._old.discard(place)
        self.reach(place)

    @property
    def in_effect(self) -> bool:
        """Whether from now on no row of this run meets the old version of an updated operator."""
        if self._too_late or self.begun.has_side_entrance or self._old:
            return False
        # Behind an exchange, tasks process the remaining rows of the old revision first.
        return all(len(done) >= self._partitions[stage] for stage, done in self._done.items())
