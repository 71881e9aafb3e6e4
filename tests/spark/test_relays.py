"""Relays on Spark: changes and control operations go through them, and a relay may be killed in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream import MemorySink, Update
from midstream.control.relayed import relay_of
from midstream.runtime.spark.start import RELAYS
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
