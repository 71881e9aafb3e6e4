"""Relays on Spark: changes and control operations go through them, and a relay may be killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream import MemorySink, Update
from midstream.control.relayed import relay_of
from midstream.runtime.spark.start import RELAYS
from tests.spark.conftest import PATIENCE_S, ROOT
from tests.spark.test_controls import WAIT_S, Add, Rows, assert_counted, job_of

KILLS = 3


def counted_again(key: int, row: dict[str, Any], state: Any) -> dict[str, Any]:
    """The same as before, as another function."""
    state.set(state.get(0) + 1)
    return {"k": key, "n": state.get()}


@pytest.fixture
def with_relays(spark: Any) -> Iterator[Any]:
    spark.conf.set(RELAYS, "true")
    yield spark
    spark.conf.unset(RELAYS)


def addresses(job: Any) -> list[bytes]:
    """Where the job's workers listen."""
    return list(job._control._coordinator._workers.values())


def relay_process() -> int | None:
    """The newest relay among the workers of this session, by the lock that it holds."""
    from pyspark import SparkFiles

    files = Path(SparkFiles.getRootDirectory()).rglob("relay-*.json")
    nodes = {file.stat().st_ino for file in files}
    for line in Path("/proc/locks").read_text().splitlines():
        if (found := re.search(r"FLOCK\s+ADVISORY\s+WRITE\s+(\d+)\s+\w+:\w+:(\d+)", line)) and int(found[2]) in nodes:
            return int(found[1])
    return None


def test_changes_and_operations_go_through_a_relay(with_relays: Any, tmp_path: Path) -> None:
    out = MemorySink()
    with job_of(with_relays, tmp_path, out) as job:
        assert job.await_epoch(1, WAIT_S)
        assert all(relay_of(at) is not None for at in addresses(job))
        assert job.update(Update("count", counted_again)).wait(WAIT_S).name == "APPLIED"
        found = job.control(Rows("fast")).result(WAIT_S)
        assert set(found or {}) <= {"numbers", "by k", "count"}
        added = job.control(Add(1_000))
        assert added.result(WAIT_S) == 7
        assert job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        epoch, done = added.record.epoch, job.progress[-1].epoch
    assert epoch is not None
    assert_counted(out, done + 1, {epoch: 1_000})


def test_a_relay_that_is_killed_in_the_middle_of_changes_loses_and_doubles_nothing(
    with_relays: Any, tmp_path: Path
) -> None:
    out = MemorySink()
    killed: set[int] = set()
    with job_of(with_relays, tmp_path, out) as job:
        assert job.await_epoch(1, WAIT_S)
        while len(killed) < KILLS:
            change = job.update(Update("count", counted_again))
            asked = job.control(Rows("fast"))
            if (process := relay_process()) is not None and process not in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    killed.add(process)
            assert change.wait(WAIT_S).name == "APPLIED"
            asked.result(WAIT_S)
            assert job.await_epoch(job.metrics.epochs + 1, WAIT_S)
        done = job.progress[-1].epoch
    assert_counted(out, done + 1, {})


SCRIPT = """
import json, sys
from midstream import ControlOperation, Flow, GeneratorSource, MemorySink, Update, local_session
from midstream.control.relayed import relay_of

class Rows(ControlOperation):
    mode = "in-band"

    def complete(self, ctx):
        return {ctx.operator: 1}

def made(index, rng):
    return {"n": index}

def first(row):
    return {**row, "v": 1}

def second(row):
    return {**row, "v": 2}

spark = local_session("local-cluster[2,2,1024]", {"spark.midstream.relays": sys.argv[2]})
flow, out = Flow("relayed"), MemorySink()
source = flow.source("in", GeneratorSource(made, "n bigint", rate=2_000, partitions=4))
source.map("m", first, adds="v int").key_by("k", "n").map("last", first, adds="v int").sink("out", out)
with flow.start(spark, checkpoint=sys.argv[1], partitions=4) as job:
    job.await_epoch(2)
    outcome = job.update(Update("m", second), Update("last", second)).wait(120)
    result = job.control(Rows()).result(120)
    job.await_epoch(job.metrics.epochs + 1)
    behind = [relay_of(at) for at in job._control._coordinator._workers.values()]
numbers = sorted(row["n"] for row in out.rows)
print(json.dumps({
    "outcome": outcome.name,
    "asked": sorted(result),
    "whole": numbers == list(range(len(numbers))),
    "versions": sorted({row["v"] for row in out.rows}),
    "relays": len(set(behind) - {None}),
    "direct": behind.count(None),
}))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)
def test_each_executor_of_a_cluster_has_a_relay_and_results_are_those_without(tmp_path: Path) -> None:
    found = {}
    for relays in ("true", "false"):
        folder = tmp_path / relays
        folder.mkdir()
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder / "checkpoint"), relays],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        found[relays] = json.loads(ended.stdout.splitlines()[-1])
    direct = found["false"].pop("direct")
    assert direct >= 2
    assert found["true"].pop("direct") == 0
    assert (found["true"].pop("relays"), found["false"].pop("relays")) == (2, 0)
    assert found["true"] == found["false"]
    assert found["true"]["whole"]
