"""A budget that several jobs share: attached to each of them as one of its controllers.

What each gets is decided by :class:`midstream.controllers.share.Share`, which is pure. This module holds the budget
that all of them see, and takes those out that have ended.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from midstream.controllers.controller import Controller, Proposal
from midstream.controllers.proposal_records import ControllerState
from midstream.controllers.share import Share, SharedBudget
from midstream.controllers.situation import Situation, StageLoad
from midstream.errors import FlowError
from midstream.flow.knobs import require_takers
from midstream.flow.model import Graph

__all__ = ["Sharing"]


class SharingJob(Protocol):
    """What sharing needs of a job: what users call."""

    @property
    def name(self) -> str:
        """Its flow's name."""

    @property
    def graph(self) -> Graph:
        """Its flow."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""

    @property
    def controllers(self) -> tuple[ControllerState, ...]:
        """Those that are attached."""

    def stage_loads(self) -> tuple[StageLoad, ...]:
        """Its stages behind an exchange."""

    def attach(self, controller: Controller, *, name: str | None = None, advise: bool = False) -> ControllerState:
        """Have a controller look at it."""

    def detach(self, name: str) -> ControllerState:
        """Ask a controller no more."""


class Sharing:
    """Jobs of one application that share a budget. All methods may be called from any thread.

    Each job has it as one of its controllers, so what it proposes is one of the job's operations: in its order, its
    proposals and its history, and contained if it fails. A job that has ended, for whatever reason, or whose
    controller was detached, gives its share to the others; one that goes on keeps the limit that it had.

    :param share: how the budget is divided.
    :param jobs: running jobs, which are known by the names of their flows; or a dict that gives them other names.

    Used like this::

        sharing = Sharing(Share(rows_per_epoch=10_000, weights={"orders": 2}), [orders, audit])
        sharing.attach()
        print(sharing.shares)
        sharing.detach("audit")

    >>> Sharing(Share(cores=4), [])
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: Share: there are no jobs to share between
    """

    def __init__(self, share: Share, jobs: Sequence[SharingJob] | Mapping[str, SharingJob]) -> None:
        if not isinstance(share, Share):
            raise FlowError(f"a budget is shared by a Share, found {share!r:.60}")
        self._share = share
        self._jobs = _named(jobs)
        share.first(list(self._jobs))
        for name, job in self._jobs.items():
            _require_taker(share, name, job)
        self._budget = SharedBudget()
        self._attached: dict[str, ControllerState] = {}
        self._lock = threading.Lock()
        """Guards both. Nothing is called while it is held."""

    def attach(self, *, name: str = "Share", advise: bool = False) -> None:
        """Have all of the jobs share from their next epochs on; or none, if one of them refuses.

        :param name: of the controller that each job gets.
        :param advise: only tell what would be done, see ``job.proposals()``.
        """
        with self._lock:
            if self._attached:
                raise FlowError(f"{', '.join(map(repr, self._attached))} share already; detach them first")
        attached: dict[str, ControllerState] = {}
        try:
            for each, job in self._jobs.items():
                attached[each] = job.attach(_ShareOfJob(self._share, each, self), name=name, advise=advise)
        except BaseException:
            for each, state in attached.items():
                self._jobs[each].detach(state.name)
            raise
        with self._lock:
            self._budget, self._attached = self._share.first(list(self._jobs)), attached

    def detach(self, job: str | None = None) -> None:
        """Let a job leave, or all of them. What it has stays as it is, and no longer counts.

        :param job: its name; default: all of them.
        """
        with self._lock:
            there = dict(self._attached)
            if job is not None and job not in there:
                raise FlowError(f"no job {job!r} shares; sharing: {', '.join(map(repr, there)) or 'none'}")
            leaving = list(there) if job is None else [job]
            self._leave(leaving)
        for each in leaving:
            if _has(self._jobs[each], there[each]):
                self._jobs[each].detach(there[each].name)

    @property
    def shares(self) -> dict[str, int | None]:
        """What each job may take now, by its name; None for no limit, and until it has been seen."""
        self._leave_those_that_ended()
        with self._lock:
            return {
                name: int(own.held) if math.isfinite(own.held) else None for name, own in self._budget.shares.items()
            }

    def decide(self, job: str, seen: Situation) -> Sequence[Proposal]:
        """Called by the controller of a job: what it should change."""
        self._leave_those_that_ended(asking=job)
        with self._lock:
            proposals, self._budget = self._share.decide(job, seen, self._budget)
        return proposals

    def _leave_those_that_ended(self, asking: str | None = None) -> None:
        with self._lock:
            there = dict(self._attached)
        gone = [
            name
            for name, state in there.items()
            if name != asking and (self._jobs[name].is_over or not _has(self._jobs[name], state))
        ]
        with self._lock:
            self._leave(gone)

    def _leave(self, jobs: Sequence[str]) -> None:
        for each in jobs:
            self._attached.pop(each, None)
            self._budget = self._budget.without(each)


@dataclass(frozen=True, repr=False)
class _ShareOfJob(Controller):
    """The controller that one of the jobs has."""

    share: Share
    job: str
    sharing: Sharing

    touches: ClassVar[frozenset[str]] = frozenset({"knobs", "partitions"})

    def __repr__(self) -> str:
        return f"{self.share!r}, here for {self.job!r}"

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """What this job should change; what is remembered is the budget of all."""
        return self.sharing.decide(self.job, seen), memory


def _named(jobs: Any) -> dict[str, SharingJob]:
    """The jobs by their names. Raises :class:`FlowError` if one is there twice, or is none."""
    if isinstance(jobs, str) or not isinstance(jobs, Mapping | Sequence):
        raise FlowError(f"jobs={jobs!r:.60} must be a list of running jobs, or a dict of them by name")
    every: list[SharingJob] = list(jobs.values()) if isinstance(jobs, Mapping) else list(jobs)
    for job in every:
        if not all(hasattr(job, part) for part in ("attach", "detach", "is_over")):
            raise FlowError(f"jobs must be running, as flow.start gives them; found {job!r:.60}")
    names: list[str] = list(jobs) if isinstance(jobs, Mapping) else [job.name for job in every]
    for n, (name, job) in enumerate(zip(names, every, strict=True)):
        if any(job is other for other in every[:n]):
            raise FlowError(f"job {name!r} is given twice; each shares once")
        if name in names[:n]:
            raise FlowError(f"two jobs are called {name!r}; give a dict with a name for each")
    return dict(zip(names, every, strict=True))


def _require_taker(share: Share, name: str, job: SharingJob) -> None:
    """Refuse a job that cannot be given a share of such a budget."""
    if job.is_over:
        raise FlowError(f"job {name!r} has ended, so it cannot share")
    if share.rows_per_epoch is not None:
        try:
            require_takers(job.graph, {"rows_per_epoch": 1})
        except FlowError as error:
            raise FlowError(f"job {name!r} cannot share rows per epoch: {error}") from None
    elif not job.stage_loads():
        raise FlowError(f"job {name!r} cannot share cores: it has no stage behind an exchange, so no partitions")


def _has(job: SharingJob, state: ControllerState) -> bool:
    """Whether a job still has the controller that was attached."""
    return any((each.name, each.attached_at) == (state.name, state.attached_at) for each in job.controllers)
