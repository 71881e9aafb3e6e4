"""The part of a job's HTTP interface that runs control operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from midstream.checkpoint.control_log import ControlRecord
from midstream.server.control_messages import ControlRequest, ControlState

if TYPE_CHECKING:
    from midstream.runtime.controlled_job import ControlledJob

__all__ = ["ControlEndpoints"]


class ControlEndpoints:
    """Does what the requests ask for, apart from HTTP. Called in threads."""

    def __init__(self, job: ControlledJob) -> None:
        self._job = job

    def control(self, wanted: ControlRequest) -> ControlState:
        """``POST /controls``."""
        return ControlState.of(self._job.control(wanted.unpacked(), by=wanted.by, note=wanted.note))

    def controls(self) -> list[ControlRecord]:
        """``GET /controls``."""
        return self._job.controls()

    def operation(self, number: int, wait_s: float) -> ControlState:
        """``GET /controls/{number}``."""
        handle = self._job.control_handle(number)
        if handle is None:
            raise HTTPException(404, f"there is no control operation {number} of this start of the job")
        handle.wait(wait_s)
        return ControlState.of(handle)
