"""A real job that is served: the command line changes it while it runs."""

from __future__ import annotations

import http.client
import importlib.util
import re
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from midstream import Flow, ListSource, MemorySink
from midstream.cli.app import app
from midstream.errors import SetupError
from midstream.server.registry import served_jobs

WAIT_S = 180.0

NEW = """
def triple(row):
    return {**row, "m": 3 * row["n"]}


def broken(row):
    if row["n"] % 100 == 97:  # not among the rows of the preflight
        raise ValueError("no weights")
    return {**row, "m": 4 * row["n"]}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate registry and current directory for the test."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "new.py").write_text(NEW)
    return tmp_path


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "m": 2 * row["n"]}


def status_without_token(url: str, path: str) -> tuple[int, bytes]:
    at = urlsplit(url)
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=WAIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_the_command_line_changes_a_running_job(spark: Any, here: Path) -> None:
    out = MemorySink()
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2)
    flow = Flow("served")
    flow.source("numbers", numbers.load().selectExpr("value AS n")).map("FM", double, adds="m bigint").sink("out", out)

    with flow.start(spark, checkpoint=str(here / "c"), serve=True) as job:
        assert job.server is not None
        url = job.server.url
        assert job.await_epoch(1, WAIT_S)
        assert [status_without_token(url, path) for path in ("/status", "/nothing")] == [(401, b"")] * 2
        assert job.id[:8] in call("jobs").stdout
        assert "revision 1" in call("status", "served").stdout
        assert "FM" in call("explain", "served", "FM", "new.py:triple").stdout

        updated = call("update", "served", "FM", "new.py:triple", "--note", "thrice")
        assert updated.exit_code == 0, updated.output
        assert updated.stdout.startswith("revision 2 (FM): applied, in effect after ")
        assert job.revision == 2

        failed = call("update", "served", "FM", "new.py:broken")
        assert failed.exit_code == 1, failed.output
        assert "revision 3 (FM): rolled back" in failed.stdout, failed.output
        assert "no weights" in failed.stdout

        reverted = call("revert", "served", "1")
        assert reverted.exit_code == 0, reverted.output
        done = job.metrics.epochs
        assert job.await_epoch(done + 1, WAIT_S)

    ratios = {
        epoch: {row["m"] / row["n"] for row in table.to_pylist() if row["n"]} for epoch, table in out.tables.items()
    }
    assert ratios[0] == {2.0}
    assert {3.0} in ratios.values(), "an epoch ran wholly under the change"
    assert ratios[max(ratios)] == {2.0}
    assert sorted(row["n"] for row in out.rows) == list(range(100 * len(out.tables))), "nothing lost, nothing twice"

    at = urlsplit(url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((at.hostname, at.port))
    assert served_jobs() == []
    assert re.findall(r"^revision (\d+)", call("history", str(here / "c")).stdout, re.MULTILINE) == ["2", "3", "5"]


def test_a_job_that_ends_by_itself_is_no_longer_served(spark: Any, here: Path) -> None:
    flow = Flow("short")
    flow.source("numbers", ListSource([[{"n": 1}]], "n bigint")).sink("out", MemorySink())
    job = flow.start(spark, checkpoint=str(here / "c"), trigger="available-now", serve=True)
    assert job.await_termination(WAIT_S)
    assert served_jobs() == []


def test_serving_without_its_packages_is_refused_before_anything_starts(
    spark: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow("short")
    flow.source("numbers", ListSource([[{"n": 1}]], "n bigint")).sink("out", MemorySink())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"pip install 'midstream\[server\]'"):
        flow.start(spark, checkpoint=str(here / "c"), serve=True)
    assert not (here / "c").exists()


def test_a_port_in_use_is_reported_and_nothing_is_left_running(spark: Any, here: Path) -> None:
    flow = Flow("short")
    flow.source("numbers", ListSource([[{"n": 1}]], "n bigint")).sink("out", MemorySink())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SetupError, match="use another port"):
        flow.start(spark, checkpoint=str(here / "c"), serve=taken.getsockname()[1])
    job = flow.start(spark, checkpoint=str(here / "c"), trigger="available-now")
    assert job.await_termination(WAIT_S), "the checkpoint was let go of"
    assert job.server is None
