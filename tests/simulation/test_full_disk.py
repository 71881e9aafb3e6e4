"""Disks that really fill, with real files on the local runtime. On Spark: ``tests/spark/test_full_disk.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import FileSink, Flow, ListSource, MemorySink, committed_files
from midstream.errors import MidstreamError
from midstream.testing import run_local
from tests.disks import resize, rows_of_epochs, seen, small_disk

pytestmark = pytest.mark.long

EPOCHS = rows_of_epochs(small=100, large=5_000)


def count(key: int, row: dict[str, Any], state: Any) -> dict[str, Any]:
    texts = [*state.get([]), row["text"]]
    state.set(texts)
    return {"k": key, "texts": len(texts)}


def files_flow(sink: FileSink, start: int = 0) -> Flow:
    flow = Flow("files")
    rows = flow.source("in", ListSource(EPOCHS[start:], "n bigint, k bigint, text string", partitions=2))
    rows.key_by("by", "k").sink("out", sink)
    return flow


@pytest.mark.parametrize("options", [{}, {"format": "json"}, {"format": "csv", "header": True}, {"partition_by": "k"}])
def test_a_disk_that_fills_while_tasks_write_shows_nothing_of_the_epoch_and_the_next_start_goes_on(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoint, format = str(tmp_path / "c"), options.get("format", "parquet")
    with small_disk(tmp_path / "small", megabytes=2) as folder:
        sink = FileSink(folder / "out", **options)
        with pytest.raises(MidstreamError, match=r"'out'.*epoch 2 cannot be .*No space left on device.*Nothing of"):
            run_local(files_flow(sink), checkpoint=checkpoint)
        before = [(epoch, row["n"]) for epoch in range(2) for row in EPOCHS[epoch]]
        assert seen(folder / "out", format) == sorted(before)
        in_place = {str(path) for path in (folder / "out").rglob("epoch-*")}
        assert set(committed_files(sink.path)) == in_place

        resize(folder, megabytes=50)
        run_local(files_flow(sink, start=2), checkpoint=checkpoint)
        assert seen(folder / "out", format) == [(epoch, row["n"]) for epoch in range(4) for row in EPOCHS[epoch]]
        assert list((folder / "out" / "_staged").iterdir()) == []


def test_a_disk_of_the_checkpoint_that_fills_loses_no_state_and_the_next_start_goes_on(tmp_path: Path) -> None:
    def counts(start: int, sink: MemorySink) -> Flow:
        flow = Flow("counts")
        rows = flow.source("in", ListSource(EPOCHS[start:], "n bigint, k bigint, text string", partitions=2))
        rows.key_by("by", "k").process("count", count, returns="k bigint, texts bigint").sink("out", sink)
        return flow

    with small_disk(tmp_path / "small", megabytes=3) as folder:
        checkpoint = str(folder / "c")
        with pytest.raises(MidstreamError, match="No space left on device"):
            run_local(counts(0, first := MemorySink()), checkpoint=checkpoint)
        assert list(first.tables) == [0, 1]

        resize(folder, megabytes=200)
        run_local(counts(2, rest := MemorySink()), checkpoint=checkpoint)
        reached = {key: max(row["texts"] for row in rest.rows if row["k"] == key) for key in range(5)}
        assert reached == {key: sum(row["k"] == key for rows in EPOCHS for row in rows) for key in range(5)}
