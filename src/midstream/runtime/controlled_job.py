"""The methods by which users run control operations: the part of a job that needs no Spark."""

from __future__ import annotations

from abc import ABC, abstractmethod

from midstream.checkpoint.change_records import whoami
from midstream.checkpoint.control_log import ControlRecord
from midstream.engine.control_operations import ControlOperation
from midstream.runtime.control_desk import ControlDesk
from midstream.runtime.control_handle import ControlHandle

__all__ = ["ControlledJob"]


class ControlledJob(ABC):
    """Control operations of a job. All methods may be called from any thread."""

    @property
    @abstractmethod
    def _controlling(self) -> ControlDesk:
        """Where control operations are requested."""

    @abstractmethod
    def _require_running(self) -> None:
        """Raise if the job has ended."""

    def control(self, operation: ControlOperation, *, by: str | None = None, note: str | None = None) -> ControlHandle:
        """Run a control operation: handlers of your own at the operators of this job, while it runs.

        Returns at once; :meth:`.ControlHandle.result` waits for the result. The operation may be defined after the job
        was started: it travels by value. One that cannot be sent, or names unknown operators, is refused here. If a
        handler fails, the operation has failed, and the job continues as if it had never been requested.

        :param operation: an instance of a subclass of :class:`midstream.ControlOperation`.
        :param by: who requests it, for the list of operations; default: the user of this process.
        :param note: the reason, for people.
        """
        self._require_running()
        return self._controlling.request(operation, by=by or whoami(), note=note)

    def controls(self) -> list[ControlRecord]:
        """The control operations of this start of the job, and all blocking ones, oldest first."""
        return self._controlling.records()

    def control_handle(self, number: int) -> ControlHandle | None:
        """A control operation of this start of the job, by its number."""
        return self._controlling.find(number)
