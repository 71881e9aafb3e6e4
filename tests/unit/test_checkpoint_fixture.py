"""A checkpoint of an earlier midstream can be opened, continued and inspected, and its changes reverted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from midstream.change.offline_revert import revert_offline
from midstream.change.rewind import rewind
from midstream.change.savepoint import take_savepoint
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.cli.app import app
from tests.fixtures.make_checkpoint import FOLDER, make
from tests.fixtures.shop import ALL_EPOCHS, STATEFUL, STORED_EPOCHS, Oracle, run

LATER = range(STORED_EPOCHS, ALL_EPOCHS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A copy of the stored checkpoint."""
    return str(shutil.copytree(FOLDER, tmp_path / "checkpoint"))


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def assert_goes_on(checkpoint: str, oracle: Oracle) -> None:
    shop = run(LATER, checkpoint)
    for epoch in LATER:
        assert shop.found(epoch) == oracle.expected[epoch], epoch


def test_an_old_checkpoint_opens_and_continues_exactly(checkpoint):
    assert_goes_on(checkpoint, Oracle())


def test_the_state_of_an_old_checkpoint_can_be_read(checkpoint):
    oracle = Oracle(STORED_EPOCHS)
    overview = call("state", checkpoint)
    for operator in STATEFUL:
        assert operator in overview
        assert "a" in call("state", checkpoint, operator)
    accounts = read_state(checkpoint, "accounts").to_pylist()
    assert {row["key"]: row["value"] for row in accounts} == oracle.balances
    notes = read_state(checkpoint, "notes").to_pylist()
    assert {row["key"]: row["value"] for row in notes} == {user: repr(ids) for user, ids in oracle.notes.items()}


def test_the_history_of_an_old_checkpoint_can_be_read(checkpoint):
    text = call("history", checkpoint)
    for operator in ("price", "remember", "country", "ledger"):
        assert operator in text
    records = Checkpoint.of_any_flow(checkpoint).changes.records()
    assert [(record.revision, record.operators, record.outcome) for record in records] == [
        (2, ("price",), Outcome.APPLIED),
        (3, ("remember", "country"), Outcome.APPLIED),
        (4, ("ledger",), Outcome.APPLIED),
    ]
    assert records[1].updates[0].migrate is not None


def test_a_change_in_an_old_checkpoint_can_be_reverted(checkpoint):
    revert_offline(checkpoint, 3)
    assert_goes_on(checkpoint, Oracle(limit_in=range(3, STORED_EPOCHS)))


def test_a_savepoint_of_an_old_checkpoint_is_whole_and_a_rewind_can_go_back_to_it(checkpoint):
    """Its manifests do not name the assignments apart from the configuration."""
    taken = take_savepoint(checkpoint, "old")
    assert taken.manifest.assignments == ""
    run(LATER, checkpoint)
    newest = Checkpoint.of_any_flow(checkpoint).newest_manifest()
    assert newest is not None
    assert newest.assignments
    rewind(checkpoint, "old")
    assert_goes_on(checkpoint, Oracle())


def test_the_stored_checkpoint_has_every_kind_of_file(checkpoint):
    names = " ".join(str(path.relative_to(checkpoint)) for path in Path(checkpoint).rglob("*"))
    for part in ("midstream.json", "blobs/", "epochs/", "changes/", "-delta-", "-merged-", "-snapshot-"):
        assert part in names
    assert "lock" not in names
    assert sum(path.stat().st_size for path in Path(checkpoint).rglob("*") if path.is_file()) < 500_000


def test_the_script_that_made_it_still_runs(tmp_path: Path, checkpoint: Any):
    """Checkpoints of this midstream and of an earlier one are read alike."""
    make(tmp_path / "new")
    assert_goes_on(str(tmp_path / "new"), Oracle())
