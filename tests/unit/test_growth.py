"""Neither the process nor the checkpoint of a job grows with repeated changes. On the local runtime.

The same on Spark, with the memory of its workers, is in ``tests/spark/test_growth.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, State, Update
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.retention import KEPT_REVISIONS
from midstream.testing import ChangeAt, Faults, run_local

UPDATES = 40
SIZE = 50_000


class Model:
    """A model of some size, different from all others. Records when it is opened and closed."""

    def __init__(self, number: int, notes: Path) -> None:
        self.number, self.notes = number, notes
        self.weights = bytes([number]) * SIZE

    def open(self) -> None:
        self.note(1)

    def close(self) -> None:
        self.note(-1)

    def note(self, change: int) -> None:
        with self.notes.open("a") as file:
            file.write(f"{self.number} {change}\n")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "model": self.number + 0 * len(self.weights)}


def prices(number: int) -> pa.Table:
    return pa.table({"k": range(SIZE // 8), "price": [number] * (SIZE // 8)})


def count(key: Any, row: dict[str, Any], state: State) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return {**row, "n": state.get()}


def blobs_by_epoch(folder: Path, sizes: list[int]) -> Any:
    def write(table: pa.Table, epoch: int) -> None:
        sizes.append(sum(path.stat().st_size for path in (folder / "blobs").rglob("*") if path.is_file()))

    return write


def changing(folder: Path, sizes: list[int], out: MemorySink) -> Flow:
    flow = Flow("growing")
    rows = flow.source("in", ListSource([[{"k": k} for k in range(4)]] * (UPDATES + 5), "k bigint"))
    scored = rows.map("score", Model(0, folder / "notes"), adds="model int")
    priced = scored.lookup("price", prices(0), on="k")
    counted = priced.key_by("key", "k").process("count", count, returns="k bigint, model int, price bigint, n bigint")
    counted.sink("out", out)
    counted.sink("sizes", blobs_by_epoch(folder / "checkpoint", sizes))
    return flow


def changes(folder: Path) -> Iterator[ChangeAt]:
    for number in range(1, UPDATES + 1):
        is_table = number % 4 == 0
        update = Update("price", prices(number)) if is_table else Update("score", Model(number, folder / "notes"))
        yield ChangeAt.of(number, update)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(None, id="quietly"),
        pytest.param(Faults(crash=0.01, speculate=0.02, give_up=0.005, crash_driver=0.005, lose=0.1), id="with faults"),
    ],
)
@pytest.mark.long
def test_neither_loaded_functions_nor_blobs_grow_with_updates(faults: Faults | None, tmp_path: Path):
    out, sizes = MemorySink(), list[int]()
    flow = changing(tmp_path, sizes, out)
    run = run_local(flow, checkpoint=str(tmp_path / "checkpoint"), changes=list(changes(tmp_path)), faults=faults)

    # The result is the same as if nothing were ever dropped.
    assert [row["n"] for row in out.rows if row["k"] == 0] == list(range(1, UPDATES + 6))
    applied = [record for record in run.history if record.outcome is Outcome.APPLIED]
    assert len(applied) == UPDATES if faults is None else len(applied) > UPDATES / 2
    newest = {operator: record.number for record in applied for operator in record.operators}
    assert {(row["model"], row["price"]) for row in out.rows[-4:]} == {(newest["score"], newest["price"])}

    # At any time, only the current model, the previous one and the next one are loaded.
    loaded, most = 0, 0
    for line in (tmp_path / "notes").read_text().splitlines():
        loaded += int(line.split()[1])
        most = max(most, loaded)
    assert loaded == 0, "every opened model is closed"
    assert most <= 3

    # Only the functions of the newest changes are kept, for reverts.
    first, second = sizes[KEPT_REVISIONS + 2 : len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert max(second) <= max(first) + SIZE
    assert max(second) < (KEPT_REVISIONS + 4) * SIZE * 2.2
    assert run.metrics.sweep.failed == 0
    assert run.metrics.sweep.removed > 0
