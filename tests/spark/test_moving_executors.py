"""State leaves executors, and comes to others, whatever happens to them meanwhile: a plain count says what is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.spark import moving_jobs
from tests.spark.conftest import PATIENCE_S, Driver
from tests.spark.placement_jobs import KEYS
from tests.spark.test_placement import RunJob, run_job

# Up to four JVMs have to start first.
pytestmark = pytest.mark.timeout(4 * PATIENCE_S)
__all__ = ["run_job"]  # a fixture


@pytest.mark.cluster
def test_executors_are_drained_and_removed_until_one_is_left(run_job: RunJob) -> None:
    found = run_job(moving_jobs.drain)
    assert found["exact"]
    assert min(found["before"].values()) > 0
    assert found["after"]["0"] == 0
    assert sum(found["after"].values()) == moving_jobs.BINS
    assert found["held"]["0"] == [], "its copies are freed"
    assert {*found["held"]["1"], *found["held"]["2"]} == moving_jobs.OCCUPIED
    assert found["again"] == "the partitions on executor '0' own nothing; it can be removed"
    assert found["taken away"] == {"1": found["after"]["1"], "2": found["after"]["2"]}
    assert found["last"] == {"2": moving_jobs.BINS}
    assert "executor '2' is the only one with partitions; add another one before it is drained" in found["drain 2"]
    assert "no partition runs on an executor '7'; those with partitions are 2" in found["drain 7"]
    assert found["unchanged"]
    assert found["failed"] == ["applied", "applied"]


@pytest.mark.slow
def test_a_controller_asks_for_an_executor_and_gives_back_those_that_it_does_not_need(run_job: RunJob) -> None:
    found = run_job(moving_jobs.ask_and_give_back)
    assert found["exact"]
    assert sorted(found["before"].values()) == [0, 16, 16]
    assert found["applied"] == ["have 2 executors", "have 3 executors", "have 1 executor"]
    assert found["failed"] == []
    assert len(found["left"]) == 1
    assert sum(found["left"].values()) == moving_jobs.BINS
    assert found["history"] == [["controller Wants", "applied"]], "only one of them had bins, and was drained"


@pytest.mark.cluster
@pytest.mark.parametrize("who", ["giver", "taker"])
def test_a_drain_ends_although_an_executor_is_killed_during_it(run_job: RunJob, who: str) -> None:
    found = run_job(moving_jobs.kill_in_mid_drain, who)
    assert found["exact"]
    assert (found["outcome"], found["error"]) == ("applied", None)
    assert found["steps"] == found["leaving"] > 0
    if who == "giver":  # partitions of a taker that is lost go where Spark puts them, which may be the drained executor
        assert found["executors"].get("0", 0) == 0


@pytest.mark.cluster
def test_an_executor_that_joins_during_a_migration_gets_its_part_with_the_next_number_of_partitions(
    run_job: RunJob,
) -> None:
    found = run_job(moving_jobs.join_in_mid_migration)
    assert found["exact"]
    assert sum(found["began"].values()) == moving_jobs.BINS
    assert sum(found["joined"].values()) == 4
    assert min(found["rescaled"].values()) >= 1, "Spark chooses, as evenly as tasks happen to end"


@pytest.mark.cluster
def test_a_stage_on_several_executors_gets_a_single_partition_and_more_again(run_job: RunJob) -> None:
    found = run_job(moving_jobs.to_one_and_back)
    assert found["exact"]
    assert [sorted(each) for each in found["bins"]] == [[32], [10, 11, 11]]


@pytest.mark.slow
def test_a_migration_goes_on_after_each_of_several_kills_of_the_driver(
    driver: Callable[..., Driver], tmp_path: Path
) -> None:
    pending = []
    for steps in (1, 3, 2):
        life = driver(moving_jobs.go_on, tmp_path)
        assert life.process.stdout is not None
        pending.append(life.process.stdout.readline().strip())
        for number in range(1, steps + 1):
            assert life.process.stdout.readline().strip() == f"step {number}"
        life.kill()
    found = driver(moving_jobs.go_on, tmp_path).finish(2 * PATIENCE_S).splitlines()
    assert [*pending, found[0]] == ["pending 0", "pending 1", "pending 1", "pending 1"]
    *_, epoch, partitions = found[-1].split()
    assert partitions == "6"
    rows = [row for part in (tmp_path / "out").glob("[!._]*") for row in pq.ParquetFile(part).read().to_pylist()]
    counted = Counter((row["user"], row["number"], row["count"]) for row in rows if row["number"] <= int(epoch))
    assert counted == Counter((f"u{n}", each, each + 1) for n in range(KEYS) for each in range(int(epoch) + 1))
