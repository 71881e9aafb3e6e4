"""Migrations from another process: over HTTP, by the client, and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midstream import Drain, Move, Outcome, Rebalance, Rescale
from midstream.cli.app import app
from midstream.errors import FlowError, MidstreamError
from midstream.planner.assignment import spread
from midstream.server.client import JobClient
from tests.migrated import BEGIN, SteppedJob, stepped_job
from tests.served import Running, client_of_served


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SteppedJob]:
    with stepped_job(tmp_path, two=True) as found:
        found.run(2)
        yield found


@pytest.fixture(autouse=True)
def client(job: SteppedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobClient]:
    """Of the served job."""
    with client_of_served(job, tmp_path, monkeypatch) as found:
        yield found


def test_a_client_migrates_and_follows(job: SteppedJob, client: JobClient):
    state = client.migrate(Rescale(3, "by user"), strategy="batched", note="more")
    assert (state.record.number, state.progress.bins, state.record.note) == (1, 85, "more")
    job.run(3)
    state = client.migration(1)
    assert (state.progress.steps_done, state.record.outcome) == (3, Outcome.PENDING)
    assert [each.record.number for each in client.migrations()] == [1]
    assert client.cancel(1).record.outcome is Outcome.STOPPED
    assert client.migrations() == []
    back = client.reverse(1)
    assert back.record.number == 2
    job.run(3)
    assert client.migration(2, 5.0).record.outcome is Outcome.APPLIED
    assert [share.assignment for share in client.assignment()] == [spread(2), spread(2)]


def test_every_goal_arrives(client: JobClient):
    explained = client.explain_migration({"by user": spread(3), "by length": spread(1)}, strategy="sudden")
    assert explained.steps == 1
    assert "by user: " in explained.text
    assert explained.svg.startswith("<svg")
    assert client.explain_migration(Move({0: 1}, "by user"), strategy="fluid").bins == 1
    with pytest.raises(FlowError, match="no partition runs on an executor '4'; those with partitions are 0"):
        client.explain_migration(Drain("4"))
    with pytest.raises(FlowError, match="by='luck' is not measured"):
        client.migrate(Rebalance(by="luck"))
    with pytest.raises(FlowError, match="a migration cannot lead to str 'north'"):
        client.migrate("north")  # type: ignore[arg-type]  # that is the point
    assert client.freeze(3) == 5
    assert client.migrate(Rescale(3), at=40).record.migration.at_epoch == 40  # type: ignore[union-attr]  # it is one
    later = client.migrate(Rescale(4), at=BEGIN + timedelta(hours=1)).progress
    assert later.is_waiting_for == "event time 2026-05-01 01:00:00+00:00"


def test_an_invalid_body_is_refused(client: JobClient):
    for body, message in (
        ({"goals": [{"kind": "north"}]}, "Goals may be of the kinds 'move', 'rescale', 'divide', 'rebalance', 'drain"),
        ({"goals": [], "speed": 3}, "Object contains unknown field `speed`"),
    ):
        with pytest.raises(MidstreamError) as refusal:
            client._ask("POST", "/migrate", dict, body)
        assert message in str(refusal.value)
    with pytest.raises(MidstreamError, match="there is no migration 7 of this start of the job"):
        client.migration(7)
    client.migrate(Rescale(3))
    with pytest.raises(FlowError, match="turn 'left' is not known; allowed: 'cancel', 'reverse'"):
        client._ask("POST", "/migrations/1", dict, {"turn": "left"})


def call(*arguments: str, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_rescaling_on_the_command_line(job: SteppedJob):
    with Running(job):
        result = call("rescale", "counts", "3", "--stage", "by user", "--strategy", "sudden")
    assert "migration 1 (partitions of by user): applied, 85 of 85 bins" in result
    table = call("assignment", "counts")
    assert "by user: 256 bins" in table
    assert table.count("86") == 1
    assert "No migration is in progress." in call("migrations", "counts")


def test_explaining_on_the_command_line(tmp_path: Path):
    picture = tmp_path / "moves.svg"
    result = call("rescale", "counts", "4", "--explain", "--svg", str(picture), "--strategy", "fluid")
    assert "fluid migration in 256 steps:" in result
    assert picture.read_text().startswith("<svg")
    assert "add --explain" in call("rescale", "counts", "4", "--svg", "x.svg", code=2)


def test_cancelling_on_the_command_line(job: SteppedJob):
    result = call("migrate", "counts", "0=1", "2=1", "4=1", "--stage", "by user", "--strategy", "fluid", "--no-wait")
    assert "migration 1 (bins of by user): pending, 0 of 3 bins" in result
    job.run()
    shown = call("migrations", "counts")
    assert "1 of 3" in shown
    assert "fluid" in shown
    assert "stopped, 1 of 3 bins" in call("migrations", "counts", "1", "--cancel")
    with Running(job):
        assert "applied" in call("migrations", "counts", "1", "--reverse")


def test_bins_are_kept_where_they_are_on_the_command_line(job: SteppedJob):
    assert "for 3 epochs; epoch 5 is the first in which they may move" in call("freeze", "counts", "3")
    told = call("rescale", "counts", "3", "--no-wait", code=1)
    assert "epoch 5" in told
    assert "freeze(0): give the number of epochs" in call("freeze", "counts", "0", code=1)
    job.run(3)
    assert "pending" in call("rescale", "counts", "3", "--no-wait")


def test_executors_are_listed_on_the_command_line_and_by_a_client(client: JobClient):
    [only] = client.executors()
    assert (only.name, only.bins) == ("0", {1: 256, 2: 256})
    assert call("executors", "counts").split() == ["executor", "partitions", "bins", "0", "4", "512"]


def test_owners_are_printed_and_taken_from_a_file(job: SteppedJob, tmp_path: Path):
    before = json.loads(call("assignment", "counts", "--json"))
    assert before["by length"] == {"partitions": 2, "owners": [0, 1] * 128}
    file = tmp_path / "owners.json"
    file.write_text(json.dumps({**before, "by user": {"partitions": 2, "owners": [0] * 256}}))
    with Running(job):
        assert "applied, 128 of 128 bins" in call("migrate", "counts", "--to", str(file), "--strategy", "sudden")
    assert set(json.loads(call("assignment", "counts", "--json"))["by user"]["owners"]) == {0}
    assert "or a file with --to" in call("migrate", "counts", code=2)
    assert "or a file with --to" in call("migrate", "counts", "1=0", "--to", str(file), code=2)
    assert "cannot read" in call("migrate", "counts", "--to", str(tmp_path / "none.json"), code=2)
    for text in ("[]", "{", '{"by user": {"partitions": 1, "owners": [0, 1]}}'):
        file.write_text(text)
        assert "lacks the owners of bins by stage" in call("migrate", "counts", "--to", str(file), code=2)


def test_commands_that_migrate_share_their_options():
    of_rescale, of_drain = (call(name, "--help") for name in ("rescale", "drain"))
    for option in ("--strategy", "--budget", "--no-prewarm", "--at", "--queue", "--explain", "--svg", "--note"):
        assert option in of_rescale
        assert option in of_drain
    assert "{JOB} {partitions}" in of_rescale
    assert "Move everything off an executor" in of_drain


def test_wrong_arguments_are_reported():
    assert "'0-1' is not BIN=PARTITION" in call("migrate", "counts", "0-1", code=2)
    assert "neither the number of an epoch nor a time" in call("rescale", "counts", "3", "--at", "soon", code=2)
    assert "'k' is not COLUMN=VALUE" in call("divide", "counts", "count", "--key", "k", code=2)
    assert "give the key, or the bin, and only one of them" in call("divide", "counts", "count", code=1)
    of_process = call("divide", "counts", "count", "--key", "k=1", "--explain", code=1)
    assert "it is a process, and only bins of a join are divided" in of_process
    assert "say which migration" in call("migrations", "counts", "--cancel", code=2)
    assert "by='luck' is not measured" in call("rebalance", "counts", "--measure", "luck", code=1)
    assert "no partition runs on an executor '3'; those with partitions are 0" in call("drain", "counts", "3", code=1)
