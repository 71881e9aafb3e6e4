"""A savepoint of a running job on Spark; a fork that goes on from it beside the job, and the job rewound to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from midstream import FileSink, Flow, agg, committed_files, fork, rewind
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError
from tests.spark.conftest import PATIENCE_S

Row = dict[str, Any]
FILES = 6


def same(row: Row) -> Row:
    return row


def doubled(row: Row) -> Row:
    return {**row, "n": 2 * row["n"]}


def put(folder: Path, number: int) -> None:
    """A file of the source, which is one epoch; Spark takes the oldest first."""
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{number}"
    hidden.write_text("".join(json.dumps({"k": "abc"[i % 3], "n": 10 * number + i}) + "\n" for i in range(6)))
    os.utime(hidden, 2 * (1_700_000_000 + number,))
    hidden.rename(folder / f"{number}.json")


def flow_of(spark: Any, source: Path, out: Path, function: Callable[[Row], Row]) -> Flow:
    flow = Flow("saved")
    files = spark.readStream.schema("k string, n bigint").option("maxFilesPerTrigger", 1).json(str(source))
    keyed = flow.source("files", files).map("work", function).key_by("by", "k")
    keyed.aggregate("sum", n=agg.sum("n")).sink("out", FileSink(out))
    return flow


def sums(first: int, last: int, factor: int = 1, start: dict[str, int] | None = None) -> set[tuple[int, str, int]]:
    """The answers of these epochs; ``start``: the sums before them."""
    total, found = dict(start or {}), set()
    for epoch in range(first, last):
        for i in range(6):
            total["abc"[i % 3]] = total.get("abc"[i % 3], 0) + factor * (10 * epoch + i)
        found |= {(epoch, k, n) for k, n in total.items()}
    return found


def answers(out: Path) -> set[tuple[int, str, int]]:
    rows = ds.dataset(committed_files(str(out))).to_table().to_pylist()
    found = {(row["epoch"], row["k"], row["n"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_job_is_forked_while_it_runs_and_rewound_when_it_has_stopped(spark: Any, tmp_path: Path) -> None:
    source, out, other = tmp_path / "in", tmp_path / "out", tmp_path / "other"
    first, new = str(tmp_path / "first"), str(tmp_path / "new")
    for number in range(3):
        put(source, number)
    with flow_of(spark, source, out, same).start(spark, checkpoint=first) as job:
        assert job.await_epoch(3, PATIENCE_S)
        saved = job.savepoint("tuned", note="before the new version")
        assert (saved.epoch, [each.name for each in job.savepoints()]) == (2, ["tuned"])
        with pytest.raises(CheckpointError, match="Stop it before it is rewound"):
            rewind(first, "tuned")
        for number in range(3, FILES):
            put(source, number)
        assert job.await_epoch(FILES, PATIENCE_S)

        # The fork runs beside the first job, in the same application.
        fork(first, "tuned", new)
        with pytest.raises(CheckpointError, match="not of this job"):
            flow_of(spark, source, out, doubled).start(spark, checkpoint=new)
        with flow_of(spark, source, other, doubled).start(spark, checkpoint=new) as second:
            assert second.await_epoch(FILES - 3, PATIENCE_S)
            assert second.id != job.id
            put(source, FILES)
            assert job.await_epoch(FILES + 1, PATIENCE_S), "the first job goes on"
    before = {k: n for epoch, k, n in sums(0, 3) if epoch == 2}
    assert answers(out) == sums(0, FILES + 1)
    assert sums(3, FILES, 2, before) <= answers(other) <= sums(3, FILES + 1, 2, before)

    # The first job goes back, and runs the same files with another function.
    assert rewind(first, "tuned").epoch == 2
    assert answers(out) == sums(0, 3)
    with flow_of(spark, source, out, doubled).start(spark, checkpoint=first, trigger="available-now") as job:
        assert job.await_termination(PATIENCE_S)
        assert [each.epoch for each in job.progress] == list(range(3, 3 + len(job.progress)))
        state = {row["k"]: row["n"] for row in job.state("sum").collect()}
    answered = answers(out)
    assert {each for each in answered if each[0] < 3} == sums(0, 3), "what came before the savepoint stays"
    wanted = {(k, n) for epoch, k, n in sums(3, FILES + 1, 2, before) if epoch == FILES}
    last = max(epoch for epoch, _, _ in answered)
    assert {(k, n) for epoch, k, n in answered if epoch == last} == wanted
    assert set(state.items()) == wanted, "copies of state from before do not count"
    assert Checkpoint.of_any_flow(first).identity.timeline == 1
