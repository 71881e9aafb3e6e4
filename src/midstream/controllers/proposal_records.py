"""Records of the proposals of controllers, and of the controllers themselves."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["ControllerState", "ProposalOutcome", "ProposalRecord"]


class ProposalOutcome(enum.StrEnum):
    """How a proposal ended, or that it has not."""

    ADVISED = "advised"
    """It was only recorded: the controller was attached with ``advise=True``."""
    PENDING = "pending"
    """The operation is in progress."""
    APPLIED = "applied"
    """The operation has succeeded."""
    FAILED = "failed"
    """The job refused the operation, or it was rolled back or stopped."""
    REFUSED = "refused"
    """It was not requested: it did not fit with what other controllers do, or with what is in progress."""
    FAULT = "fault"
    """The controller itself failed: it raised, took too long, or returned something that is not a proposal."""


class ProposalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One proposal of a controller.

    >>> record = ProposalRecord(number=1, controller="a", epoch=7, proposed_at=0.0, outcome=ProposalOutcome.ADVISED)
    >>> msgspec.json.decode(msgspec.json.encode(record), type=ProposalRecord) == record
    True
    """

    number: int
    """Its number, in the order of decisions over all controllers since this start of the job."""
    controller: str
    """The name under which it is attached."""
    epoch: int
    """The epoch whose observation led to it."""
    proposed_at: float
    """In seconds since 1970."""
    operation: str = ""
    """The proposed operation, in words; empty if the controller failed."""
    reason: str = ""
    """Why, in the controller's words."""
    figures: dict[str, float] = {}
    """The observations that led to it."""
    outcome: ProposalOutcome
    error: str | None = None
    """Why it was refused or failed."""
    change: int | None = None
    """Its number in the history, if it was requested."""
    times: int = 1
    """How often it was proposed in a row with the same outcome; the newest figures are kept."""
    ended_at: float | None = None
    """When the operation ended, in seconds since 1970."""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """A controller of a job."""

    name: str
    """The name under which it is attached."""
    settings: str
    """Its settings, as Python shows them."""
    advises: bool
    """Whether its proposals are only told."""
    attached_at: float
    """In seconds since 1970."""
    proposals: int = 0
    """Number of proposals that it has made."""
    applied: int = 0
    """How many of these operations have succeeded."""
    stopped: str | None = None
    """Why it is no longer asked, if so."""
