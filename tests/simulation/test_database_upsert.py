"""Upserted rows agree with state: after a change was rolled back, and when the process dies in the sink."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from midstream import State, Update
from midstream.checkpoint.inspection import read_state
from midstream.testing import ChangeAt, ManualClock, run_local
from tests.databases import Database, Postgres
from tests.simulation.upserting_job import EPOCHS, add, done, flow_to

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


def add_to_another(key: str, row: Row, state: State) -> Row:
    """The change: it overwrites a key that the epoch without it leaves alone."""
    return {"k": "once", "n": 100 + add(key, row, state)["n"]}


def refuses(rows: Any, epoch: int) -> None:
    """A second sink, which fails on rows of the change when the first one has written them."""
    if any(row["n"] >= 100 for row in rows.to_pylist()):
        raise OSError("disk full")


def in_database(database: Database) -> dict[str, int]:
    return {k: int(n) for k, n in database.run("SELECT k, n FROM out")}


def in_state(checkpoint: Path) -> dict[str, int]:
    return {row["k"]: int(row["value"]) for row in read_state(str(checkpoint), "add").to_pylist()}


def totals() -> dict[str, int]:
    found: Counter[str] = Counter()
    for epoch in EPOCHS:
        for row in epoch:
            found[row["k"]] += row["n"]
    return dict(found)


def test_after_a_change_was_rolled_back_upserted_rows_agree_with_state(database: Database, tmp_path: Path) -> None:
    database.run("CREATE TABLE out (k VARCHAR(20) PRIMARY KEY, n BIGINT, epoch BIGINT)")
    flow = flow_to(database.sink(mode="upsert", key="k"), EPOCHS, refuses)
    change = ChangeAt.of(2, Update("add", add_to_another), scheduler="epoch")
    run = run_local(flow, checkpoint=str(tmp_path / "c"), changes=[change], clock=ManualClock())
    assert [str(record.outcome) for record in run.history] == ["rolled back"]
    assert in_database(database) == in_state(tmp_path / "c") == totals()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_process_leaves_upserts_that_the_next_one_finishes(
    postgres: Postgres, tmp_path: Path, seed: int
) -> None:
    postgres.run("CREATE TABLE out (k VARCHAR(20) PRIMARY KEY, n BIGINT, epoch BIGINT)")
    kill_at_random(postgres, tmp_path, "upsert", range(10, 45), random.Random(seed))
    assert in_database(postgres) == in_state(tmp_path / "c") == totals()


@pytest.mark.slow
def test_a_killed_process_leaves_added_rows_that_the_next_one_finishes(postgres: Postgres, tmp_path: Path) -> None:
    """The rows of each epoch and key, counted, and the total that the last of them has come to."""
    postgres.run("CREATE TABLE out (k VARCHAR(20), n BIGINT, epoch BIGINT)")
    kill_at_random(postgres, tmp_path, "append", range(8, 18), random.Random(3))
    wanted, total = [], Counter[str]()
    for epoch, rows in enumerate(EPOCHS):
        for row in rows:
            total[row["k"]] += row["n"]
        counts = Counter(row["k"] for row in rows)
        wanted += [(epoch, key, count, total[key]) for key, count in sorted(counts.items())]
    found = postgres.run("SELECT epoch, k, COUNT(*), MAX(n) FROM out GROUP BY epoch, k ORDER BY epoch, k")
    assert found == wanted
    assert in_state(tmp_path / "c") == totals()


def kill_at_random(postgres: Postgres, folder: Path, mode: str, steps: range, rng: random.Random) -> None:
    """SIGKILL at random statements and commits; the server sees connections that break."""
    codes: list[int] = []
    while done(folder / "c") < len(EPOCHS):
        step = rng.choice(steps) if len(codes) < 10 else 0
        command = [sys.executable, "-m", "tests.simulation.upserting_job", folder, postgres.port, step, mode]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        ended = subprocess.run(
            [*map(str, command)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        codes.append(ended.returncode)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    assert codes.count(-signal.SIGKILL) >= 3
