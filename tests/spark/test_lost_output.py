"""Spark computes the output of a finished stage again after an executor died, and the output must be the same."""

from __future__ import annotations

import json
import os
import sys
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from midstream import FileSink, Flow, ListSource, State, Update
from tests.chaos.processes import spark_home
from tests.spark.conftest import PATIENCE_S, Gate

KEYS = 20
ROWS = "k bigint, n bigint, version bigint, told string"


class Mark:
    """The head of the change."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "n": self.version}


class Remember:
    """A process behind the head and an exchange. Its timer emits its version, and so does its state, later.

    Every call of a timer leaves a file that names its executor, so that the executor can be killed and a test can
    see that a task ran twice.
    """

    def __init__(self, version: int, calls: str) -> None:
        self.version = version
        self.calls = calls

    def __call__(self, key: int, row: dict[str, Any], state: State) -> dict[str, Any] | None:
        found = state.get()
        if found is None:
            state.clock_timer(state.now)
            return None
        return {**row, "version": found, "told": "state"}

    def on_timer(self, key: int, time: datetime, state: State) -> dict[str, Any]:
        state.set(self.version)
        executor = next(one.pid for one in psutil.Process().parents() if one.name() == "java")
        (Path(self.calls) / f"{executor}-{key}-{uuid.uuid4().hex}").touch()
        return {"k": key, "n": 0, "version": self.version, "told": "timer"}


class Wait:
    """Waits at a gate, in the stage behind."""

    def __init__(self, passage: Any) -> None:
        self.passage = passage

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["told"] == "timer":
            self.passage()
        return row


def lose_finished_output(place: str) -> None:
    """A driver: when tasks of the last stage have begun, change the stages before and kill an executor."""
    from pyspark.sql import SparkSession

    folder, calls, gate = Path(place), Path(place) / "calls", Gate()
    calls.mkdir()
    settings: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.shuffle.io.maxRetries": "1",
        "spark.shuffle.io.retryWait": "1s",
        # Executors of one machine would find the dead one's files on their disk, and nothing would be lost.
        "spark.shuffle.readHostLocalDisk": "false",
    }
    spark = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    flow = Flow("lost")
    epoch = [{"k": key, "n": 0, "version": 0, "told": ""} for key in range(KEYS)]
    rows = flow.source("in", ListSource([epoch, epoch], ROWS, partitions=2))
    kept = rows.map("mark", Mark(1)).key_by("by_k", "k").process("remember", Remember(1, str(calls)))
    kept.key_by("again", "k").map("wait", Wait(gate.pass_through)).sink("out", FileSink(folder / "out"))
    job = flow.start(spark, checkpoint=str(folder / "checkpoint"), trigger="available-now", partitions=4)
    gate.arrive()
    change = job.update(Update("mark", Mark(2)), Update("remember", Remember(2, str(calls))))
    # Two of four readers have started. The others will need this executor's output.
    psutil.Process(min(int(name.split("-")[0]) for name in os.listdir(calls))).kill()
    gate.open()
    assert job.await_termination(2 * PATIENCE_S)
    told: dict[str, Any] = {"outcome": str(change.wait(PATIENCE_S)), "epochs": job.metrics.epochs}
    told["error"] = change.record.error
    out = spark.read.parquet(str(folder / "out")).collect()
    told["rows"] = [[row.epoch, row.k, row.version, row.told] for row in out]
    print(json.dumps(told))
    spark.stop()


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)  # four JVMs have to start
def test_lost_output_is_computed_again_without_the_change(driver: Any, tmp_path: Path) -> None:
    """Spark itself compares the checksums of the two outputs, and aborts the run if they differ."""
    home = spark_home(tmp_path)
    where = {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_DRIVER_PYTHON": sys.executable}
    told = json.loads(driver(lose_finished_output, tmp_path, **where).finish(3 * PATIENCE_S).splitlines()[-1])
    assert (told["outcome"], told["epochs"]) == ("applied", 2), told["error"]
    timers = {k: version for epoch, k, version, what in told["rows"] if (epoch, what) == (0, "timer")}
    states = {k: version for epoch, k, version, what in told["rows"] if (epoch, what) == (1, "state")}
    calls = os.listdir(tmp_path / "calls")
    assert len(calls) > KEYS, "no task was run again, so nothing is proved"
    assert sorted(timers) == list(range(KEYS))
    assert states == timers, "what came out and what is remembered are of one revision"
    assert len(told["rows"]) == 2 * KEYS
