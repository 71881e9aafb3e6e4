"""What users ask of a job's changes: checked while epochs go on, taken under the driver's lock, between two steps."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from midstream.change.change import Change
from midstream.change.preflight import changed_transforms, run_preflight
from midstream.change.prepare import PreparedChange
from midstream.change.trial import Request
from midstream.checkpoint.location import Checkpoint
from midstream.errors import MidstreamError
from midstream.flow.edits import reassignments_in, tuned_by
from midstream.planner.change_plan import Scheduler
from midstream.runtime.claimed_sinks import ClaimedSinks
from midstream.runtime.edge import Edge

if TYPE_CHECKING:
    from midstream.runtime.driver import Driver

__all__ = ["ChangeDesk"]

_log = logging.getLogger("midstream")


class ChangeDesk:
    """The changes of a job, for threads of users. Everything that runs their code is done without the lock."""

    def __init__(
        self,
        driver: Driver,
        lock: threading.RLock,
        checkpoint: Checkpoint,
        edge: Edge,
        sinks: ClaimedSinks,
        *,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._driver = driver
        self._lock = lock
        self._checkpoint = checkpoint
        self._edge = edge
        self._sinks = sinks
        self._stopwatch = stopwatch

    def check(self, request: Request) -> PreparedChange:
        """Prepare a change as if it were requested now."""
        blobs, changes = self._checkpoint.blobs, self._driver.changes
        with blobs.holds.preparing(), blobs.together():
            prepared = changes.check(changes.store(request))
            self._edge.check_knobs(tuned_by(request.edits))
            return prepared

    def request(self, request: Request) -> Change:
        """Check a change and enact it as soon as possible. A change that does not fit is refused and recorded."""
        with self._checkpoint.blobs.holds.preparing():  # until its blobs are on record
            return self._request(request)

    def _request(self, request: Request) -> Change:
        driver, changes, blobs = self._driver, self._driver.changes, self._checkpoint.blobs
        began = self._stopwatch()
        try:
            # Everything that runs the user's code comes first, without the lock; epochs continue meanwhile.
            with blobs.together():  # synced before the record of the change refers to them
                request = changes.store(request)
                prepared = changes.check(request)
                self._edge.check_knobs(tuned_by(request.edits))
                blobs.sync_ahead()  # the disk is at work while the preflight is
                if request.preflight:
                    self._try(prepared)
                difference = prepared.merged.difference
                self._sinks.claim(
                    prepared.after.graph, {*difference.added, *difference.replaced}, self._edge.check_sinks
                )
            while True:
                with self._lock:
                    driver.require_not_stopping()
                    if reassignments_in(request.edits):
                        driver.migrations.schedule.require_free("a change that moves bins")
                    if changes.is_current(prepared):
                        return self._take(request, prepared, 1000 * (self._stopwatch() - began))
                prepared = changes.check(request)  # another change came first
        except MidstreamError as error:
            with self._lock:
                if not driver.is_stopping:
                    changes.refuse(request, error)
            raise

    def _try(self, prepared: PreparedChange) -> None:
        self._edge.try_transforms(prepared.after.graph, changed_transforms(prepared))
        with contextlib.ExitStack() as stack:
            with self._lock:
                samples = self._driver.samples
                stack.enter_context(self._driver.sweeper.holding(samples.files()))
            for note in run_preflight(prepared, samples, self._checkpoint.blobs, self._checkpoint.states):
                _log.info("%s", note)

    def _take(self, request: Request, prepared: PreparedChange, preparation_ms: float) -> Change:
        change = self._driver.changes.request(request, prepared, preparation_ms)
        if self._driver.changes.on_trial is change:
            self._enact(change)
        return change

    def _enact(self, change: Change) -> None:
        driver, prepared = self._driver, change.prepared
        if not driver.is_running:
            change.note("no epoch is running; the next one begins under it", in_effect=True)
        elif prepared.plan.scheduler is Scheduler.REPLAY:
            change.note("the running epoch is cancelled")
            driver.replay()
        elif prepared.from_next_epoch:
            change.note("waits for the next epoch")
        elif driver.controlling.is_aligned:
            change.note("waits for the next epoch, because control operations are in progress in this one")
        else:
            driver.tell(prepared.begun)
            driver.start_time_limit()
