"""Inspection of committed state: all kinds of operators, one key, the command line, and errors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from midstream import Flow, ListSource, NoopSink, State, agg, sessions, tumbling
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.cli.app import app
from midstream.errors import CheckpointError, StateError
from midstream.testing import run_local

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "user string, n int, t timestamp"


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


class Remember:
    """Keeps something in every view."""

    def __call__(self, key: str, row: dict[str, Any], state: State) -> None:
        state.set({"n": row["n"]})
        state.list("recent").append(row["n"])
        state.map("seen")[row["n"]] = True
        state.event_timer(at(1000))

    def on_timer(self, key: str, time: datetime, state: State) -> None:
        raise AssertionError("not before the end of the test")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        [{"user": "ann", "n": 1, "t": at(0)}, {"user": "bob", "n": 2, "t": at(3)}],
        [{"user": "ann", "n": 5, "t": at(31)}],
    ]
    flow = Flow("looked at")
    keyed = flow.source("rows", ListSource(rows, SCHEMA), event_time="t").key_by("by_user", "user")
    keyed.process("remember", Remember()).sink("out1", NoopSink())
    keyed.aggregate("spent", n=agg.count(), total=agg.sum("n")).sink("out2", NoopSink())
    keyed.aggregate("by minute", window=tumbling("1 minute"), n=agg.count()).sink("out3", NoopSink())
    keyed.aggregate("visits", window=sessions("10 seconds"), n=agg.count()).sink("out4", NoopSink())
    keyed.distinct("first").sink("out5", NoopSink())
    right = keyed.map(
        "renamed",
        lambda row: {"user": row["user"], "m": row["n"], "t2": row["t"]},
        returns="user string, m int, t2 timestamp",
    ).key_by("again", "user")
    keyed.join("pairs", right, within="1 minute", right_time="t2").sink("out6", NoopSink())
    folder = str(tmp_path_factory.mktemp("looked"))
    run_local(flow, checkpoint=folder)
    return folder


def test_running_totals_are_shown_in_the_operators_own_columns(checkpoint: str) -> None:
    table = read_state(checkpoint, "spent")
    assert sorted(table.to_pylist(), key=lambda row: row["user"]) == [
        {"user": "ann", "n": 2, "total": 6},
        {"user": "bob", "n": 1, "total": 2},
    ]


def test_open_windows_and_sessions_are_shown_with_their_bounds(checkpoint: str) -> None:
    windows = read_state(checkpoint, "by minute").to_pylist()
    assert {(row["user"], row["n"]) for row in windows} == {("ann", 2), ("bob", 1)}
    assert {(row["window_start"], row["window_end"]) for row in windows} == {(at(0), at(60))}
    [session] = read_state(checkpoint, "visits").to_pylist()  # the others are closed
    assert session == {"user": "ann", "window_start": at(31), "window_end": at(41), "n": 1}


def test_everything_that_a_process_remembers_is_shown(checkpoint: str) -> None:
    shown = read_state(checkpoint, "remember", ("ann",)).to_pylist()
    assert {(row["view"], row["item"], row["time"], row["value"]) for row in shown} == {
        ("value", None, None, "{'n': 5}"),
        ("list", "recent", None, "[1, 5]"),
        ("map", "seen[1]", None, "True"),
        ("map", "seen[5]", None, "True"),
        ("event timer", None, at(1000), None),
    }


def test_keys_of_a_distinct_and_sizes_of_a_join(checkpoint: str) -> None:
    assert sorted(row["user"] for row in read_state(checkpoint, "first").to_pylist()) == ["ann", "bob"]
    kept = read_state(checkpoint, "pairs").to_pylist()
    assert {(row["user"], row["side"]) for row in kept} == {(u, s) for u in ("ann", "bob") for s in ("left", "right")}
    assert all(row["bytes"] > 0 for row in kept)


def test_an_unknown_operator_or_key_is_reported(checkpoint: str) -> None:
    with pytest.raises(StateError, match=r"no operator 'spend' keeps state.*Did you mean 'spent'\?"):
        read_state(checkpoint, "spend")
    assert read_state(checkpoint, "spent", ("zoe",)).num_rows == 0


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not the checkpoint of a job"):
        StateReader.at(str(tmp_path))


def test_a_missing_state_file_is_reported(checkpoint: str, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    for file in (copy / "state" / "spent").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"the state file 'spent/.*' is missing"):
        read_state(str(copy), "spent")


# ── the command line ──────────────────────────────────────────────────────────────────────────────────────────────


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["state", *arguments])


def test_the_command_lists_operators(checkpoint: str) -> None:
    result = cli(checkpoint)
    assert result.exit_code == 0
    assert "state after epoch 1" in result.output
    assert all(name in result.output for name in ("remember", "spent", "by minute", "visits", "first", "pairs"))


def test_the_command_shows_an_operator_and_a_key(checkpoint: str) -> None:
    everything = cli(checkpoint, "spent").output
    assert "ann" in everything
    assert "bob" in everything
    one = cli(checkpoint, "spent", "bob").output
    assert "ann" not in one
    assert "bob" in one
    assert "1 more rows" in cli(checkpoint, "spent", "--limit", "1").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("nowhere",), "not the checkpoint of a job"), (("spent", "a", "b"), "")],
)
def test_the_command_reports_errors(checkpoint: str, arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
