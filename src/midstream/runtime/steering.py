"""How controllers reach a job, through its public methods: what they see of it, and how their proposals are
requested."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from midstream.change.change import Change
from midstream.change.migration import Migration
from midstream.change.migration_goals import Drain, Rebalance
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.control_log import ControlOutcome
from midstream.controllers.controller import Executors, Proposal
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.controllers.situation import Situation
from midstream.engine.control_operations import ControlOperation
from midstream.errors import FlowError
from midstream.flow.edits import Divide, Move, Rescale
from midstream.observation import Observation
from midstream.planner.assignment import Assignment
from midstream.runtime.controller_desk import ControllerDesk, Requested
from midstream.runtime.executor_release import ExecutorRelease
from midstream.runtime.watch import Watch

if TYPE_CHECKING:
    from midstream.runtime.control_handle import ControlHandle
    from midstream.runtime.steered_job import SteeredJob

__all__ = ["ExecutorManager", "JobSteering", "SteeringThread"]

_log = logging.getLogger("midstream")

PATIENCE_S = 10.0


class ExecutorManager(Protocol):
    """The manager that can be asked for executors."""

    def ask(self, count: int) -> Requested:
        """Ask for this many in all."""

    def release(self, name: str) -> Requested:
        """End one executor, and have it not replaced."""


class JobSteering:
    """A job, as controllers reach it."""

    def __init__(self, job: SteeredJob) -> None:
        self._job = job

    def situation(self, seen: Observation) -> Situation:
        """The situation of the job, as controllers see it."""
        job = self._job
        return Situation(
            seen,
            job.stage_loads(),
            job.knobs,
            executors=max(1, len(job.executors)),
            cores=job.cores,
            can_ask_for_executors=job.executor_manager is not None,
            in_progress=self._in_progress(),
        )

    def _in_progress(self) -> str | None:
        for record in [*(each.record for each in self._job.changes), *(each.record for each in self._job.migrations)]:
            plan = record.migration
            is_later = plan is not None and (plan.at_epoch, plan.at_time) != (None, None) and record.epoch is None
            if not is_later:
                return f"change {record.number}, which {record.by} has requested"
        return None

    def request(self, proposal: Proposal, by: str, note: str) -> Requested:
        """Request an operation of the job."""
        job, how = self._job, {**proposal.how, "by": by, "note": note}
        operation: Any = proposal.operation
        match operation:
            case Rescale() | Move() | Divide() | Rebalance() | Drain() | Assignment() | Mapping():
                return _requested(job.migrate(operation, **how))
            case ControlOperation():
                return _running(job.control(operation, **how))
            case Executors(count=count):
                manager = job.executor_manager
                if manager is None:
                    raise FlowError("the manager of this cluster cannot be asked for executors")
                if count < len(job.executors):
                    drain = partial(job.migrate, **how)
                    release = ExecutorRelease(count, lambda: job.executors, lambda name: drain(Drain(name)), manager)
                    return release.requested
                return manager.ask(count)
            case _:
                return _requested(job.update(operation, **how))


def _requested(change: Change | Migration) -> Requested:
    def state() -> tuple[ProposalOutcome, str | None]:
        match change.outcome:
            case Outcome.PENDING:
                return ProposalOutcome.PENDING, None
            case Outcome.APPLIED:
                return ProposalOutcome.APPLIED, None
            case outcome:
                return ProposalOutcome.FAILED, f"{outcome}: {change.error}" if change.error else str(outcome)

    return Requested(state, change.record.number)


def _running(handle: ControlHandle) -> Requested:
    def state() -> tuple[ProposalOutcome, str | None]:
        if not handle.is_over:
            return ProposalOutcome.PENDING, None
        failed = handle.error is not None or handle.outcome is not ControlOutcome.COMPLETE
        return ProposalOutcome.FAILED if failed else ProposalOutcome.APPLIED, handle.error

    return Requested(state)


class SteeringThread:
    """Has controllers look at each epoch, in a thread of their own, as long as the job runs."""

    def __init__(self, desk: ControllerDesk, watch: Callable[[], Watch]) -> None:
        self._desk = desk
        self._watch = watch
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def begin(self) -> None:
        """Begin, unless it has begun: a job without controllers needs no thread."""
        with self._lock:
            if self._thread is None and not self._is_over:
                watch = self._watch()
                self._thread = threading.Thread(
                    target=self._run, args=(watch,), name="midstream-controllers", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """Wait for the end; the job's observations have ended."""
        with self._lock:
            self._is_over = True
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _run(self, watch: Watch) -> None:
        told = ""
        while True:
            try:
                if (seen := watch.newest()) is None:
                    return
                self._desk.observe(seen)
            except Exception as error:  # a bug of ours, or the job has just ended
                if not self._is_over and f"{error!r}" != told:  # what fails in every epoch is told once
                    told = f"{error!r}"
                    _log.warning("controllers could not look at the newest epoch", exc_info=True)
