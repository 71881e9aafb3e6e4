"""The control operations of a job: requested by users' threads, carried by runs, ended by commits.

A blocking operation is on record before its first run, and an epoch's manifest says that it is complete. So whatever
happens in between, it is complete in exactly one committed epoch, or it has failed and no epoch has anything of it:

=============================  =====================================================================================
a handler fails                the run is given up, the operation has failed, the epoch runs again without it
a run is lost or given up      the next run carries it again, under the same number
runs are lost again and again  the operation has failed; it may be what kills the workers
the driver dies                the next one goes on with it under the same number, unless the manifest has it
=============================  =====================================================================================

Operations that are not blocking change nothing. They are not on record, and end with their driver.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from midstream.checkpoint.control_log import ControlOutcome, ControlRecord
from midstream.checkpoint.control_values import ControlValues
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.control.messages import Commit, ControlBegun, ControlNoted, TaskFailed
from midstream.engine.control_operations import ControlMode, ControlOperation, ControlProgram, prepared
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.engine.control_values import decoded
from midstream.errors import FlowError
from midstream.ids import Digest, Epoch, StageIndex
from midstream.planner.stages import Leaves, Plan
from midstream.runtime.control_handle import ControlHandle
from midstream.runtime.edge import Edge

if TYPE_CHECKING:
    from midstream.runtime.driver import Driver

__all__ = ["ControlDesk"]

KEPT = 1000
"""Operations whose handles are kept after they have ended."""
MOST_OPEN = 1000
"""Operations that may be in progress at the same time."""
MOST_LOSSES = 3
"""Runs that may be lost with an operation before it is taken for the cause."""
MOST_RESTARTS = 3
"""Drivers that may continue an operation before it is taken for the cause of their deaths."""


@dataclass
class _Open:
    """An operation in progress."""

    handle: ControlHandle
    mode: ControlMode
    operation: ControlOperation | None
    """None if it was requested from an earlier driver; then it is loaded when it is needed."""
    losses: int = 0
    is_in_run: bool = False
    is_ending: bool = False
    """Whether all handlers in tasks have returned, so that no other run carries it."""

    @property
    def goes_on(self) -> bool:
        """Whether the next start of the job continues it if this one ends now."""
        return self.mode is ControlMode.BLOCKING and not self.is_ending


class ControlDesk:
    """The control operations of a job. Methods for the driver are called with its lock held, except :meth:`noted`."""

    def __init__(self, driver: Driver, lock: threading.RLock, checkpoint: Checkpoint, edge: Edge) -> None:
        self._driver = driver
        self._lock = lock
        self._checkpoint = checkpoint
        self._edge = edge
        self._values = ControlValues(checkpoint.control_values)
        # Guards what follows. Taken last, and never held during calls to others.
        self._books = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._known: deque[ControlHandle] = deque(maxlen=KEPT)
        self._next = checkpoint.controls.next_number()
        self._recent: dict[int, ControlRecord] = {}
        """Blocking operations that are complete with one of the last two epochs, which may have to run again."""
        self._is_over: str | None = None
        """Why the job has ended, if it has."""

    def resume(self, newest: Manifest | None) -> None:
        """Continue the operations that an earlier driver has left. Called once, at the start."""
        self._values.tidy()
        for record in self._checkpoint.controls.records():
            if record.outcome is not ControlOutcome.PENDING:
                if newest is not None and record.epoch is not None and record.epoch >= newest.epoch:
                    self._recent[record.number] = record
                continue
            opened = _Open(ControlHandle(record), ControlMode(record.mode), None)
            self._open[record.number] = opened
            if newest is not None and record.number in newest.controls:
                self._completed([(opened, newest.controls[record.number])], newest.epoch)
            elif record.restarts >= MOST_RESTARTS and not record.is_stopped:
                why = f"{record.restarts + 1} drivers died while it was in progress, so it may be the cause"
                self._fail(opened, why)
            else:
                restarts = record.restarts if record.is_stopped else record.restarts + 1
                self._keep([opened], is_stopped=False, restarts=restarts)

    def taken_back(self, epoch: Epoch) -> None:
        """An epoch that had a manifest runs again for other rows, so operations that were complete with it have yet to
        happen."""
        for record in list(self._recent.values()):
            if record.outcome is ControlOutcome.COMPLETE and record.epoch is not None and record.epoch >= epoch:
                opened = _Open(ControlHandle(record), ControlMode(record.mode), None)
                self._open[record.number] = opened
                self._keep([opened], outcome=ControlOutcome.PENDING, epoch=None, ended_at=None, error=None)

    # ── for users' threads ────────────────────────────────────────────────────────────────────────────────────────

    def request(self, operation: ControlOperation, *, by: str, note: str | None) -> ControlHandle:
        """Check an operation, and begin it as soon as possible. If it cannot be done, raises before anything has
        changed."""
        blobs, changes = self._checkpoint.blobs, self._driver.changes
        with blobs.holds.preparing():  # until it is among those that need its blob
            self._driver.require_not_stopping()
            # This runs the user's code and waits for the disk, so without the lock. If a change takes an operator away
            # meanwhile, the next run fails the operation.
            program = prepared(operation, changes.configuration.graph)
            blobs.put(program.blob)
            opened = self._opened(operation, program, by, note)
            if opened.mode is ControlMode.BLOCKING:
                self._checkpoint.controls.keep(opened.handle.record)
            with self._lock:
                self._take(opened)
            return opened.handle

    def _opened(self, operation: ControlOperation, program: ControlProgram, by: str, note: str | None) -> _Open:
        with self._books:
            if len(self._open) >= MOST_OPEN:
                raise FlowError(
                    f"{MOST_OPEN} control operations are in progress, and no more are taken; wait for some of them"
                )
            number, self._next = self._next, self._next + 1
        record = ControlRecord(
            number=number,
            name=program.name,
            mode=str(program.mode),
            operators=program.operators,
            program=program.blob.digest,
            requested_at=self._driver.wall(),
            by=by,
            note=note,
            time_limit_s=program.time_limit_s,
            result_limit=program.result_limit,
        )
        return _Open(ControlHandle(record), program.mode, operation)

    def _take(self, opened: _Open) -> None:
        with self._books:
            self._open[opened.handle.number] = opened
        if self._is_over is not None:  # the job has ended meanwhile
            self._abandon(opened, self._is_over)
        elif opened.mode is ControlMode.FAST and self._driver.is_running:
            opened.is_in_run = True
            order = self._order(opened, self._driver.changes.configuration.plan)
            self._driver.tell(ControlBegun(order))

    def find(self, number: int) -> ControlHandle | None:
        """An operation of this start of the job, by its number; older ones are forgotten."""
        with self._books:
            handles = [*(each.handle for each in self._open.values()), *self._known]
        return next((handle for handle in handles if handle.number == number), None)

    def records(self) -> list[ControlRecord]:
        """All operations that are on record, and those of this start of the job, by number."""
        with self._books:
            handles = [*self._known, *(each.handle for each in self._open.values())]
        found = {record.number: record for record in self._checkpoint.controls.records()}
        found.update({handle.number: handle.record for handle in handles})
        return [found[number] for number in sorted(found)]

    # ── for the driver ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_aligned(self) -> bool:
        """Whether the run in progress carries operations among its rows, so that changes wait for the next epoch."""
        return any(each.is_in_run and each.mode is not ControlMode.FAST for each in self._all())

    def live(self) -> frozenset[Digest]:
        """The blobs of all operations in progress."""
        with self._books:
            records = [*(each.handle.record for each in self._open.values()), *self._recent.values()]
        return frozenset(record.program for record in records)

    def begin(self, plan: Plan) -> tuple[ControlOrder, ...]:
        """A run is opened; returns the operations that it carries."""
        orders = []
        for opened in self._all():
            if opened.is_ending:
                continue
            record = opened.handle.record
            if gone := [name for name in record.operators if all(name not in stage.operators for stage in plan.stages)]:
                self._fail(opened, f"the flow has no operator {gone[0]!r} any more")
                continue
            opened.is_in_run = True
            orders.append(self._order(opened, plan))
        return tuple(orders)

    def completed_in(self, commit: Commit) -> dict[int, tuple[ControlReport, ...]]:
        """The entries for the manifest of an epoch: the blocking operations that are complete with it."""
        blocking = {each.handle.number for each in self._all() if each.mode is ControlMode.BLOCKING}
        return {number: reports for number, reports in commit.controls.items() if number in blocking}

    def committed(self, commit: Commit) -> None:
        """The manifest of an epoch is written."""
        completed = []
        for opened in self._all():
            opened.is_in_run, opened.losses = False, 0
            if opened.handle.number in commit.controls and not opened.is_ending:
                completed.append((opened, commit.controls[opened.handle.number]))
        self._completed(completed, commit.epoch)
        blocking = (each.handle.record for each, _ in completed if each.mode is ControlMode.BLOCKING)
        kept = {record.number: record for record in (*self._recent.values(), *blocking)}
        with self._books:
            self._recent = {
                number: record for number, record in kept.items() if (record.epoch or Epoch(0)) >= commit.epoch - 1
            }

    def noted(self, noted: ControlNoted, epoch: Epoch | None) -> None:
        """A fast operation is complete. Called by the channel's thread, without the driver's lock."""
        with self._books:
            opened = self._open.get(noted.number)
        if opened is not None and not opened.is_ending:
            self._completed([(opened, noted.reports)], epoch, noted.missed)

    def failed(self, failures: Sequence[TaskFailed], *, is_lost: bool) -> bool:
        """A run has failed; returns whether operations are to blame, or may be, so that its epoch runs again.

        This terminates: each True ends an operation, or counts one more loss of each.
        """
        carried = [each for each in self._all() if each.is_in_run]
        for opened in carried:
            opened.is_in_run = False
        guilty = {each.operation: each.failure for each in failures if each.operation}
        for opened in carried:
            if (failure := guilty.get(opened.handle.number)) is not None:
                traceback = f"\n\n{failure.traceback}" if failure.traceback else ""
                self._fail(opened, f"{failure.error}{traceback}")
        if guilty:
            return True
        if failures or not is_lost or not carried:
            return False
        for opened in carried:
            opened.losses += 1
            if opened.losses >= MOST_LOSSES:
                self._fail(opened, f"{opened.losses} runs were lost while it was in progress, so it may be the cause")
        return True

    def given_up(self) -> None:
        """A run is over without a commit, and nothing is to blame: the next one carries the same operations."""
        for opened in self._all():
            opened.is_in_run = False

    def abandon(self, why: str) -> None:
        """The job ends. The next start continues the operations on record."""
        self._is_over = why
        self._keep([each for each in self._all() if each.goes_on], is_stopped=True)
        for opened in self._all():
            self._abandon(opened, why)

    def _abandon(self, opened: _Open, why: str) -> None:
        record = opened.handle.record
        if opened.goes_on:
            self._ended(opened, record, error=f"{why}; it goes on when the job starts again")
        elif record.outcome is ControlOutcome.COMPLETE:
            self._ended(opened, record, error=f"{why}, before its result was known")
        else:
            self._ended(opened, msgspec.structs.replace(record, outcome=ControlOutcome.FAILED, error=why), error=why)

    # ── books ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> list[_Open]:
        with self._books:
            return list(self._open.values())

    def _order(self, opened: _Open, plan: Plan) -> ControlOrder:
        record = opened.handle.record
        return ControlOrder(
            number=record.number,
            name=record.name,
            mode=opened.mode,
            program=record.program,
            operators=record.operators,
            entries=_entries(plan),
            values=self._values.folder(record.number),
            time_limit_s=record.time_limit_s,
            result_limit=record.result_limit,
        )

    def _keep(self, some: Sequence[_Open], **fields: Any) -> None:
        """Change records of operations; those of blocking ones are stored together."""
        for opened in some:
            opened.handle.record = msgspec.structs.replace(opened.handle.record, **fields)
        self._checkpoint.controls.keep_all([each.handle.record for each in some if each.mode is ControlMode.BLOCKING])

    def _completed(
        self, some: Sequence[tuple[_Open, Sequence[ControlReport]]], epoch: Epoch | None, missed: int = 0
    ) -> None:
        """All handlers in tasks have returned, and their results count. Only the driver's part is left."""
        good = []
        for opened, reports in some:
            opened.is_ending = True
            opened.handle.record = msgspec.structs.replace(opened.handle.record, tasks=len(reports), missed=missed)
            if errors := [report.error for report in reports if report.error is not None]:
                self._fail(opened, errors[0])
            else:
                good.append((opened, reports))
        ended_at = self._driver.wall()
        self._keep([each for each, _ in good], outcome=ControlOutcome.COMPLETE, epoch=epoch, ended_at=ended_at)
        for opened, reports in good:
            self._begin_to_finish(opened, reports)

    def _begin_to_finish(self, opened: _Open, reports: Sequence[ControlReport]) -> None:
        record = opened.handle.record
        results = [report.result for report in reports if report.result is not None]
        overdue = f"finish has not returned after {record.time_limit_s:g} s"
        self._edge.aside(
            partial(self._finish, opened, results),
            record.time_limit_s,
            lambda: self._ended(opened, opened.handle.record, error=overdue),
        )

    def _finish(self, opened: _Open, results: Sequence[bytes]) -> None:
        """Merge results and call ``finish``. Runs the user's code, in a thread that may never come back."""
        record = opened.handle.record
        try:
            operation = opened.operation
            if operation is None:
                operation, _ = pickle.loads(self._checkpoint.blobs.get(record.program))
            merged: Any = None
            for number, result in enumerate(map(decoded, results)):
                merged = operation.merge(merged, result) if number else result
            found = operation.finish(merged)
        except (Exception, SystemExit) as error:
            self._ended(opened, record, error=f"what tasks did counts, but then: {type(error).__name__}: {error}")
            return
        self._ended(opened, record, found)

    def _fail(self, opened: _Open, why: str) -> None:
        self._keep([opened], outcome=ControlOutcome.FAILED, error=why, ended_at=self._driver.wall())
        self._ended(opened, opened.handle.record, error=why)

    def _ended(self, opened: _Open, record: ControlRecord, result: Any = None, error: str | None = None) -> None:
        if error is not None and record.error is None:
            record = msgspec.structs.replace(record, error=error)
        if not opened.handle.end(record, result, error):
            return  # it was too late
        with self._books:
            self._open.pop(record.number, None)
            self._known.append(opened.handle)
        self._values.tidy()


def _entries(plan: Plan) -> tuple[StageIndex, ...]:
    """The stages that are not behind an exchange: no other task sends them messages."""
    stages = plan.stages
    return tuple(
        each.index for each in stages if each.index == 0 or stages[each.index - 1].leaves is not Leaves.EXCHANGE
    )
