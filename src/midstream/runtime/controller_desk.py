"""The controllers of a job: they are asked after each epoch, contained if they fail, and their proposals are requested
one by one.

:mod:`midstream.controllers.arbiter`, which is pure, decides on their proposals. This module asks and requests. It
knows a job by the two methods of :class:`Steerable`, so a simulated plant can take its place.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from midstream.controllers.arbiter import Arbiter, fault_of
from midstream.controllers.controller import Controller, Proposal
from midstream.controllers.proposal_records import ControllerState, ProposalOutcome, ProposalRecord
from midstream.controllers.situation import Situation
from midstream.controllers.subjects import words_of
from midstream.errors import FlowError, MidstreamError
from midstream.observation import Observation

__all__ = ["ControllerDesk", "Requested", "Steerable", "attached", "require_controllers"]

_log = logging.getLogger("midstream")

KEPT = 1000
"""Most proposals that are kept, the newest ones."""
MOST = 20
"""Most controllers of a job."""
FAULTS = 3
"""A controller that fails this many times in a row is stopped."""
TIME_LIMIT_S = 5.0
"""A controller that does not decide within this time is stopped."""
LONGEST = 500
"""Most characters of a reason or an error."""


@dataclass(frozen=True)
class Requested:
    """An operation that was requested of a job."""

    state: Callable[[], tuple[ProposalOutcome, str | None]]
    """Its outcome, and the reason if it failed."""
    change: int | None = None
    """Its number in the history, if it has one."""


class Steerable(Protocol):
    """The methods of a job that controllers need."""

    def situation(self, seen: Observation) -> Situation:
        """The situation after this observation, as controllers see it."""

    def request(self, proposal: Proposal, by: str, note: str) -> Requested:
        """Request an operation; raises an error if it cannot be."""


@dataclass
class _Attached:
    controller: Controller
    state: ControllerState
    memory: Any
    faults: int = 0
    last: ProposalRecord | None = None


@dataclass(frozen=True)
class _InProgress:
    """The operation in progress."""

    number: int
    attached: _Attached
    """The controller that has requested it; another one may have its name by now."""
    proposal: Proposal
    requested: Requested

    @property
    def controller(self) -> str:
        """The name of the controller."""
        return self.attached.state.name


class ControllerDesk:
    """The controllers of a job. All methods may be called from any thread."""

    def __init__(
        self, job: Steerable, wall: Callable[[], float] = time.time, time_limit_s: float | None = TIME_LIMIT_S
    ) -> None:
        self._job = job
        self._wall = wall
        self._time_limit_s = time_limit_s
        """None: controllers are called in the thread that observes."""
        self._step = threading.Lock()
        """Held while controllers are asked; never while waiting for anything else."""
        self._books = threading.Lock()
        """Guards what follows. Taken last."""
        self._attached: OrderedDict[str, _Attached] = OrderedDict()
        self._records: OrderedDict[int, ProposalRecord] = OrderedDict()
        self._arbiter = Arbiter()
        self._open: _InProgress | None = None
        self._next = 1

    # ── users' threads ────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, controller: Controller, *, name: str | None = None, advise: bool = False) -> ControllerState:
        """Ask a controller from the next epoch on. Raises :class:`FlowError` if it is not a controller, or its name is
        taken."""
        if not isinstance(controller, Controller):
            raise FlowError(
                f"a controller must be an instance of a subclass of Controller, found {controller!r:.60}; "
                f"ready-made ones are AutoScale, Balance, Pace and Migrate"
            )
        try:
            name, settings = _name_of(controller.name if name is None else name), f"{controller!r:.{LONGEST}}"
            attached = _Attached(
                controller,
                ControllerState(name=name, settings=settings, advises=bool(advise), attached_at=self._wall()),
                controller.first(),
            )
        except MidstreamError:
            raise
        except Exception as error:
            raise FlowError(
                f"controller {type(controller).__name__} cannot begin: {type(error).__name__}: {error}"
            ) from error
        with self._books:
            if name in self._attached:
                raise FlowError(
                    f"a controller {name!r} is attached already ({self._attached[name].state.settings}); detach it "
                    f"first, or give the other one a name"
                )
            if len(self._attached) >= MOST:
                raise FlowError(f"the job has {MOST} controllers, and cannot have more; detach one first")
            self._arbiter = self._arbiter.forgotten(name)
            self._attached[name] = attached
            return attached.state

    def detach(self, name: str) -> ControllerState:
        """Stop asking a controller. An operation that it has requested goes on. Raises :class:`FlowError` if none has
        this name."""
        with self._books:
            found = self._attached.pop(name, None)
            if found is None:
                there = ", ".join(map(repr, self._attached)) or "none"
                raise FlowError(f"no controller {name!r} is attached; attached: {there}")
            return found.state

    @property
    def controllers(self) -> tuple[ControllerState, ...]:
        """The attached controllers, in their order."""
        with self._books:
            return tuple(each.state for each in self._attached.values())

    def proposals(self) -> list[ProposalRecord]:
        """The newest proposals, oldest first."""
        with self._books:
            return list(self._records.values())

    # ── the thread that observes ──────────────────────────────────────────────────────────────────────────────────

    def observe(self, seen: Observation) -> None:
        """An epoch is committed: ask all controllers, and request what is due."""
        with self._step:
            self._settle(seen.epoch)
            with self._books:
                asked = [each for each in self._attached.values() if each.state.stopped is None]
            if not asked:
                return
            situation = self._job.situation(seen)
            if self._open is not None:
                situation = replace(situation, in_progress=_in_progress(self._open))
            # All of them see the same, and are decided on in their order.
            found = [(each, self._decision(each, situation)) for each in asked]
            for attached, proposals in found:
                for proposal in proposals:
                    if attached.state.stopped is None:
                        self._judge(attached, proposal, situation)

    def _settle(self, epoch: int) -> None:
        """Check how the operation in progress has ended."""
        opened = self._open
        if opened is None:
            return
        outcome, error = opened.requested.state()
        if outcome is ProposalOutcome.PENDING:
            return
        self._open, attached = None, opened.attached
        with self._books:
            is_there = self._attached.get(opened.controller) is attached
            self._arbiter = self._arbiter.ended(
                opened.controller,
                words_of(opened.proposal.operation),
                epoch,
                well=outcome is ProposalOutcome.APPLIED or not is_there,
            )
            record = self._records.get(opened.number)
            if record is not None:
                record = _ended(record, outcome, error, self._wall())
                self._records[opened.number] = record
                if attached.last is not None and attached.last.number == opened.number:
                    attached.last = record
            if outcome is ProposalOutcome.APPLIED:
                attached.state = msgspec.structs.replace(attached.state, applied=attached.state.applied + 1)

    def _decision(self, attached: _Attached, situation: Situation) -> tuple[Proposal, ...]:
        """The proposals of a controller. If it fails, that is recorded, and repeated failures stop it."""
        seen = replace(situation, last=attached.last)

        def decide() -> tuple[tuple[Proposal, ...], Any]:
            answer: Any = attached.controller.decide(seen, attached.memory)
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise _Fault(f"decide must return (proposals, memory), found {answer!r:.60}")
            if wrong := fault_of(answer[0], seen):
                raise _Fault(wrong)
            for each in answer[0]:
                _figures_of(each)
            return tuple(answer[0]), answer[1]

        try:
            proposals: tuple[Proposal, ...]
            proposals, memory = _within(self._time_limit_s, decide, attached.state.name)
        except _Late:
            self._fault(attached, f"it has not decided within {self._time_limit_s:g} s", situation, at_once=True)
        except _Fault as fault:
            self._fault(attached, str(fault), situation)
        except BaseException as error:
            self._fault(attached, f"it raised {type(error).__name__}: {error}", situation)
        else:
            attached.memory, attached.faults = memory, 0
            return proposals
        return ()

    def _fault(self, attached: _Attached, why: str, situation: Situation, *, at_once: bool = False) -> None:
        attached.faults += 1
        self._note(attached, situation, ProposalOutcome.FAULT, error=why)
        if at_once or attached.faults >= FAULTS:
            often = "" if at_once else f" ({attached.faults} times in a row)"
            self._stop(attached, f"{why}{often}")

    def _stop(self, attached: _Attached, why: str) -> None:
        _log.warning("controller %r of the job is stopped: %s", attached.state.name, why)
        with self._books:
            attached.state = msgspec.structs.replace(attached.state, stopped=why[:LONGEST])

    def _judge(self, attached: _Attached, proposal: Proposal, situation: Situation) -> None:
        """Request a proposal, or say why not."""
        name = attached.state.name
        with self._books:
            if self._attached.get(name) is not attached:  # detached while it was asked
                return
        if self._open is not None:  # another one of this epoch came first
            situation = replace(situation, in_progress=_in_progress(self._open))
        objection = self._arbiter.objection(name, attached.controller.touches, proposal, situation)
        if objection is not None:
            self._note(attached, situation, ProposalOutcome.REFUSED, proposal, error=objection)
            return
        if attached.state.advises:
            self._note(attached, situation, ProposalOutcome.ADVISED, proposal)
            return
        try:
            requested = self._job.request(proposal, f"controller {name}", proposal.reason[:LONGEST])
        except Exception as error:  # the job is as it was
            why = str(error) if isinstance(error, MidstreamError) else f"{type(error).__name__}: {error}"
            with self._books:
                self._arbiter = self._arbiter.failed(name, proposal, situation)
            self._note(attached, situation, ProposalOutcome.FAILED, proposal, error=why)
            return
        with self._books:  # from the newest, because somebody may have been attached meanwhile
            self._arbiter = self._arbiter.after(name, proposal, situation)
        number = self._note(attached, situation, ProposalOutcome.PENDING, proposal, change=requested.change)
        self._open = _InProgress(number, attached, proposal, requested)
        self._settle(situation.observation.epoch)  # some end at once

    def _note(
        self,
        attached: _Attached,
        situation: Situation,
        outcome: ProposalOutcome,
        proposal: Proposal | None = None,
        *,
        error: str | None = None,
        change: int | None = None,
    ) -> int:
        """Keep a record, or count a repetition of the last one; return its number."""
        last, now = attached.last, self._wall()
        words = "" if proposal is None else words_of(proposal.operation)
        found = ProposalRecord(
            number=0,
            controller=attached.state.name,
            epoch=situation.observation.epoch,
            proposed_at=now,
            operation=words,
            reason="" if proposal is None else proposal.reason[:LONGEST],
            figures={} if proposal is None else _figures_of(proposal),
            outcome=outcome,
            error=None if error is None else error[:LONGEST],
            change=change,
        )
        with self._books:
            repeats = outcome is not ProposalOutcome.PENDING and last is not None
            if repeats and last is not None and (last.operation, last.outcome) == (words, outcome):
                found = msgspec.structs.replace(found, number=last.number, times=last.times + 1)
            else:
                found = msgspec.structs.replace(found, number=self._next)
                self._next += 1
            self._records[found.number] = found
            if len(self._records) > KEPT:
                self._records.popitem(last=False)
            attached.last = found
            attached.state = msgspec.structs.replace(attached.state, proposals=attached.state.proposals + 1)
            return found.number


def attached(desk: ControllerDesk, controllers: Sequence[Controller]) -> ControllerDesk:
    """The desk, with these controllers attached."""
    for each in controllers:
        desk.attach(each)
    return desk


def require_controllers(controllers: object) -> None:
    """Refuse what cannot be attached to a job, before there is one."""
    if not isinstance(controllers, Sequence):
        raise FlowError(f"controllers={controllers!r:.60} must be a list of controllers")
    attached(ControllerDesk(_NoJob()), controllers)


class _NoJob:
    def situation(self, seen: Observation) -> Situation:
        return Situation(seen)

    def request(self, proposal: Proposal, by: str, note: str) -> Requested:
        raise FlowError("there is no job")


class _Late(Exception):
    """A controller has not decided in time. No :class:`TimeoutError`, because it may raise one itself."""


class _Fault(Exception):
    """A controller has returned something that is not a decision."""


def _within(seconds: float | None, call: Callable[[], Any], name: str) -> Any:
    """Return or raise what a call does; raise :class:`_Late` if it takes longer, and leave its thread alone."""
    if seconds is None:
        return call()
    answers: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"controller {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise _Late
    if errors:
        raise errors[0]
    return answers[0]


def _ended(record: ProposalRecord, outcome: ProposalOutcome, error: str | None, at: float) -> ProposalRecord:
    why = None if error is None else error[:LONGEST]
    return msgspec.structs.replace(record, outcome=outcome, error=why, ended_at=at)


def _in_progress(opened: _InProgress) -> str:
    return f"{words_of(opened.proposal.operation)!r} of controller {opened.controller!r}"


def _name_of(found: object) -> str:
    """A name that can be a part of an address."""
    if not isinstance(found, str) or not found or len(found) > 60 or not found.replace("-", "_").isidentifier():
        raise FlowError(
            f"the name of a controller is made of letters, digits, '_' and '-', and begins with a letter; found "
            f"{found!r:.60}"
        )
    return found


def _figures_of(proposal: Proposal) -> dict[str, float]:
    """The figures of a proposal as numbers; raises an error that names one that is not a number."""
    if not isinstance(proposal.reason, str):
        raise _Fault(f"the reason of a proposal must be a text, found {proposal.reason!r:.60}")
    found: dict[str, float] = {}
    for name, value in dict(proposal.figures).items():
        number = math.nan
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)
        if not math.isfinite(number):
            raise _Fault(f"figure {name!r:.40} of a proposal must be a finite number, found {value!r:.40}")
        found[str(name)] = number
    return found
