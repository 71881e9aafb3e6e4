"""The methods by which users let controllers look after a job: the part of a job that needs no Spark."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from midstream.change.change import Change
from midstream.controllers.controller import Controller
from midstream.controllers.proposal_records import ControllerState, ProposalRecord
from midstream.controllers.situation import StageLoad
from midstream.errors import MidstreamError
from midstream.runtime.controlled_job import ControlledJob
from midstream.runtime.controller_desk import ControllerDesk
from midstream.runtime.migrating_job import MigratingJob

if TYPE_CHECKING:
    from midstream.runtime.steering import ExecutorManager

__all__ = ["SteeredJob"]


class SteeredJob(MigratingJob, ControlledJob):
    """Controllers of a job. All methods may be called from any thread."""

    @property
    @abstractmethod
    def _steering(self) -> ControllerDesk:
        """Where controllers are attached."""

    def _begin_steering(self) -> None:
        """A controller is attached: make sure that epochs are observed."""

    @abstractmethod
    def update(self, *edits: Any, **how: Any) -> Change:
        """Change the job."""

    @property
    @abstractmethod
    def knobs(self) -> dict[str, int | None]:
        """The value of every knob."""

    @property
    @abstractmethod
    def changes(self) -> Sequence[Change]:
        """The changes in progress."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, for whatever reason."""
        try:
            self._require_running()
        except MidstreamError:
            return True
        return False

    @property
    def cores(self) -> int:
        """How many tasks can run at a time."""
        return 1

    @property
    def executor_manager(self) -> ExecutorManager | None:
        """The manager that can be asked for executors, if there is one."""
        return None

    def stage_loads(self) -> tuple[StageLoad, ...]:
        """The stages behind an exchange, with the weights of their bins."""
        return self._migrating.loads()

    def attach(self, controller: Controller, *, name: str | None = None, advise: bool = False) -> ControllerState:
        """Let a controller look at the job after each epoch, from the next one on, and do what it proposes.

        Its proposals are requested like anybody else's, one operation at a time; the history names the controller and
        its reason. One that fails is stopped, and the job goes on; :attr:`controllers` says why. Controllers end with
        the job: a script attaches them again, with ``flow.start(controllers=…)``.

        :param controller: :class:`midstream.AutoScale`, :class:`midstream.Balance`, :class:`midstream.Pace`,
            :class:`midstream.Migrate`, or one of your own.
        :param name: the name by which it is known; default: the name of its class.
        :param advise: only tell what it would do, see :meth:`proposals`.
        """
        self._require_running()
        attached = self._steering.attach(controller, name=name, advise=advise)
        self._begin_steering()
        return attached

    def detach(self, name: str) -> ControllerState:
        """Stop asking a controller. An operation that it has requested goes on."""
        return self._steering.detach(name)

    @property
    def controllers(self) -> tuple[ControllerState, ...]:
        """The controllers that are attached, in the order in which they are asked."""
        return self._steering.controllers

    def proposals(self) -> list[ProposalRecord]:
        """The proposals of controllers since this start, oldest first, with their reasons, figures and outcomes.

        The newest 1,000 are kept. Those that were requested are also in :meth:`history`, for good.
        """
        return self._steering.proposals()
