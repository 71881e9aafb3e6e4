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
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE_S)]
__all__ = ["run_job"]  # a fixture


def test_executors_are_drained_and_taken_away_until_one_is_left(run_job: RunJob) -> None:
    found = run_job(moving_jobs.drain)
    assert found["exact"]
    assert found["before"] == {"0": 8, "1": 8, "2": 8}
    assert found["after"] == {"0": 0, "1": 12, "2": 12}
    assert found["held"]["0"] == [], "its copies are freed"
    assert len(found["held"]["1"]) + len(found["held"]["2"]) == moving_jobs.BINS
    assert found["again"] == "the partitions on executor '0' own nothing; it can be taken away"
    assert found["taken away"] == {"1": 12, "2": 12}
    assert found["last"] == {"2": 24}
    assert "executor '2' is the only one with partitions; add another one before it is drained" in found["drain 2"]
    assert "no partition runs on an executor '7'; those with partitions are 2" in found["drain 7"]
    assert found["unchanged"]
    assert found["failed"] == ["applied", "applied"]


@pytest.mark.parametrize("who", ["giver", "taker"])
def test_a_drain_ends_although_an_executor_is_killed_in_its_midst(run_job: RunJob, who: str) -> None:
    found = run_job(moving_jobs.kill_in_mid_drain, who)
    assert found["exact"]
    assert (found["outcome"], found["error"]) == ("applied", None)
    assert found["steps"] == 8
    assert found["executors"].get("0", 0) == 0


def test_an_executor_that_joins_in_the_midst_of_a_migration_gets_its_part_with_the_next_number(
    run_job: RunJob,
) -> None:
    found = run_job(moving_jobs.join_in_mid_migration)
    assert found["exact"]
    assert found["began"] == {"1": 12, "0": 12} or set(found["began"].values()) == {12}
    assert sum(found["joined"].values()) == 4
    assert list(found["rescaled"].values()) == [2, 2, 2]


def test_a_rebalance_gives_partitions_to_an_executor_that_has_joined(run_job: RunJob) -> None:
    found = run_job(moving_jobs.rebalance)
    assert found["exact"]
    assert sorted(found["before"].values()) == [0, 3, 3]
    assert list(found["after"].values()) == [2, 2, 2]
    assert "partitions are spread anew over executors" in found["plan"]
    assert found["copies"] == found["owned"], "each has what it owns, and nothing else"


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
    counted = Counter((row["user"], row["epoch"], row["count"]) for row in rows if row["epoch"] <= int(epoch))
    assert counted == Counter((f"u{n}", each, each + 1) for n in range(KEYS) for each in range(int(epoch) + 1))
