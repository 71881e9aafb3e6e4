"""Control operations from another process: over HTTP, by the client, and on the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from midstream import ControlContext, ControlOperation
from midstream.checkpoint.control_log import ControlOutcome
from midstream.cli.app import app
from midstream.errors import FlowError, FunctionError, MidstreamError
from midstream.runtime import control_desk
from midstream.server.client import JobClient
from tests.migrated import ROWS, SteppedJob, stepped_job
from tests.served import Running, client_of_served

PROGRAM = """
from midstream import ControlOperation

class Rows(ControlOperation):
    mode = "blocking"

    def complete(self, ctx):
        return {ctx.operator: ctx.stats.rows_in}

class Broken(Rows):
    def complete(self, ctx):
        raise ValueError("no " + ctx.operator)

def named(name="count"):
    operation = Rows()
    operation.prepare = lambda graph: {name: None}
    return operation

nothing = 42
"""


class Rows(ControlOperation):
    mode = "blocking"

    def complete(self, ctx: ControlContext) -> dict[str, Any]:
        return {ctx.operator: ctx.stats.rows_in, "at": [{1.5}]}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SteppedJob]:
    with stepped_job(tmp_path) as found:
        found.run(2)
        yield found


@pytest.fixture(autouse=True)
def client(job: SteppedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobClient]:
    """Of the served job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    with client_of_served(job, tmp_path, monkeypatch) as found:
        yield found


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_client_runs_an_operation_that_the_job_did_not_know(job: SteppedJob, client: JobClient):
    state = client.control(Rows(), note="how many?")
    assert (state.record.number, state.record.note, state.is_over) == (1, "how many?", False)
    assert client.wait_control(1, 0.0).is_over is False
    job.run()
    state = client.wait_control(1, 10.0)
    assert state.record.outcome is ControlOutcome.COMPLETE
    assert state.result["in"] == state.result["by user"] == state.result["count"] == ROWS
    assert set(state.result["at"]) == {"{1.5}"}, "what JSON does not have is text"
    assert [record.number for record in client.controls()] == [1]
    with pytest.raises(MidstreamError, match="there is no control operation 7 of this start of the job"):
        client.wait_control(7)


def test_the_command_prints_the_result(job: SteppedJob):
    with Running(job):
        done = call("control", "counts", "program.py:Rows", "--note", "rows?")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"in": ROWS, "by user": ROWS, "count": ROWS}
    with Running(job):
        done = call("control", "counts", "program.py:named()")
    assert json.loads(done.stdout) == {"count": ROWS}
    listed = call("controls", "counts").stdout
    assert "complete" in listed
    assert "rows?" in listed


def test_a_failure_is_reported_with_its_reason(job: SteppedJob):
    with Running(job):
        done = call("control", "counts", "program.py:Broken")
    assert done.exit_code == 1
    assert "control operation 1 (Broken) failed: operator 'in'" in done.output
    assert "ValueError: no in" in done.output
    assert "failed" in call("controls", "counts").stdout
    job.assert_gapless()


def test_the_command_need_not_wait(client: JobClient):
    done = call("control", "counts", "program.py:Rows", "--no-wait")
    assert (done.exit_code, done.stdout) == (0, "control operation 1 (Rows) is on its way\n")
    assert client.wait_control(1, 0.0).record.outcome is ControlOutcome.PENDING


def test_a_job_without_operations_says_so():
    assert call("controls", "counts").stdout == "The job has had no control operations.\n"


@pytest.mark.parametrize(
    ("operation", "code", "says"),
    [
        ("program.py:nothing", 1, "expected a control operation, found int 42"),
        ("program.py:Rowz", 2, "Did you mean 'Rows'?"),
        ("program.py:named", 1, "expected a control operation, found function"),
    ],
)
def test_anything_but_an_operation_is_refused(operation: str, code: int, says: str):
    done = call("control", "counts", operation)
    assert done.exit_code == code
    assert says in done.output


def test_refusals_of_the_job_arrive_unchanged(client: JobClient, monkeypatch: pytest.MonkeyPatch):
    class Unknown(Rows):
        def prepare(self, graph: Any) -> dict[str, Any]:
            return {"counts": None}

    class HoldsLock(Rows):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(FlowError, match="there is no operator 'counts'; there are in, by user, count"):
        client.control(Unknown())
    with pytest.raises(FunctionError, match="cannot be pickled"):
        client.control(HoldsLock())
    monkeypatch.setattr(control_desk, "MOST_OPEN", 3)
    for _ in range(3):
        client.control(Rows())
    with pytest.raises(FlowError, match="3 control operations are in progress, and no more are taken"):
        client.control(Rows())
