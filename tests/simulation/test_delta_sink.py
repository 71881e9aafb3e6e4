"""Rows in a table of Delta Lake agree with state when the process dies in the sink, at every one of its steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from midstream.checkpoint.inspection import read_state
from midstream.runtime.edge import ProcessEnded

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'midstream[delta]'")

from tests.simulation.lake_job import EPOCHS, Steps, done, run  # noqa: E402  # it needs the package

ROOT = Path(__file__).parents[2]


def in_lake(folder: Path) -> list[tuple[int, str, int]]:
    rows = deltalake.DeltaTable(folder / "lake").to_pyarrow_table().to_pylist()
    return sorted((row["epoch"], row["k"], row["n"]) for row in rows)


def in_state(folder: Path) -> dict[str, int]:
    return {row["k"]: int(row["value"]) for row in read_state(str(folder / "c"), "add").to_pylist()}


def life(folder: Path, step: int, program: str = "tests.simulation.lake_job", *more: str) -> int:
    """Run the job until it ends or is killed at a step; return the code with which the process ended."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", program, str(folder), str(step), *more],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode


def assert_complete(folder: Path, found: list[tuple[int, str, int]] | None = None) -> None:
    """Compare what was found in the table with a count that knows of no epoch, no table and no state."""
    wanted = sorted((epoch, row["k"], row["n"]) for epoch, rows in enumerate(EPOCHS) for row in rows)
    assert (in_lake(folder) if found is None else found) == wanted
    totals: Counter[str] = Counter()
    for rows in EPOCHS:
        for row in rows:
            totals[row["k"]] += row["n"]
    assert in_state(folder) == totals


class Died(ProcessEnded):
    """The end of a driver. Nothing in it can handle that."""


def die() -> None:
    raise Died


@pytest.mark.long
def test_the_driver_may_die_at_every_step_of_a_commit_to_a_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in each job, at one step after the other, until a job ends before its step comes."""
    for step in itertools.count(1):
        folder, steps = tmp_path / str(step), Steps(step, die)
        with monkeypatch.context() as patched, contextlib.suppress(Died):
            patched.setattr(deltalake, "write_deltalake", steps.write)
            patched.setattr(deltalake, "DeltaTable", WithSteps(steps))
            run(folder)
        if steps.taken < step:
            break
        run(folder)
        assert_complete(folder)
    assert step > 3 * len(EPOCHS)


class WithSteps:
    """The class of tables, with a step before one is opened."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._real = steps, deltalake.DeltaTable

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._steps.open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_process_that_is_killed_again_and_again_leaves_each_row_once(tmp_path: Path, seed: int) -> None:
    rng, kills = random.Random(seed), 0
    while done(tmp_path / "c") < len(EPOCHS):
        kills += life(tmp_path, rng.randrange(2, 14) if kills < 5 else 0) != 0
    assert kills >= 2
    assert_complete(tmp_path)
