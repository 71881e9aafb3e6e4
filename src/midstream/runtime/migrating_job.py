"""The methods by which users move and rescale keyed state: the part of a job that needs no Spark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from midstream.change.migration import Migration
from midstream.change.migration_explanation import MigrationExplanation
from midstream.change.migration_goals import Drain, Goal, Rebalance
from midstream.change.migration_request import MigrationRequest
from midstream.checkpoint.change_records import whoami
from midstream.control.placement import ExecutorShare
from midstream.flow.edits import Rescale
from midstream.ids import Epoch
from midstream.runtime.migration_desk import MigrationDesk, StageShares

__all__ = ["MigratingJob"]


class MigratingJob(ABC):
    """Migrations of a job. All methods may be called from any thread."""

    @property
    @abstractmethod
    def _migrating(self) -> MigrationDesk:
        """Where migrations are requested."""

    @abstractmethod
    def _require_running(self) -> None:
        """Raise if the job has ended."""

    def migrate(
        self,
        *goals: Goal,
        strategy: str = "budgeted",
        budget: str | int | None = None,
        prewarm: bool = True,
        at: int | datetime | None = None,
        queue: bool = False,
        by: str | None = None,
        note: str | None = None,
    ) -> Migration:
        """Give bins other owners while the job runs, in small steps; their state moves with them.

        Returns at once; the handle tells the progress, cancels and reverses. Every epoch has one assignment, and a row
        meets, at its new owner, exactly the state of all rows before. Functions can be updated at the same time.

        :param goals: where bins are to be: :class:`midstream.Move`, :class:`midstream.Rescale`,
            :class:`midstream.Divide`, :class:`midstream.Rebalance`, :class:`midstream.Drain`, or an
            :class:`midstream.Assignment`, in a dict by the names of stages if there are several.
        :param strategy: how the moves are cut into steps. ``"sudden"``: all in one; ``"fluid"``: one bin a step;
            ``"batched"``: in a step no partition takes part in two moves; ``"budgeted"``: as much a step as fits the
            budget.
        :param budget: what a step may add to its epoch: a length of time (``"50 ms"``), or the bytes that it may move
            (``"16 MB"``). Default: a fifth of the steady time of an epoch.
        :param prewarm: whether executors that take bins load their state ahead, so that a step reads only what has
            changed meanwhile.
        :param at: the first epoch in which bins may move, or an event time: the first epoch that begins with a
            watermark that has reached it. Several migrations can be prepared ahead, in any order.
        :param queue: whether it waits if another migration is in progress, instead of being refused.
        :param by: who requests it, for the history; default: the user of this process.
        :param note: the reason, for the history.
        """
        self._require_running()
        return self._migrating.migrate(
            self._migration(
                goals,
                strategy=strategy,
                budget=budget,
                prewarm=prewarm,
                at=at,
                queue=queue,
                by=by or whoami(),
                note=note,
            )
        )

    def explain_migration(self, *goals: Goal, **how: Any) -> MigrationExplanation:
        """Explain a migration without making it: its steps, bytes and time, and which bins move where.

        Takes what :meth:`migrate` takes, and makes the same checks. ``print`` the result, or draw it:
        :meth:`.MigrationExplanation.to_svg`.
        """
        self._require_running()
        return self._migrating.explain(self._migration(goals, **{"by": whoami(), **how}))

    def rescale(self, partitions: int, stage: str | None = None, **how: Any) -> Migration:
        """Give a stage, or every stage, another number of partitions; as few bins move as an even spread allows.

        :param partitions: from 1 to the number of bins. New partitions start before they get their first bin; surplus
            ones go with their last bin.
        :param stage: the name of the stage's ``key_by``, or of an operator that runs in it.
        :param how: as for :meth:`migrate`.
        """
        return self.migrate(Rescale(partitions, stage), **how)

    def rebalance(self, stage: str | None = None, *, measure: str = "work", **how: Any) -> Migration:
        """Give the partitions of a stage, or of every stage, about the same weight, as it was measured.

        If executors have very different numbers of partitions, or one has joined and has none, partitions are first
        spread over executors anew, in one step; their state is loaded ahead, as for every step.

        :param measure: ``"work"``, ``"rows"`` or ``"bytes"``, see :class:`midstream.Rebalance`.
        """
        return self.migrate(Rebalance(stage, measure), **how)

    def drain(self, executor: str, **how: Any) -> Migration:
        """Move everything off an executor, in all stages, so that it can be removed."""
        return self.migrate(Drain(executor), **how)

    def freeze(self, epochs: int) -> Epoch:
        """Promise that the next epochs keep their assignments; returns the first epoch that need not.

        A migration that would begin before is refused, and told which epoch is free. The promise ends with this start
        of the job.
        """
        self._require_running()
        return self._migrating.freeze(epochs)

    def assignment(self) -> tuple[StageShares, ...]:
        """The owner of each bin, for each stage behind an exchange, and the rows, work and state of each partition."""
        return self._migrating.shares()

    @property
    @abstractmethod
    def executors(self) -> tuple[ExecutorShare, ...]:
        """The executors, and which partitions each ran in the last epoch, with how many bins."""

    @property
    def migrations(self) -> tuple[Migration, ...]:
        """The migrations in progress: the one that is running, then those that wait."""
        return self._migrating.pending

    def migration(self, number: int) -> Migration | None:
        """A migration of this start of the job, by its number in the history."""
        return self._migrating.find(number)

    def _migration(self, goals: Sequence[Goal], **how: Any) -> MigrationRequest:
        return self._migrating.request_for(goals, **how)
