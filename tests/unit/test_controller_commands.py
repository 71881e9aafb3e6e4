"""Controllers from another process: over HTTP, by the client, and on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from midstream import Pace
from midstream.cli.app import app
from midstream.errors import FlowError
from midstream.server.client import JobClient
from tests.migrated import SteppedJob, stepped_job
from tests.served import client_of_served

POLICY = """
from midstream import Controller, Proposal, Rescale


class Grow(Controller):
    def __init__(self, partitions=3):
        self.partitions = partitions

    def decide(self, seen, memory):
        if memory:
            return [], memory
        return [Proposal(Rescale(self.partitions), "wanted", {"epoch": seen.observation.epoch})], True


def make():
    return Grow(4)


nothing = 42
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SteppedJob]:
    with stepped_job(tmp_path) as found:
        found.run(2)
        yield found


@pytest.fixture(autouse=True)
def client(job: SteppedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobClient]:
    """Of the served job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.py").write_text(POLICY)
    with client_of_served(job, tmp_path, monkeypatch) as found:
        yield found


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_controller_travels_to_the_job_and_what_it_does_can_be_read(job: SteppedJob):
    assert call("controllers", "counts").stdout == "The job has no controllers.\n"
    assert call("proposals", "counts").stdout == "The job's controllers have proposed nothing.\n"
    done = call("attach", "counts", "policy.py:Grow", "--set", "partitions=5", "--name", "grow")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("controller grow is attached: ")
    job.run(4)
    while job.migrations:
        job.run()
    job.run()
    assert job.owners().partitions == 5
    listed = call("proposals", "counts").stdout
    assert "rescale all stages to 5" in listed
    assert "applied" in listed
    assert "epoch 2" in listed
    assert "active" in call("controllers", "counts").stdout
    done = call("detach", "counts", "grow")
    assert done.stdout == "controller grow is detached; 1 of its 1 proposals were applied\n"
    assert job.controllers == ()


def test_a_controller_that_only_advises_changes_nothing(job: SteppedJob):
    assert "and only advises" in call("attach", "counts", "policy.py:make()", "--advise").stdout
    job.run(3)
    assert job.owners().partitions == 2
    assert "advised" in call("proposals", "counts").stdout
    assert "advises" in call("controllers", "counts").stdout


def test_ready_made_controllers_are_attached_by_name(job: SteppedJob):
    done = call("attach", "counts", "Pace", "--set", "latency=1 s", "--set", "between=('100 ms', '2 s')")
    assert done.exit_code == 0, done.output
    assert "Pace(latency='1 s', knob='pace', between=('100 ms', '2 s')" in job.controllers[0].settings


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Pace"], "Pace cannot be set like that"),
        (["Peace"], "'Peace' is not one of AutoScale, Balance, Pace"),
        (["Pace", "--set", "latency"], "is not NAME=VALUE"),
        (["Pace", "--set", "latency=soon"], "is not a length of time"),
        (["policy.py:nothing"], "a controller must be an instance of a subclass of Controller"),
        (["policy.py:make()", "--set", "partitions=3"], "--set is for a class of controllers"),
        (["AutoScale", "--name", "a b"], "the name of a controller is made of letters"),
    ],
)
def test_an_invalid_controller_is_refused_with_the_reason(job: SteppedJob, arguments: list[str], told: str):
    done = call("attach", "counts", *arguments)
    assert done.exit_code != 0
    assert told in done.output
    assert job.controllers == ()


def test_the_client_raises_the_same_refusals(job: SteppedJob, client: JobClient):
    state = client.attach(Pace(latency="1 s"))
    assert state == job.controllers[0]
    with pytest.raises(FlowError, match="a controller 'Pace' is attached already"):
        client.attach(Pace(latency="1 s"))
    with pytest.raises(FlowError, match="found 7"):
        client.attach(cast("Pace", 7))
    with pytest.raises(FlowError, match="no controller 'other' is attached; attached: 'Pace'"):
        client.detach("other")
    assert client.controllers() == list(job.controllers)
    assert client.detach("Pace").name == "Pace"
    assert client.proposals() == []
