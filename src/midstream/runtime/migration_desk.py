"""Users' requests for migrations of a job. Each takes the driver's lock, so that it falls between two steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from midstream.change.bin_bytes import BinBytes
from midstream.change.configuration import Configuration
from midstream.change.migration import Migration
from midstream.change.migration_explanation import MigrationExplanation, explained
from midstream.change.migration_goals import Goal, Rebalance, edits_of
from midstream.change.migration_request import MigrationRequest, migration_request
from midstream.control.placement import unevenness
from midstream.controllers.situation import StageLoad
from midstream.errors import MidstreamError
from midstream.ids import Epoch, PartitionId, StageIndex
from midstream.planner.assignment import Assignment
from midstream.planner.reassignment import stages_named, unique_names

if TYPE_CHECKING:
    from midstream.runtime.driver import Driver

__all__ = ["MigrationDesk", "PartitionShare", "StageShares"]

KEPT = 100
"""Migrations whose handles are kept after they have ended."""


class PartitionShare(msgspec.Struct, frozen=True):
    """A partition: its bins, the rows that arrive for them, its work in shares of a core, and its bytes of state."""

    partition: int
    bins: int
    rows_per_s: float = 0.0
    work: float = 0.0
    bytes: float = 0.0
    executor: str | None = None
    """Where it ran in the last epoch, if partitions stick to executors."""


class StageShares(msgspec.Struct, frozen=True):
    """The assignment of a stage: the owner of each bin, and what each partition has."""

    name: str
    owners: tuple[int, ...]
    partitions: tuple[PartitionShare, ...]

    @property
    def assignment(self) -> Assignment:
        """The same as a target for ``job.migrate``."""
        return Assignment(len(self.partitions), self.owners)


class MigrationDesk:
    """The migrations of a job, for threads of users."""

    def __init__(self, driver: Driver, lock: threading.RLock) -> None:
        self._driver = driver
        self._lock = lock
        self._known: OrderedDict[int, Migration] = OrderedDict()

    def migrate(self, request: MigrationRequest) -> Migration:
        """Take a migration; its first step is made when an epoch begins. One that cannot be made is refused and
        recorded."""
        migrations = self._driver.migrations
        with self._lock:
            self._driver.require_not_stopping()
            try:
                return self._kept(migrations.request(request))
            except MidstreamError as error:
                migrations.refuse(request, error)
                raise

    def _kept(self, migration: Migration) -> Migration:
        self._known[migration.number] = migration
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return migration

    def explain(self, request: MigrationRequest) -> MigrationExplanation:
        """Explain a migration as if it were requested now. Makes the same checks."""
        driver = self._driver
        with self._lock:
            driver.require_not_stopping()
            driver.migrations.schedule.require_possible(request)
            before, after = driver.migrations.goal(request)
            plan = driver.changes.configuration.plan
            sizes = BinBytes(driver.committed, plan)
            return explained(plan, request, before, after, sizes, driver.migrations.steady_ms)

    def freeze(self, epochs: int) -> Epoch:
        """Promise that the next epochs keep their assignments; returns the first that need not."""
        with self._lock:
            self._driver.require_not_stopping()
            return self._driver.migrations.schedule.freeze(epochs)

    def cancel_migration(self, migration: Migration) -> None:
        """Make no more steps of a migration."""
        with self._lock:
            self._driver.migrations.cancel(migration)

    def reverse_migration(self, migration: Migration) -> Migration:
        """Bring the bins of a migration back to where they were."""
        with self._lock:
            self._driver.require_not_stopping()
            found = self._driver.migrations.reverse(migration)
            return found if isinstance(found, Migration) else self._kept(self._driver.migrations.request(found))

    def request_for(self, goals: Sequence[Goal], **how: Any) -> MigrationRequest:
        """The request that leads to goals, starting from the assignments after all changes in progress."""
        driver = self._driver
        with self._lock:
            now, weights, places = driver.changes.newest(), driver.measures.weights, self._places()
        uneven = self._uneven(goals, now)
        request = migration_request(edits_of(goals, now.plan, now.assignments, weights, places, uneven), **how)
        return replace(request, spreads=bool(uneven))

    def _uneven(self, goals: Sequence[Goal], now: Configuration) -> set[int]:
        """The numbers of partitions, of stages to be rebalanced, that executors could share more evenly; this is tried
        out."""
        rebalanced = {
            stage for goal in goals if isinstance(goal, Rebalance) for stage in stages_named(now.plan, goal.stage)
        }
        return {now.assignments[stage].partitions for stage in rebalanced if self._could_be_more_even(stage, now)}

    def _could_be_more_even(self, stage: StageIndex, now: Configuration) -> bool:
        here, partitions = self._driver.placement.of(stage), now.assignments[stage].partitions
        if len(here) != partitions:
            return False  # not known, or another number has only just taken effect
        there = self._driver.propose_places(partitions)
        executors = {*here.values(), *there.values()}
        return bool(there) and unevenness(there, executors) < unevenness(here, executors)

    def find(self, number: int) -> Migration | None:
        """A migration of this life of the driver, by its number in the history; older ones are forgotten."""
        with self._lock:
            return self._driver.migrations.schedule.find(number) or self._known.get(number)

    @property
    def pending(self) -> tuple[Migration, ...]:
        """The migrations that have not ended: the running one, then those that wait."""
        with self._lock:
            return self._driver.migrations.schedule.pending

    def shares(self) -> tuple[StageShares, ...]:
        """The assignment of each stage behind an exchange, with what each partition has."""
        with self._lock:
            configuration = self._driver.changes.configuration
            weights, places = self._driver.measures.weights, self._places()
        found = []
        for name, stage in unique_names(configuration.plan).items():
            assignment, measured = configuration.assignments[stage], weights.stages.get(stage)
            partitions = []
            for number in range(assignment.partitions):
                bins = assignment.owned_by(PartitionId(number))
                rows, work, _, size = (0.0,) * 4 if measured is None else measured.of(bins)
                at = places.get(stage, {}).get(number)
                partitions.append(PartitionShare(number, len(bins), rows, work, size, at))
            found.append(StageShares(name, assignment.owners, tuple(partitions)))
        return tuple(found)

    def loads(self) -> tuple[StageLoad, ...]:
        """The stages behind an exchange, as controllers see them."""
        with self._lock:
            configuration, weights = self._driver.changes.configuration, self._driver.measures.weights
        found = []
        for name, stage in unique_names(configuration.plan).items():
            assignment, measured = configuration.assignments[stage], weights.stages.get(stage)
            if measured is None:
                work, size = (0.0,) * assignment.bins, 0.0
            else:
                work, size = tuple(measured.busy.tolist()), float(measured.nbytes.sum())
            found.append(StageLoad(name, configuration.plan.stages[stage].operators, assignment, work, size))
        return tuple(found)

    def _places(self) -> Mapping[StageIndex, Mapping[int, str]]:
        """The executors of partitions, as far as they are known."""
        found = self._driver.placement.places or {}
        return {stage: {int(number): str(at) for number, at in places.items()} for stage, places in found.items()}
