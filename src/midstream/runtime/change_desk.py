"""Users' requests for changes of a job: checked while epochs go on, accepted under the driver's lock, between two
steps."""

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
from midstream.change.trial import Request, RunFailure
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
    """The changes of a job, for threads of users. All of users' code runs without the lock."""

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
            self._check_sources(prepared)
            return prepared

    def request(self, request: Request) -> Change:
        """Check a change and enact it as soon as possible. A change that does not fit is refused and recorded.

        Tasks are told before anything of the change is on disk, so that nobody waits for the disk until its effect. No
        epoch is committed before it is, and this method returns after that. Until then, a loss of power loses the
        change together with all that ran under it.
        """
        blobs = self._checkpoint.blobs
        with blobs.holds.preparing():  # until its blobs are on record
            try:
                with blobs.together() as put:
                    change = self._request(request, put.sync)
                self._driver.changes.secure()
            finally:
                self._edge.settle_sources()
        return change

    def _request(self, request: Request, sync: Callable[[], None]) -> Change:
        driver, changes = self._driver, self._driver.changes
        began = self._stopwatch()
        try:
            # Everything that runs the user's code comes first, without the lock; epochs continue meanwhile.
            request = changes.store(request)
            prepared = changes.check(request)
            self._edge.check_knobs(tuned_by(request.edits))
            self._check_sources(prepared)
            if request.preflight:
                self._try(prepared)
            difference = prepared.merged.difference
            self._sinks.claim(prepared.after.graph, {*difference.added, *difference.replaced}, self._edge.check_sinks)
            if prepared.hands_over and not changes.in_progress:  # else the sources will be made when it is its turn
                self._edge.prepare_sources(prepared.after.graph)
            while True:
                with self._lock:
                    driver.require_not_stopping()
                    if reassignments_in(request.edits):
                        driver.migrations.schedule.require_free("a change that moves bins")
                    if changes.is_current(prepared):
                        return self._take(request, prepared, 1000 * (self._stopwatch() - began), sync)
                prepared = changes.check(request)  # another change came first
        except MidstreamError as error:
            with self._lock:
                if not driver.is_stopping:
                    changes.refuse(request, error)
            raise

    def _check_sources(self, prepared: PreparedChange) -> None:
        """Refuse a change that adds sources which cannot be read here, or needs a hand-over that cannot be made."""
        if prepared.hands_over:
            difference = prepared.merged.difference
            graph = prepared.after.graph
            self._edge.check_sources(
                graph, [name for name in graph.sources if name in (*difference.added, *difference.replaced)]
            )

    def _try(self, prepared: PreparedChange) -> None:
        self._edge.try_transforms(prepared.after.graph, changed_transforms(prepared))
        with contextlib.ExitStack() as stack:
            with self._lock:
                samples = self._driver.samples
                stack.enter_context(self._driver.sweeper.holding(samples.files()))
            for note in run_preflight(prepared, samples, self._checkpoint.blobs, self._checkpoint.states):
                _log.info("%s", note)

    def _take(
        self, request: Request, prepared: PreparedChange, preparation_ms: float, sync: Callable[[], None]
    ) -> Change:
        change = self._driver.changes.request(request, prepared, preparation_ms, sync)
        if self._driver.changes.on_trial is change:
            self._enact(change)
        return change

    def _enact(self, change: Change) -> None:
        driver, prepared = self._driver, change.prepared
        is_replayed = driver.is_running and prepared.plan.scheduler is Scheduler.REPLAY
        if prepared.hands_over and not is_replayed:
            change.note("waits for the next epoch, before which the sources are handed over")
            driver.hand_over_if_due()
        elif not driver.is_running:
            change.note("no epoch is running; the next one begins under it", in_effect=True)
        elif is_replayed:
            change.note("the running epoch is cancelled")
            driver.replay()
        elif prepared.from_next_epoch:
            change.note("waits for the next epoch")
        elif driver.controlling.is_aligned:
            change.note("waits for the next epoch, because control operations are in progress in this one")
        else:
            driver.tell(prepared.begun)
            driver.start_time_limit()

    # ── sources ───────────────────────────────────────────────────────────────────────────────────────────────────

    def sources_failed(self, error: BaseException) -> bool:
        """The engine cannot read its sources. True if a change of the sources is to blame, and is rolled back."""
        with self._lock:
            changes = self._driver.changes
            change = changes.on_trial
            if self._driver.is_stopping or change is None or not change.prepared.hands_over:
                return False
            [first, *_] = str(error).strip().splitlines() or [""]
            why = f"its sources could not be read: {type(error).__name__}: {first}"
            return changes.failed(RunFailure(why), changes.configuration)

    def sources_exchanged(self, seconds: float) -> None:
        """The engine's query has been exchanged for one with the sources of the next epoch."""
        with self._lock:
            change = self._driver.changes.on_trial
            if change is not None and change.prepared.hands_over:
                change.note(f"the sources are handed over, after {1000 * seconds:.0f} ms")
                if change.time_limit_s is not None and not self._driver.is_running:
                    half = change.time_limit_s / 2  # the second half is for looking whether they answer
                    self._edge.start_timer(half, lambda: self._watch_sources(change, half))

    def _watch_sources(self, change: Change, seconds: float) -> None:
        """Roll a change back if its sources do not answer. No epoch begins either if they just have no rows."""
        if self._edge.await_sources(seconds):
            return
        with self._lock:
            driver = self._driver
            if driver.is_running or driver.is_stopping or driver.changes.on_trial is not change:
                return
            limit = f"{change.time_limit_s:g} s"
            why = f"its sources did not answer within the time limit of {limit} after they were handed over"
            if driver.changes.failed(RunFailure(why, is_overdue=True), driver.changes.configuration):
                driver.hand_over_if_due()
