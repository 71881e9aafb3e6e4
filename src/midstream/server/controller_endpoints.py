"""The part of a job's HTTP interface that has controllers look after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.controllers.proposal_records import ControllerState, ProposalRecord
from midstream.server.controller_messages import AttachRequest

if TYPE_CHECKING:
    from midstream.runtime.steered_job import SteeredJob

__all__ = ["ControllerEndpoints"]


class ControllerEndpoints:
    """Does what the requests ask for, apart from HTTP. Called in threads."""

    def __init__(self, job: SteeredJob) -> None:
        self._job = job

    def attach(self, wanted: AttachRequest) -> ControllerState:
        """``POST /controllers``."""
        return self._job.attach(wanted.unpacked(), name=wanted.name, advise=wanted.advise)

    def detach(self, name: str) -> ControllerState:
        """``DELETE /controllers/{name}``."""
        return self._job.detach(name)

    def controllers(self) -> tuple[ControllerState, ...]:
        """``GET /controllers``."""
        return self._job.controllers

    def proposals(self) -> list[ProposalRecord]:
        """``GET /proposals``."""
        return self._job.proposals()
