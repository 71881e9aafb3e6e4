"""Giving executors back: drained first, one after the other, and what happens if that fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from midstream.change.migration import Migration
from midstream.checkpoint.change_records import Outcome
from midstream.control.placement import ExecutorShare
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.errors import FlowError
from midstream.runtime.controller_desk import Requested
from midstream.runtime.executor_release import ExecutorRelease, spare_executor


@dataclass
class Draining:
    """A migration of a plant."""

    number: int = 7
    outcome: Outcome = Outcome.PENDING
    error: str | None = None


@dataclass
class Cluster:
    """Executors with bins; what is asked of them is written down."""

    bins: dict[str, int]
    told: list[str] = field(default_factory=list)
    draining: Draining = field(default_factory=Draining)
    ends: bool = True

    def shares(self) -> list[ExecutorShare]:
        return [ExecutorShare(name, bins={1: count}) for name, count in self.bins.items()]

    def drain(self, name: str) -> Migration:
        self.told.append(f"drain {name}")
        self.draining = Draining()
        return cast(Migration, self.draining)

    def release(self, name: str) -> Requested:
        self.told.append(f"end {name}")

        def state() -> tuple[ProposalOutcome, str | None]:
            if not self.ends:
                return ProposalOutcome.FAILED, "still there"
            self.bins.pop(name, None)
            return ProposalOutcome.APPLIED, None

        return Requested(state)

    def wanting(self, count: int) -> ExecutorRelease:
        return ExecutorRelease(count, self.shares, self.drain, cast(Any, self))


def test_one_without_bins_is_ended_at_once_and_one_with_bins_when_it_is_drained() -> None:
    cluster = Cluster({"0": 4, "1": 2, "2": 0})
    release = cluster.wanting(1)
    assert release.state() == (ProposalOutcome.PENDING, None), "the first is gone, and the next is on its way"
    assert cluster.told == ["end 2", "drain 1"]
    assert release.state() == (ProposalOutcome.PENDING, None)
    assert cluster.told == ["end 2", "drain 1"], "not before its bins are elsewhere"
    cluster.draining.outcome = Outcome.APPLIED
    assert release.state() == (ProposalOutcome.APPLIED, None)
    assert cluster.told == ["end 2", "drain 1", "end 1"]
    assert list(cluster.bins) == ["0"]


def test_one_that_cannot_be_drained_stays() -> None:
    cluster = Cluster({"0": 4, "1": 2})
    release = cluster.wanting(1)
    assert release.requested.change == 7
    cluster.draining.outcome, cluster.draining.error = Outcome.STOPPED, "cancelled"
    assert release.state() == (ProposalOutcome.FAILED, "executor '1' could not be drained: cancelled")
    assert cluster.told == ["drain 1"]


def test_one_that_does_not_end_is_told() -> None:
    cluster = Cluster({"0": 4, "1": 0}, ends=False)
    assert cluster.wanting(1).state() == (ProposalOutcome.FAILED, "still there")


def test_a_drain_that_is_refused_is_a_refusal_at_once_or_an_error_later() -> None:
    cluster = Cluster({"0": 4, "1": 2})

    def refuse(name: str) -> Migration:
        raise FlowError("another migration is running")

    with pytest.raises(FlowError, match="another migration"):
        ExecutorRelease(1, cluster.shares, refuse, cast(Any, cluster))
    cluster = Cluster({"0": 4, "1": 2, "2": 0})
    release = ExecutorRelease(1, cluster.shares, refuse, cast(Any, cluster))
    assert release.state() == (ProposalOutcome.FAILED, "another migration is running")


def test_of_several_the_newest_is_given_back() -> None:
    assert spare_executor(ExecutorShare(f"{n}") for n in range(12)).name == "11"
