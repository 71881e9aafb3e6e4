"""``midstream revert CHECKPOINT REVISION``: the way back of a job that is not running, and perhaps cannot start."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from midstream import Flow, ListSource, MemorySink, State, Update
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.cli.app import app
from midstream.errors import CheckpointError
from midstream.ids import Revision
from midstream.testing import ChangeAt, run_local
from tests.served import StandInJob, served

EPOCHS, ROWS = 4, 6

STEPS = """
    def to_list(key, state):
        state.set([0] * state.get()["n"])


    def of_one(key):
        pass
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "steps.py").write_text(dedent(STEPS), encoding="utf-8")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def count_in_list(key: Any, row: Any, state: State) -> Any:
    seen = [*state.get([]), row["n"]]
    state.set(seen)
    return {**row, "seen": len(seen)}


def count_in_dict(key: Any, row: Any, state: State) -> Any:
    seen = state.get({"n": 0})["n"] + 1
    state.set({"n": seen})
    return {**row, "seen": seen}


def to_dict(key: Any, state: State) -> None:
    state.set({"n": len(state.get())})


def flow(sink: MemorySink) -> Flow:
    """Every life of the job gets the same numbers once more."""
    rows = [{"k": n % 2, "n": n} for n in range(EPOCHS * ROWS)]
    made = Flow("turnover")
    stream = made.source("in", ListSource.of(rows, schema="k int, n int", epoch_rows=ROWS)).map("A", lambda row: row)
    stream.key_by("key", "k").process("P", count_in_list, returns="k int, n int, seen int").sink("out", sink)
    return made


def live(*changes: Update) -> list[dict[str, Any]]:
    """One life of the job, changed in its second epoch; what its last epoch gave."""
    out = MemorySink()
    wanted = [ChangeAt.of(1, *changes, scheduler="epoch")] if changes else []
    run_local(flow(out), checkpoint="job", changes=wanted)
    return sorted(out.rows, key=lambda row: (row["k"], row["seen"]))


def seen(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    return {k: [row["seen"] for row in rows if row["k"] == k] for k in (0, 1)}


def counts(lives: int) -> dict[int, list[int]]:
    """The oracle: each key counts its rows, over all lives of the job, without a gap."""
    each = EPOCHS * ROWS // 2
    return {key: list(range((lives - 1) * each + 1, lives * each + 1)) for key in (0, 1)}


def outcomes() -> list[str]:
    return [str(record.outcome) for record in Checkpoint.of_any_flow("job").changes.records()]


def test_the_next_start_runs_what_the_revision_ran():
    live(Update("A", lambda row: {**row, "n": -1}))
    assert {row["n"] for row in live()} == {-1}, "the change outlives its driver"
    result = call("revert", "job", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout == ("revision 3 (A): back to revision 1, offline; the next start of the job begins with it\n")
    rows = live()
    assert sorted(row["n"] for row in rows) == list(range(EPOCHS * ROWS))
    assert seen(rows) == counts(3)
    head, what, note = call("history", "job").stdout.splitlines()[-3:]
    assert head.startswith("revision 3  applied  ")
    assert what.startswith("    A: ")
    assert note == "    note: back to revision 1, offline"
    assert json.loads(call("history", "job", "--json").stdout)[1]["revision"] == 3


def test_revert_migrates_state_back():
    live(Update("P", count_in_dict, migrate=to_dict))
    result = call("revert", "job", "1")
    assert result.exit_code == 1
    assert "the state of 'P' was migrated by revision 2" in result.stderr
    assert "--migrate P=MODULE:FUNCTION" in result.stderr
    assert outcomes() == ["applied"], "nothing has changed"
    result = call("revert", "job", "1", "--migrate", "P=steps.py:to_list")
    assert result.exit_code == 0, result.output
    assert seen(live()) == counts(2)


def test_revert_refuses_invalid_migrations():
    live(Update("P", count_in_dict, migrate=to_dict))
    for option, says in (
        ("A=steps.py:to_list", "migrate= names A, which keeps no state of the user's in 'job'; those that do: P"),
        ("P=steps.py:of_one", "is called with 2 arguments: a key and its state"),
    ):
        result = call("revert", "job", "1", "--migrate", option)
        assert result.exit_code == 1
        assert says in result.stderr
    assert outcomes() == ["applied"]


def test_revert_takes_back_a_function_that_can_no_longer_be_loaded(here, monkeypatch):
    packages = here / "site-packages"
    packages.mkdir()
    (packages / "old_model.py").write_text("def score(row):\n    return {**row, 'n': 7}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(packages))
    live(Update("A", importlib.import_module("old_model").score))
    (packages / "old_model.py").unlink()
    del sys.modules["old_model"]
    with pytest.raises(CheckpointError, match="'midstream revert CHECKPOINT 1'"):
        live()
    assert call("revert", "job", "1").exit_code == 0
    rows = live()
    assert sorted(row["n"] for row in rows) == list(range(EPOCHS * ROWS))
    assert seen(rows) == counts(2)


def test_revert_ends_a_change_that_was_on_trial():
    live()
    log = Checkpoint.of_any_flow("job").changes
    live(Update("A", lambda row: {**row, "n": -1}))
    [record] = log.records()
    log.keep(msgspec.structs.replace(record, number=2, revision=Revision(3), outcome=Outcome.PENDING))
    result = call("revert", "job", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("revision 3 (A): rolled back, ")
    assert result.stdout.splitlines()[1].startswith("revision 4: back to revision 2, offline")
    assert outcomes() == ["applied", "rolled back", "applied"]


def test_revert_refuses_the_checkpoint_of_a_running_job():
    live(Update("A", lambda row: {**row, "n": -1}))
    running = Checkpoint.of_any_flow("job")
    running.claim()
    try:
        result = call("revert", "job", "1")
    finally:
        running.release()
    assert result.exit_code == 1
    assert "a job is running on the checkpoint 'job' (process " in result.stderr
    assert "job.revert(1), or 'midstream revert NAME 1' if it is served; or stop it first" in result.stderr
    assert outcomes() == ["applied"]
    assert call("revert", "job", "1").exit_code == 0, "and it can be, once it has ended"


def test_a_served_job_may_be_named_by_its_checkpoint(here):
    job = StandInJob(here / "served")
    with served(job, checkpoint=str(here / "served")):
        assert call("history", "./served").stdout == "The job has not been changed.\n"
        job.update(Update("FM", lambda row: {**row, "n": 9}))
        job.commit()
        result = call("revert", "served/../served", "1", "--no-wait")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("revision 3 (FM): pending")
    assert job.payload("FM")({"n": 2})["n"] == 2


def test_revert_reports_what_it_cannot_do():
    live(Update("A", lambda row: {**row, "n": -1}))
    for arguments, code, says in (
        (("job", "7"), 1, "there is no revision 7 to go back to; the job has run 1 (the script), 2 (A: a lambda)"),
        (("job", "2"), 1, "the job runs what it ran at revision 2; there is nothing to revert"),
        (("home", "1"), 2, "there is no job 'home'"),
        (("./elsewhere", "1"), 1, "'./elsewhere' is not the checkpoint of a job"),
        (("job", "one"), 2, "Invalid value for 'revision'"),
    ):
        result = call("revert", *arguments)
        assert (result.exit_code, says in result.stderr) == (code, True), result.stderr
    assert outcomes() == ["applied"]
    assert not Path("elsewhere").exists()
