"""Gives executors back: their bins go elsewhere first, so that nobody has to load state because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from midstream.change.migration import Migration
from midstream.checkpoint.change_records import Outcome
from midstream.control.placement import ExecutorShare
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.errors import MidstreamError
from midstream.runtime.controller_desk import Requested

__all__ = ["ExecutorRelease", "spare_executor"]

State = tuple[ProposalOutcome, str | None]


class _Releases(Protocol):
    def release(self, name: str) -> Requested:
        """End one executor, and have it not replaced."""


def spare_executor(shares: Iterable[ExecutorShare]) -> ExecutorShare:
    """The executor that is given back: the one whose partitions own the fewest bins; of several, the newest.

    >>> spare_executor([ExecutorShare("0", bins={1: 4}), ExecutorShare("9"), ExecutorShare("10")]).name
    '10'
    """
    return min(shares, key=lambda each: (sum(each.bins.values()), -len(each.name), *(-ord(one) for one in each.name)))


class ExecutorRelease:
    """Ends executors, one after the other, until there are ``count``. Each is drained before it is ended."""

    def __init__(
        self,
        count: int,
        shares: Callable[[], Iterable[ExecutorShare]],
        drain: Callable[[str], Migration],
        manager: _Releases,
    ) -> None:
        self._count = count
        self._shares = shares
        self._drain = drain
        self._manager = manager
        self._name = ""
        self._drained: Migration | None = None
        self._released: Requested | None = None
        self._begin()

    @property
    def requested(self) -> Requested:
        """The operation, as it is asked for its outcome after each epoch."""
        return Requested(self.state, None if self._drained is None else self._drained.number)

    def state(self) -> State:
        """Do what is due, and say how far it has come."""
        try:
            return self._advanced()
        except MidstreamError as error:
            return ProposalOutcome.FAILED, f"{error}"

    def _begin(self) -> None:
        share = spare_executor(self._shares())
        self._name, self._released = share.name, None
        self._drained = self._drain(share.name) if sum(share.bins.values()) else None

    def _advanced(self) -> State:
        if self._released is None:
            if self._drained is not None and self._drained.outcome is not Outcome.APPLIED:
                if self._drained.outcome is Outcome.PENDING:
                    return ProposalOutcome.PENDING, None
                why = self._drained.error or self._drained.outcome
                return ProposalOutcome.FAILED, f"executor {self._name!r} could not be drained: {why}"
            self._released = self._manager.release(self._name)
        outcome, error = self._released.state()
        if outcome is ProposalOutcome.APPLIED and len(list(self._shares())) > self._count:
            self._begin()
            return ProposalOutcome.PENDING, None
        return outcome, error
