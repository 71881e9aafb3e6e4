"""What a test wants during a run: changes, migrations, cancelled or reversed migrations, control operations."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midstream.change.migration_request import MigrationRequest, migration_request
from midstream.change.prepare import scheduler_of
from midstream.change.trial import Request
from midstream.data.durations import duration
from midstream.errors import FlowError, FunctionError, MidstreamError
from midstream.ids import Epoch, StageIndex
from midstream.runtime.driver import Driver
from midstream.runtime.edge import DriverCrashed
from midstream.runtime.local.run import ChangeAt, ControlAt, MigrateAt

__all__ = ["RequestRefused", "Wishes"]

EAGERNESS = (0.3, 0.05, 0.01)
"""Chances that a change is requested at a step, from the stage where it should begin."""
BEFORE = StageIndex(-1)
"""Used instead of a stage: before an epoch is opened."""


@dataclass(frozen=True)
class Reconsideration:
    """A migration is cancelled or reversed."""

    epoch: int
    of: MigrateAt
    is_back: bool


def wishes(
    changes: Sequence[ChangeAt | MigrateAt | ControlAt],
) -> Iterator[ChangeAt | MigrateAt | ControlAt | Reconsideration]:
    """All requests of a test."""
    for each in changes:
        yield each
        if isinstance(each, MigrateAt):
            for epoch, is_back in ((each.cancel, False), (each.reverse, True)):
                if epoch is not None:
                    yield Reconsideration(epoch, each, is_back)


class RequestRefused(DriverCrashed):
    """A test's change does not fit: that is the test's mistake, not a failure of the run in progress."""

    def __init__(self, error: MidstreamError) -> None:
        self.error = error


class Wishes:
    """What is still to be requested. Each request is made in its epoch or, if that is over, in a later one: at some
    step of a stage that is chosen at random."""

    def __init__(self, changes: Sequence[ChangeAt | MigrateAt | ControlAt], rng: random.Random) -> None:
        self._rng = rng
        self._wanted = deque(sorted(wishes(changes), key=lambda each: each.epoch))
        self._numbers: dict[int, int] = {}
        """The number of each requested migration, by the identity of its wish."""
        self._eagerness = rng.choice(EAGERNESS)
        self._begin_in = BEFORE

    def begin(self, driver: Driver, epoch: Epoch) -> None:
        """A run of an epoch is about to be opened.

        All stages are equally likely; otherwise changes would hardly ever come late in an epoch. Nothing is drawn if
        there are no changes.
        """
        self._begin_in = BEFORE
        if self._is_due(epoch):
            self._begin_in = StageIndex(self._rng.randrange(BEFORE, len(driver.changes.configuration.plan.stages)))
        self.maybe_request(driver, epoch, BEFORE)

    def maybe_request(self, driver: Driver, epoch: Epoch, stage: StageIndex | None) -> None:
        """Request a change of this epoch, now or at a later step; when the epoch is over (None), now."""
        if stage is not None and stage < self._begin_in:
            return
        while self._is_due(epoch):
            if stage is not None and self._rng.random() >= self._eagerness:
                return
            try:
                self._request(driver, self._wanted.popleft())
            except MidstreamError as error:
                raise RequestRefused(error) from None

    def _is_due(self, epoch: Epoch) -> bool:
        return bool(self._wanted) and self._wanted[0].epoch <= epoch

    def _request(self, driver: Driver, wanted: ChangeAt | MigrateAt | ControlAt | Reconsideration) -> None:
        match wanted:
            case ChangeAt():
                try:
                    driver.changing.request(change_of(wanted))
                except FunctionError:
                    if not wanted.preflight:
                        raise
            case MigrateAt():
                try:
                    self._numbers[id(wanted)] = driver.migrating.migrate(migration_of(wanted)).number
                except FlowError:
                    if not wanted.if_possible:
                        raise
            case Reconsideration():
                self._turn(driver, wanted)
            case ControlAt():
                wanted.handles.append(driver.controlling.request(wanted.operation, by="test", note=None))

    def _turn(self, driver: Driver, wanted: Reconsideration) -> None:
        migration = driver.migrations.schedule.find(self._numbers.get(id(wanted.of), 0))
        if migration is None:
            return  # it was refused, or has ended
        if wanted.is_back:
            if migration.plan.target:
                migration.reverse()
        else:
            migration.cancel()


def change_of(wanted: ChangeAt) -> Request:
    """A change as a request."""
    return Request(
        wanted.edits,
        scheduler_of(wanted.scheduler),
        by="test",
        time_limit_s=None if wanted.time_limit is None else duration(wanted.time_limit, "time_limit") / 1e6,
        preflight=wanted.preflight,
    )


def migration_of(wanted: MigrateAt) -> MigrationRequest:
    """A migration as a request."""
    return migration_request(
        wanted.edits,
        by="test",
        strategy=wanted.strategy,
        budget=wanted.budget,
        prewarm=wanted.prewarm,
        at=wanted.at,
        queue=wanted.queue,
    )
