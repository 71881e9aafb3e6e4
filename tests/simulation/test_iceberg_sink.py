"""Rows in a table of Iceberg agree with state when the process dies in the sink, at every one of its steps."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="PyIceberg is not installed: pip install 'pyiceberg[sql-sqlite]'")
pytest.importorskip("pyiceberg", reason="PyIceberg is not installed: pip install 'midstream[iceberg]'")
pytest.importorskip("deltalake", reason="the same job writes to Delta Lake: pip install 'midstream[delta]'")

from tests.lakes import Warehouse  # these need the packages
from tests.simulation.iceberg_job import STEPS, TABLE, run
from tests.simulation.lake_job import EPOCHS, Steps, done, stepping
from tests.simulation.test_delta_sink import Died, assert_complete, die, life


def in_table(folder: Path) -> list[tuple[int, str, int]]:
    with Warehouse.make(folder / "lake") as house:
        rows = house.table(TABLE).scan().to_arrow().to_pylist()
    return sorted((row["epoch"], row["k"], row["n"]) for row in rows)


@pytest.mark.slow
def test_the_driver_may_die_at_every_step_of_a_commit_to_iceberg(tmp_path: Path) -> None:
    """Once in each job, at one step after the other, until a job ends before its step comes."""
    for step in itertools.count(1):
        folder, steps = tmp_path / str(step), Steps(step, die)
        with contextlib.suppress(Died), stepping(steps, STEPS):
            run(folder)
        if steps.taken < step:
            break
        run(folder)
        assert_complete(folder, in_table(folder))
    assert step > 6 * len(EPOCHS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_process_that_is_killed_again_and_again_leaves_each_row_of_iceberg_once(tmp_path: Path, seed: int) -> None:
    rng, kills = random.Random(seed), 0
    while done(tmp_path / "c") < len(EPOCHS):
        step = rng.randrange(4, 16) if kills < 5 else 0
        kills += life(tmp_path, step, "tests.simulation.iceberg_job") != 0
    assert kills >= 2
    assert_complete(tmp_path, in_table(tmp_path))
