"""Bins move and stages are rescaled while a flow runs, with faults: state and rows are what they would be anyway."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink, Move, Rescale, Update
from midstream.change.configuration import configuration_of
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.ids import StageIndex
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, run_local

pytestmark = pytest.mark.long

BAD_LUCK = Faults(crash=0.03, speculate=0.03, repeat=0.2, give_up=0.01, crash_driver=0.02, lose=0.2, lose_output=0.03)
EPOCHS = [[{"id": 100 * epoch + i, "k": f"user {(7 * epoch + i) % 37}"} for i in range(100)] for epoch in range(8)]


def numbered(key: Any, row: Any, state: Any) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return {**row, "n": state.get(0), "version": 1}


def numbered_anew(key: Any, row: Any, state: Any) -> dict[str, Any]:
    return {**numbered(key, row, state), "version": 2}


def counts(
    folder: Path, changes: list[ChangeAt], *, seed: int = 0, faults: Faults | None = None
) -> tuple[Any, LocalRun]:
    """Rows with the number that their key gave them, and the run."""
    flow, out = Flow("counts"), MemorySink()
    rows = flow.source("in", ListSource(EPOCHS, "id bigint, k string", partitions=2))
    rows.key_by("by k", "k").process("count", numbered, returns="id bigint, k string, n int, version int").sink(
        "out", out
    )
    run = run_local(
        flow, seed=seed, changes=changes, faults=faults, clock=ManualClock(), checkpoint=str(folder / "checkpoint")
    )
    return out.rows, run


def assert_gapless(rows: list[Any]) -> None:
    """Every row is there once, and each key has counted its rows without a gap or a repetition."""
    assert sorted(row["id"] for row in rows) == list(range(800))
    numbers: dict[str, list[int]] = {}
    for row in rows:
        numbers.setdefault(row["k"], []).append(row["n"])
    sizes = Counter(f"user {(7 * epoch + i) % 37}" for epoch in range(8) for i in range(100))
    assert {key: sorted(found) for key, found in numbers.items()} == {
        key: list(range(1, size + 1)) for key, size in sizes.items()
    }


CHANGES = [
    ChangeAt.of(1, Rescale(5)),
    ChangeAt.of(2, Move(dict.fromkeys(range(0, 256, 3), 4), stage="by k"), Update("count", numbered_anew)),
    ChangeAt.of(4, Rescale(1, stage="count")),
    ChangeAt.of(5, Rescale(3), scheduler="replay"),
]


@pytest.mark.parametrize("seed", range(4))
def test_counts_have_no_gap_whatever_moves_and_fails(seed: int, tmp_path: Path):
    rows, run = counts(tmp_path, CHANGES, seed=seed, faults=BAD_LUCK if seed else None)
    assert_gapless(rows)
    outcomes = [record.outcome for record in run.history]
    if seed:  # a driver that dies leaves changes refused that had to wait
        assert set(outcomes) <= {Outcome.APPLIED, Outcome.REFUSED}
    else:
        assert outcomes == [Outcome.APPLIED] * 4
    assert {row["version"] for row in rows[:100]} == {1}
    assert {row["version"] for row in rows[700:]} == {2 if outcomes[1] is Outcome.APPLIED else 1}
    checkpoint = Checkpoint.of_any_flow(str(tmp_path / "checkpoint"))
    newest = checkpoint.newest_manifest()
    assert newest is not None
    found = configuration_of(newest, checkpoint.blobs).assignments[StageIndex(1)]
    applied = [partitions for partitions, outcome in zip((5, 5, 1, 3), outcomes, strict=True) if outcome == "applied"]
    assert found.partitions == (applied or [2])[-1]
    assert set(found.owners) <= set(range(found.partitions))


def test_a_move_waits_for_the_next_epoch_and_says_why(tmp_path: Path):
    _, run = counts(tmp_path, [ChangeAt.of(1, Move({0: 1, 2: 1}))])
    [record] = run.history
    assert "by k: 2 of 256 bins move" in record.plan
    assert "waits for the next epoch: bins get other owners" in record.plan
    assert (record.epoch, record.subjects) == (2, "bins")


def test_a_change_that_fails_takes_its_moves_back(tmp_path: Path):
    broken = ChangeAt.of(1, Rescale(4), Update("count", lambda key, row, state: 1 // 0))
    rows, run = counts(tmp_path, [broken])
    assert_gapless(rows)
    assert [record.outcome for record in run.history] == [Outcome.ROLLED_BACK]
    checkpoint = Checkpoint.of_any_flow(str(tmp_path / "checkpoint"))
    newest = checkpoint.newest_manifest()
    assert newest is not None
    assert configuration_of(newest, checkpoint.blobs).assignments[StageIndex(1)].partitions == 2
