"""A rebalance gives executors about as many partitions: those that have joined, and after a start that was uneven."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from midstream import Outcome, Rebalance
from midstream.errors import FlowError
from midstream.planner.migration import StepStrategy
from midstream.testing import Faults
from tests.migrated import SteppedJob, stepped_job

pytestmark = pytest.mark.long


def shares_of(job: SteppedJob) -> list[int]:
    """How many partitions each executor has."""
    return [len(each.partitions.get(1, ())) for each in job.executors]


def put_all_on_the_first(job: SteppedJob, partitions: int) -> None:
    executors = job.runtime.executors
    for number in range(partitions):
        executors._home[partitions, number] = executors.all[0]
    job.run()


@pytest.mark.parametrize("strategy", StepStrategy)
def test_rebalancing_spreads_partitions_over_executors_and_then_evens_out_work(tmp_path: Path, strategy: str):
    with stepped_job(tmp_path, partitions=4, executors=2) as job:
        job.run(3)
        put_all_on_the_first(job, 4)
        assert shares_of(job) == [4, 0]
        migration = job.rebalance(measure="rows", strategy=strategy)
        assert "partitions are spread anew over executors" in migration.record.plan
        while not migration.is_over:
            job.run()
        assert migration.outcome is Outcome.APPLIED
        first, *others = migration.steps
        assert (first.bins, first.waited > 0) == (0, True), "their state was loaded before"
        assert others, "bins of the heaviest user's partition have moved"
        job.run()
        assert shares_of(job) == [2, 2]
        job.assert_gapless()


def test_an_executor_that_joins_gets_partitions_by_a_rebalance_although_no_bin_changes_its_owner(tmp_path: Path):
    with stepped_job(tmp_path, partitions=4, executors=2, seed=3) as job:
        job.run(3)
        job.rebalance(measure="bytes", strategy="sudden")
        job.run(8)
        owners = job.owners()
        job.runtime.executors.add()
        job.run()
        assert sorted(shares_of(job)) == [0, 2, 2]
        explained = job.explain_migration(Rebalance(by="bytes"))
        assert "one more spreads partitions over executors anew" in str(explained)
        migration = job.rebalance(measure="bytes", strategy="sudden")
        while not migration.is_over:
            job.run()
        assert migration.outcome is Outcome.APPLIED
        job.run(2)
        assert sorted(shares_of(job)) == [1, 1, 2]
        assert sum(one != other for one, other in zip(owners.owners, job.owners().owners, strict=True)) < 20
        job.assert_gapless()


def test_executors_that_come_and_go_while_partitions_are_spread_lose_nothing(tmp_path: Path):
    faults = Faults(lose_executor=0.01, lose_run=0.002, crash_driver=0.002, lose=0.3)
    spread = 0
    for seed in range(4):
        with stepped_job(tmp_path / str(seed), partitions=5, executors=3, seed=seed, faults=faults) as job:
            for number in range(6):
                job.run(2)
                if number % 2:
                    job.runtime.executors.add()
                with contextlib.suppress(FlowError):  # there may be nothing to do
                    spread += "spread anew" in job.rebalance(measure="rows", strategy="fluid", queue=True).record.plan
            job.run(10)
            job.assert_gapless()
    assert spread >= 4
