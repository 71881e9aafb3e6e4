"""Rows that are upserted into a lake agree with state: when a change is rolled back, and when the process dies."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path

import pytest

from midstream import Update
from midstream.testing import ChangeAt, ManualClock
from tests.simulation.test_database_upsert import add_to_another, in_state, refuses
from tests.simulation.upserting_job import EPOCHS, done

pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'midstream[delta]'")
pytest.importorskip("pyiceberg", reason="PyIceberg is not installed: pip install 'midstream[iceberg]'")
pytest.importorskip("sqlalchemy", reason="PyIceberg is not installed: pip install 'pyiceberg[sql-sqlite]'")

from tests.simulation.lake_job import Steps, stepping  # these need the packages
from tests.simulation.test_delta_sink import Died, die, life
from tests.simulation.upserting_lake_job import STEPS, run, sink_of

LAKES = ("delta", "iceberg")
FEW = 4
"""Number of epochs where the job dies once at each of its steps."""
KILLS = {"delta": (8, 22), "iceberg": (20, 50)}
"""At which steps of a life it may be killed: after its start, and mostly before its end."""


def in_lake(folder: Path, lake: str) -> dict[str, int]:
    with sink_of(lake, folder) as (_, read):
        rows = read().to_pylist()
    assert len({row["k"] for row in rows}) == len(rows), "each key is there once"
    return {row["k"]: row["n"] for row in rows}


def totals(epochs: int = len(EPOCHS)) -> dict[str, int]:
    """What the first epochs come to, counted without a job."""
    found: dict[str, int] = {}
    for row in itertools.chain(*EPOCHS[:epochs]):
        found[row["k"]] = found.get(row["k"], 0) + row["n"]
    return found


def assert_between(folder: Path, lake: str) -> None:
    """State is that of the committed epochs, and the table is at most an epoch ahead."""
    epochs = done(folder / "c")
    assert not epochs or in_state(folder / "c") == totals(epochs)
    assert in_lake(folder, lake) in (totals(epochs), totals(epochs + 1))


def changing() -> list[ChangeAt]:
    """A change of an epoch, which is rolled back when rows of it were upserted."""
    return [ChangeAt.of(2, Update("add", add_to_another), scheduler="epoch")]


@pytest.mark.parametrize("lake", LAKES)
def test_rows_of_a_change_that_was_rolled_back_are_undone(tmp_path: Path, lake: str) -> None:
    ran = run(tmp_path, lake, refuses, changes=changing(), clock=ManualClock())
    assert [str(record.outcome) for record in ran.history] == ["rolled back"]
    assert in_lake(tmp_path, lake) == in_state(tmp_path / "c") == totals()


@pytest.mark.slow
@pytest.mark.parametrize("lake", LAKES)
def test_the_driver_may_die_at_every_step_of_an_upsert(tmp_path: Path, lake: str) -> None:
    """Also while a change is rolled back, and its rows undone: the next start undoes them."""
    for step in itertools.count(1):
        folder, steps = tmp_path / str(step), Steps(step, die)
        with contextlib.suppress(Died), stepping(steps, STEPS[lake]):
            run(folder, lake, refuses, epochs=FEW, changes=changing(), clock=ManualClock())
        if steps.taken < step:
            break
        run(folder, lake, refuses, epochs=FEW)
        assert in_lake(folder, lake) == in_state(folder / "c") == totals(FEW)
    assert step > 4 * FEW


@pytest.mark.slow
@pytest.mark.parametrize("lake", LAKES)
def test_a_process_that_is_killed_again_and_again_leaves_each_total_once(tmp_path: Path, lake: str) -> None:
    rng, kills = random.Random(1), 0
    while done(tmp_path / "c") < len(EPOCHS):
        step = rng.randrange(*KILLS[lake]) if kills < 5 else 0
        kills += life(tmp_path, step, "tests.simulation.upserting_lake_job", lake) != 0
        assert_between(tmp_path, lake)
    assert kills >= 2
    assert in_lake(tmp_path, lake) == in_state(tmp_path / "c") == totals()
