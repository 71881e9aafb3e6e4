"""The state that removed operators leave, and that is dropped while their job is not running."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from midstream import (
    Flow,
    Insert,
    ListSource,
    MemorySink,
    Remove,
    State,
    Update,
    agg,
    delete_savepoint,
    forget_state,
    fork,
    rewind,
    take_savepoint,
)
from midstream.checkpoint import entry_log
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.checkpoint.location import Checkpoint
from midstream.cli.app import app
from midstream.errors import CheckpointError, StateError
from midstream.testing import ChangeAt, Faults, ManualClock, run_local
from tests.oracle import Row

pytestmark = pytest.mark.long


def count_up(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {**row, "c": state.get()}


BACK = Insert(lambda rows: rows.process("count", count_up), between=("by k", "out"))


def run(
    at: Path | str,
    keys: Sequence[str],
    *changes: ChangeAt,
    has_count: bool = False,
    faults: Faults | None = None,
    seed: int = 0,
    **how: Any,
) -> list[tuple[str, int]]:
    """Run an epoch for each of the keys; what came out of "count", with 0 where it was not there."""
    flow, out = Flow("counts"), MemorySink()
    source = flow.source("in", ListSource([[{"k": key, "c": 0}] for key in keys], "k string, c bigint"))
    keyed = source.key_by("by k", "k")
    totals = keyed.process("total", count_up)
    totals.sink("totals", MemorySink())
    (keyed.process("count", count_up) if has_count else keyed).sink("out", out)
    result = run_local(
        flow, checkpoint=str(at), changes=changes, clock=ManualClock(), faults=faults, seed=seed, durable=False, **how
    )
    assert all(record.outcome is not Outcome.REFUSED for record in result.history), result.history
    return [(row["k"], row["c"]) for row in out.rows]


def removed_live(at: Path, keys: str = "aab", *, is_scripted: bool = False) -> int:
    """Let "count" see the keys, and remove it; gives the number of epochs.

    If it is in the script, each later start takes it out again.
    """
    if is_scripted:
        run(at, [*keys, "z", "z"], ChangeAt.of(len(keys), Remove("count"), scheduler="epoch"), has_count=True)
    else:
        gone = ChangeAt.of(len(keys) + 1, Remove("count"), scheduler="epoch")
        run(at, ["y", *keys, "z", "z"], ChangeAt.of(0, BACK, scheduler="epoch"), gone)
    [held] = [each for each in StateReader.at(str(at)).overview() if each.is_kept]
    assert held.operator == "count"
    return len(keys) + (2 if is_scripted else 3)


def counted(at: Path | str, **how: Any) -> list[tuple[str, int]]:
    """What "count" gives for an "a" and a "b" after it was inserted again."""
    found = Checkpoint.of_any_flow(str(at)).newest_manifest()
    assert found is not None
    return run(at, ["x", "a", "b"], ChangeAt.of(found.epoch + 1, BACK, scheduler="epoch"), **how)[-2:]


@pytest.mark.parametrize("is_scripted", [False, True])
def test_an_operator_starts_empty_after_its_kept_state_was_dropped(is_scripted: bool, tmp_path: Path):
    removed_live(tmp_path, is_scripted=is_scripted)
    record = forget_state(str(tmp_path), "count", by="ann")
    assert (record.by, record.outcome, record.subjects) == ("ann", Outcome.APPLIED, "kept state of count")
    assert counted(tmp_path, has_count=is_scripted) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("is_scripted", [False, True])
def test_an_operator_finds_its_state_if_that_was_not_dropped(is_scripted: bool, tmp_path: Path):
    removed_live(tmp_path, is_scripted=is_scripted)
    assert counted(tmp_path, has_count=is_scripted) == [("a", 3), ("b", 2)]


@pytest.mark.parametrize("is_scripted", [False, True])
def test_an_operator_may_have_another_layout_after_its_state_was_dropped(is_scripted: bool, tmp_path: Path):
    epochs = removed_live(tmp_path, is_scripted=is_scripted)
    forget_state(str(tmp_path), "count")
    other = Insert(lambda keyed: keyed.aggregate("count", c=agg.count()), between=("by k", "out"))
    change = ChangeAt.of(epochs, other, scheduler="epoch")
    assert run(tmp_path, "xaa", change, has_count=is_scripted)[-1] == ("a", 2)


def test_dropped_state_is_gone_for_readers_at_once_and_other_state_stays(tmp_path: Path):
    removed_live(tmp_path)
    at = str(tmp_path)
    assert read_state(at, "count").num_rows
    totals = read_state(at, "total")
    forget_state(at, "count")
    assert [held.operator for held in StateReader.at(at).overview()] == ["total"]
    with pytest.raises(StateError, match="no operator 'count' keeps state"):
        read_state(at, "count")
    assert read_state(at, "total").equals(totals)
    run(tmp_path, ["a"])
    assert [held.operator for held in StateReader.at(at).overview()] == ["total"]


def test_files_of_dropped_state_are_removed_unless_a_savepoint_needs_them(tmp_path: Path):
    removed_live(tmp_path)
    at = str(tmp_path)
    checkpoint = Checkpoint.of_any_flow(at)
    take_savepoint(at, "before")
    forget_state(at, "count")
    run(tmp_path, "aaa")
    assert any(name.startswith("count") for name in checkpoint.states.names())
    delete_savepoint(at, "before")
    run(tmp_path, "aaa")
    left = list(checkpoint.states.names())
    assert left
    assert not any(name.startswith("count") for name in left)


def test_a_rewind_to_an_earlier_savepoint_brings_dropped_state_back(tmp_path: Path):
    removed_live(tmp_path)
    at = str(tmp_path)
    take_savepoint(at, "before")
    forget_state(at, "count")
    assert counted(tmp_path) == [("a", 1), ("b", 1)]
    rewind(at, "before")
    assert counted(tmp_path) == [("a", 3), ("b", 2)]


def test_a_fork_of_an_earlier_savepoint_has_dropped_state_and_one_of_a_later_savepoint_does_not(tmp_path: Path):
    at = tmp_path / "job"
    removed_live(at)
    take_savepoint(str(at), "before")
    forget_state(str(at), "count")
    take_savepoint(str(at), "after")
    fork(str(at), "before", str(tmp_path / "one"))
    fork(str(at), "after", str(tmp_path / "two"))
    assert counted(tmp_path / "one") == [("a", 3), ("b", 2)]
    assert counted(tmp_path / "two") == [("a", 1), ("b", 1)]


def test_state_that_is_left_again_later_is_kept_again(tmp_path: Path):
    removed_live(tmp_path)
    at = str(tmp_path)
    forget_state(at, "count")
    counted(tmp_path)
    found = Checkpoint.of_any_flow(at).newest_manifest()
    assert found is not None
    run(tmp_path, "aa", ChangeAt.of(found.epoch + 1, Remove("count"), scheduler="epoch"))
    run(tmp_path, "a")
    assert counted(tmp_path)[-1] == ("b", 2)


def test_a_script_that_has_the_operator_again_starts_it_empty(tmp_path: Path):
    run(tmp_path, "aab", has_count=True)
    run(tmp_path, "a")
    forget_state(str(tmp_path), "count")
    assert run(tmp_path, "ab", has_count=True) == [("a", 1), ("b", 1)]
    run(tmp_path, "a")
    assert run(tmp_path, "ab", has_count=True) == [("a", 2), ("b", 2)]


@pytest.mark.parametrize("seed", range(8))
def test_state_stays_dropped_whatever_crashes_afterwards(seed: int, tmp_path: Path):
    removed_live(tmp_path)
    forget_state(str(tmp_path), "count")
    faults = Faults(crash=0.03, repeat=0.2, speculate=0.05, crash_driver=0.03, lose_output=0.05)
    assert counted(tmp_path, faults=faults, seed=seed) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_crash_before_the_drop_is_on_record_changes_nothing(
    is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    removed_live(tmp_path)

    class Killed(BaseException):
        pass

    def killed(fs: Any, path: str, data: bytes, **_: Any) -> None:
        if is_written:
            Path(path).write_bytes(data[: len(data) // 2])
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(entry_log, "write_atomically", killed)
        with pytest.raises(Killed):
            forget_state(str(tmp_path), "count")
    assert counted(tmp_path) == [("a", 3), ("b", 2)]


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_state_in_use_or_unknown_is_refused_and_what_is_kept_is_named(tmp_path: Path):
    removed_live(tmp_path)
    at = str(tmp_path)
    entries = Checkpoint.of_any_flow(at).changes.records()
    with pytest.raises(StateError, match=r"'total' is in the flow .* Remove it first: job.update\(Remove\('total'\)\)"):
        forget_state(at, "total")
    with pytest.raises(StateError, match=r"'coun' has left state .*: count\. Did you mean 'count'\?"):
        forget_state(at, "coun")
    assert Checkpoint.of_any_flow(at).changes.records() == entries
    forget_state(at, "count")
    with pytest.raises(StateError, match="those that have: none"):
        forget_state(at, "count")


def test_a_job_that_runs_or_has_no_epoch_is_refused(tmp_path: Path):
    at = str(tmp_path)
    with pytest.raises(CheckpointError, match="is not the checkpoint of a job"):
        forget_state(at, "count")
    removed_live(tmp_path)
    checkpoint = Checkpoint.of_any_flow(at)
    checkpoint.claim()
    try:
        with pytest.raises(CheckpointError, match=r"a job is running on .* Stop it before"):
            forget_state(at, "count")
    finally:
        checkpoint.release()


def test_a_change_in_progress_is_refused(tmp_path: Path):
    epochs = removed_live(tmp_path)
    run(tmp_path, "a", ChangeAt.of(epochs, Update("total", count_down), scheduler="epoch"))
    assert Checkpoint.of_any_flow(str(tmp_path)).changes.records()[-1].outcome is Outcome.PENDING
    with pytest.raises(CheckpointError, match=r"the change to revision 4 \(total\) was in progress"):
        forget_state(str(tmp_path), "count")
    run(tmp_path, "aaa")
    forget_state(str(tmp_path), "count")


def count_down(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) - 1)
    return {**row, "c": state.get()}


def test_the_command_drops_state_and_says_so(tmp_path: Path):
    removed_live(tmp_path)

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["state", str(tmp_path), *arguments], env={"COLUMNS": "200"})

    assert "removed" in call().output
    refused = call("total", "--forget", "count")
    assert (refused.exit_code, "leave out the other arguments" in refused.output) == (1, True)
    unknown = call("--forget", "nobody")
    assert (unknown.exit_code, "those that have: count" in unknown.output) == (1, True)
    told = call("--forget", "count")
    assert told.exit_code == 0
    done = "the state that 'count' left when it was removed is dropped (revision 4)"
    assert told.output == f"{done}: an operator of this name starts empty\n"
    assert "count" not in call().output
