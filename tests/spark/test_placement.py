"""Where tasks run on a cluster of two executors, and what their bases have. The executors say it by their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.spark import placement_jobs
from tests.spark.conftest import PATIENCE_S, Driver
from tests.spark.test_cluster import spark_home

# Three JVMs have to start first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE_S)]

RunJob = Callable[..., dict[str, Any]]


@pytest.fixture
def run_job(driver: Callable[..., Driver], tmp_path: Path) -> RunJob:
    """Runs one of the jobs, and gives what it prints and, as ``log``, what it logs."""

    def run(job: Callable[..., None], *args: str) -> dict[str, Any]:
        started = driver(job, tmp_path, *args, SPARK_HOME=str(spark_home(tmp_path)), SPARK_LOCAL_IP="127.0.0.1")
        out, log = started.process.communicate(timeout=2 * PATIENCE_S)
        assert started.process.returncode == 0, f"{out}\n{log[-5000:]}"
        return {**json.loads(out.splitlines()[-1]), "log": log}

    return run


def test_partitions_stay_on_their_executors(run_job: RunJob) -> None:
    found = run_job(placement_jobs.stay, "false")
    first, *others = found["where"][1:]  # what an epoch runs on is known when it is over
    assert len(others) == 10
    assert [epoch for epoch in others if epoch != first] == []
    assert set(first.values()) == {"0", "1"}
    assert found["exact"]
    assert found["kept"] == 0, "anchors are gone when the job is over"
    assert [(each["name"], sum(each["bins"].values()) > 0) for each in found["executors"]] == [("0", True), ("1", True)]
    partitions = [number for each in found["executors"] for number in each["partitions"]["1"]]
    assert sorted(partitions) == [0, 1, 2, 3]
    assert len(set(found["read"][2:])) == 1, "each executor reads what its own partitions wrote, and nothing more"
    assert "stick" not in found["log"]


def test_a_session_without_the_setting_works_and_is_warned_once(run_job: RunJob) -> None:
    found = run_job(placement_jobs.stay, "true")
    assert found["exact"]
    assert found["log"].count("partitions do not stick to the 2 executors of this application") == 1
    assert "spark.shuffle.reduceLocality.enabled=false" in found["log"]


def test_partitions_of_a_lost_executor_continue_elsewhere_and_stay_there(run_job: RunJob) -> None:
    found = run_job(placement_jobs.lose)
    assert found["exact"]
    lost = found["lost"]
    moved = {key for key, executor in found["where"][3].items() if executor == lost}
    assert moved
    last, *before = reversed(found["where"])
    assert lost not in last.values()
    assert [epoch for epoch in before[:10] if epoch != last] == []
    kept = {key for key in last if key not in moved}
    assert {key: last[key] for key in kept} == {key: found["where"][3][key] for key in kept}, "the others stay"
    assert {each["name"] for each in found["before"]} == {"0", "1"}
    assert lost not in {each["name"] for each in found["after"]}


@pytest.mark.parametrize("ahead", ["true", pytest.param("false", marks=pytest.mark.cluster)])
def test_partitions_move_together_with_bins_that_were_loaded_ahead(run_job: RunJob, ahead: str) -> None:
    found = run_job(placement_jobs.move, ahead)
    assert found["exact"]
    assert found["before"] != found["places"]
    assert found["after"] == found["places"], "they are where Spark said they would be"
    assert found["held"] == found["owned"], "after some epochs, each executor has freed what it does not own"
    flip, steady = found["flipped"], found["read"][-1]
    whole = found["read"][2]  # the changes of an epoch in which all keys changed
    read = max(found["read"][flip : flip + 2])  # one epoch may have been on its way when partitions moved
    if ahead == "true":
        assert read == steady, "the last delta"
        assert sum(found["loaded"].values()) >= whole / 2
    else:
        assert read >= whole / 2
        assert sum(found["loaded"].values()) == 0
