"""The migrations of a job in their order: the one that is running, and those that wait for their turn, for an epoch or
for an event time; and the epochs in which no bin may move. Decides what fits in, and what begins when.

No threads: it is used with the driver's lock held, like :mod:`.migrations`.
"""

from __future__ import annotations

from collections.abc import Iterable

from midstream.change.migration import Migration
from midstream.change.migration_goal import is_scheduled, moment_of
from midstream.change.migration_request import MigrationRequest
from midstream.change.trial import Changes
from midstream.checkpoint.change_records import MigrationRecord
from midstream.checkpoint.committed_state import CommittedState
from midstream.errors import FlowError
from midstream.ids import Epoch

__all__ = ["MigrationSchedule"]


class MigrationSchedule:
    """See the module's docstring. ``waiting`` are those of the log that have not ended."""

    def __init__(self, changes: Changes, waiting: Iterable[Migration], next_epoch: Epoch) -> None:
        self._changes = changes
        self.running: Migration | None = None
        """The migration that is moving bins."""
        # One that had begun goes first; it is already part of what the others were planned on.
        self._waiting = sorted(waiting, key=lambda migration: (not migration.plan.target, migration.number))
        self.next_epoch = next_epoch
        """The next epoch to begin, as far as is known."""
        self._free_from: Epoch | None = None

    @property
    def pending(self) -> tuple[Migration, ...]:
        """All that have not ended: the one that is running, then those that wait."""
        return (*(() if self.running is None else (self.running,)), *self._waiting)

    @property
    def free_from(self) -> Epoch | None:
        """The first epoch in which bins may move again, if assignments are frozen."""
        return self._free_from if self._free_from is not None and self._free_from > self.next_epoch else None

    def find(self, number: int) -> Migration | None:
        """One that has not ended, by its number in the history."""
        return next((each for each in self.pending if each.number == number), None)

    # ── what fits in ──────────────────────────────────────────────────────────────────────────────────────────────

    def require_free(self, what: str) -> None:
        """Refuse to move bins at once while something else moves bins, or while assignments are frozen."""
        if self.free_from is not None:
            raise FlowError(
                f"{what} is refused: assignments are frozen, so that no bin moves before epoch {self.free_from}, the "
                f"first free one; request it for then, with at={self.free_from}"
            )
        busy = [each for each in self.pending if each is self.running or not is_scheduled(each.plan)]
        if busy:
            raise FlowError(
                f"{what} is refused while migration {busy[0].number} ({busy[0].record.subjects}) is in progress; wait "
                f"for it, cancel it, or use job.migrate(…, queue=True) to have it done afterwards"
            )

    def require_possible(self, request: MigrationRequest) -> None:
        """Refuse a migration that cannot begin now, or at the time that was asked for."""
        what = "this migration"
        if request.at_epoch is not None and request.at_time is not None:
            raise FlowError("a migration begins at an epoch or at an event time; give one of them")
        if request.at_epoch is not None and request.at_epoch < self.next_epoch:
            raise FlowError(
                f"{what} is refused: epoch {request.at_epoch} has begun already; the next one is epoch "
                f"{self.next_epoch}"
            )
        graph = self._changes.configuration.graph
        if request.at_time is not None and all(source.event_time is None for source in graph.sources.values()):
            raise FlowError(
                f"{what} is refused: no source of flow {graph.name!r} has event times, so there is no watermark; give "
                f"at= the number of an epoch"
            )
        if request.at_epoch is not None and self._free_from is not None and request.at_epoch < self._free_from:
            raise FlowError(
                f"{what} is refused: assignments are frozen, so that no bin moves before epoch {self._free_from}, the "
                f"first free one"
            )
        if not request.is_scheduled and not request.queue:
            self.require_free(what)
        if self._changes.is_reassigning and not (request.queue or request.is_scheduled):
            raise FlowError(
                f"{what} is refused while a change that moves bins is in progress; wait for it, or give queue=True"
            )

    def before(self, request: MigrationRequest) -> list[Migration]:
        """The pending migrations that will be over when one that is requested now begins."""
        if request.at_time is not None:  # epochs and event times cannot be compared before they come
            return list(self.pending)
        if request.at_epoch is None:
            return [each for each in self.pending if each is self.running or not is_scheduled(each.plan)]
        at = request.at_epoch
        return [each for each in self.pending if each.plan.at_time is None and (each.plan.at_epoch or -1) <= at]

    def freeze(self, epochs: int) -> Epoch:
        """Promise that the next epochs keep their assignments; returns the first that is free again."""
        if type(epochs) is not int or epochs < 1:
            raise FlowError(f"freeze({epochs!r}): give the number of epochs that keep their assignments, 1 or more")
        free = Epoch(self.next_epoch + epochs)
        for each in self.pending:
            if not is_scheduled(each.plan) or each is self.running:
                raise FlowError(
                    f"assignments cannot be frozen while migration {each.number} ({each.record.subjects}) is in "
                    f"progress; wait for it or cancel it"
                )
            if each.plan.at_time is not None or (each.plan.at_epoch or 0) < free:
                raise FlowError(
                    f"assignments cannot be frozen up to epoch {free}: migration {each.number} "
                    f"({each.record.subjects}) is prepared for {moment_of(each.plan)}; cancel it first"
                )
        if self._changes.is_reassigning:
            raise FlowError("assignments cannot be frozen while a change that moves bins is in progress")
        self._free_from = max(free, self._free_from or free)
        return self._free_from

    def is_frozen(self, epoch: Epoch) -> bool:
        """Whether no bin may move in an epoch."""
        return self._free_from is not None and epoch < self._free_from

    # ── what begins when ──────────────────────────────────────────────────────────────────────────────────────────

    def add(self, migration: Migration) -> None:
        """Let one more wait."""
        self._waiting.append(migration)

    def withdraw(self, migration: Migration) -> bool:
        """Take one out of those that wait; return whether it was waiting."""
        if migration not in self._waiting:
            return False
        self._waiting.remove(migration)
        return True

    def clear(self) -> None:
        """Forget all of them: nothing waits, and nothing runs."""
        self.running = None
        self._waiting.clear()

    def next_due(self, epoch: Epoch, committed: CommittedState) -> Migration | None:
        """Take the one that begins now, if any: one prepared for this time goes before one that only waits for its
        turn."""
        due = [each for each in self._waiting if _is_due(each.plan, epoch, committed)]
        if not due:
            return None
        chosen = min(due, key=lambda each: (not each.plan.target, each.plan.at_epoch or 0, each.number))
        self._waiting.remove(chosen)
        return chosen

    def next_prepared(self, epoch: Epoch, within: int) -> Migration | None:
        """The first one that is prepared for an epoch soon after this one and loads state ahead."""
        near = range(epoch + 1, epoch + within)
        soon = [each for each in self._waiting if each.plan.prewarm and each.plan.at_epoch in near]
        return min(soon, key=lambda each: each.plan.at_epoch or 0, default=None)

    def why_waiting(self, migration: Migration) -> str:
        """The reason why a migration waits, in words."""
        if is_scheduled(migration.plan):
            return moment_of(migration.plan)
        return "the next epoch" if self.running is None else f"migration {self.running.number}"


def _is_due(plan: MigrationRecord, epoch: Epoch, committed: CommittedState) -> bool:
    if plan.at_time is not None:
        watermark = committed.watermarks.watermark
        return watermark is not None and watermark >= plan.at_time
    return plan.at_epoch is None or epoch >= plan.at_epoch
