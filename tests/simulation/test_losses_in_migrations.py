"""Giver, taker or driver are lost at each single step of a migration, or an executor joins: the migration ends where it
was to end, and no row is lost or counted twice (M10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream import Move, Outcome
from midstream.ids import BINS, ExecutorId
from midstream.planner.migration import StepStrategy
from tests.migrated import SteppedJob, stepped_job

pytestmark = pytest.mark.long

PARTITIONS, EXECUTORS, BEFORE, STEPS = 4, 3, 3, 3
WAYS = [
    ("giver", StepStrategy.FLUID, False),
    ("taker", StepStrategy.FLUID, False),
    ("both", StepStrategy.BATCHED, True),
    ("nobody, one joins", StepStrategy.BATCHED, True),
]


def places(job: SteppedJob) -> dict[int, str | None]:
    """The executor of each partition of the first stage."""
    return {share.partition: share.executor for share in job.assignment()[0].partitions}


def pair_on_two_executors(job: SteppedJob) -> tuple[int, int]:
    """Two partitions that do not share an executor."""
    found = places(job)
    return next((one, other) for one in found for other in found if None not in found and found[one] != found[other])


def moves_of(job: SteppedJob, giver: int, taker: int) -> dict[int, int]:
    """As many bins of the giver as there are to be steps."""
    owned = [number for number in range(BINS) if job.owners().owners[number] == giver]
    return dict.fromkeys(owned[:STEPS], taker)


def lose(job: SteppedJob, executor: str | None) -> None:
    """The executor is gone with all it has; another one, which has nothing, takes its place."""
    executors = job.runtime.executors
    [lost] = [each for each in executors.all if each.name == ExecutorId(str(executor))]
    executors.replace(lost)


def end(job: SteppedJob) -> None:
    """Run until nothing moves, and some epochs more."""
    for _ in range(40):
        if not job.migrations:
            break
        job.run()
    job.run(2)
    job.assert_gapless()


@pytest.mark.parametrize("step", range(STEPS + 1))
@pytest.mark.parametrize(("who", "strategy", "prewarm"), WAYS)
def test_executors_are_lost_at_each_step(who: str, strategy: StepStrategy, prewarm: bool, step: int, tmp_path: Path):
    with stepped_job(tmp_path, partitions=PARTITIONS, executors=EXECUTORS, seed=1) as job:
        job.run(BEFORE)
        giver, taker = pair_on_two_executors(job)
        wanted = moves_of(job, giver, taker)
        migration = job.migrate(Move(wanted, "by user"), strategy=strategy, prewarm=prewarm)
        while migration.progress.steps_done < step:
            job.run()
        found = places(job)
        if who in ("giver", "both"):
            lose(job, found[giver])
        if who in ("taker", "both"):
            lose(job, found[taker])
        if who == "nobody, one joins":
            job.runtime.executors.add()
        end(job)
        assert migration.outcome is Outcome.APPLIED
        assert [job.owners().owners[number] for number in wanted] == [taker] * STEPS
        assert sum(each.bins for each in migration.steps) == STEPS


@pytest.mark.parametrize("step", range(STEPS + 1))
@pytest.mark.parametrize(
    ("strategy", "prewarm", "has_begun"),
    [(StepStrategy.FLUID, False, True), (StepStrategy.BATCHED, True, False)],
)
def test_the_driver_dies_at_each_step(
    strategy: StepStrategy, prewarm: bool, step: int, has_begun: bool, tmp_path: Path
):
    """Between two epochs, or in an epoch whose step is not committed: the new driver goes on from the last committed
    assignment."""
    with stepped_job(tmp_path, partitions=PARTITIONS, executors=EXECUTORS, seed=1) as job:
        job.run(BEFORE)
        giver, taker = pair_on_two_executors(job)
        wanted = moves_of(job, giver, taker)
        migration = job.migrate(Move(wanted, "by user"), strategy=strategy, prewarm=prewarm)
        while migration.progress.steps_done < step:
            job.run()
        owners = job.owners()
        left = [number for number, owner in wanted.items() if owners.owners[number] != owner]
        assert len(left) == STEPS - step
        if has_begun:
            job.runtime._driver.migrations.begin(job.epoch, job.runtime._driver.committed)  # type: ignore[arg-type]
            assert (job.owners() == owners) == (not left), "the next step"
        job.runtime._start_driver()
        assert job.owners() == owners, "the last committed assignment"
        assert len(job.migrations) == bool(left)
        end(job)
        assert [job.owners().owners[number] for number in wanted] == [taker] * STEPS
        [record] = job.history()
        assert record.outcome is Outcome.APPLIED
        if left:
            assert any("goes on after a restart of the driver" in event.what for event in record.events)
