"""A disk that really fills while tasks on Spark write to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import FileSink, Flow, ListSource, committed_files
from midstream.errors import JobFailed
from midstream.testing import run_spark
from tests.disks import resize, rows_of_epochs, seen, small_disk

EPOCHS = rows_of_epochs(small=100, large=5_000)


def flow_to(sink: FileSink) -> Flow:
    flow = Flow("files")
    rows = flow.source("in", ListSource(EPOCHS, "n bigint, k bigint, text string", partitions=2))
    rows.key_by("by", "k").sink("out", sink)
    return flow


def test_a_disk_that_fills_while_tasks_write_shows_nothing_of_the_epoch_and_the_next_start_goes_on(
    spark: Any, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "c")
    with small_disk(tmp_path / "small", megabytes=2) as folder:
        sink = FileSink(folder / "out")
        with pytest.raises(JobFailed, match=r"'out'.*epoch 2 cannot be .*No space left on device.*Nothing of"):
            run_spark(flow_to(sink), spark, checkpoint=checkpoint)
        before = sorted((epoch, row["n"]) for epoch in range(2) for row in EPOCHS[epoch])
        assert sorted((row.epoch, row.n) for row in spark.read.parquet(sink.path).collect()) == before
        visible = spark.read.parquet(*committed_files(sink.path))
        assert sorted((row.epoch, row.n) for row in visible.collect()) == before

        resize(folder, megabytes=50)
        job = run_spark(flow_to(sink), spark, checkpoint=checkpoint)
        assert [progress.epoch for progress in job.progress] == [2, 3]
        assert seen(folder / "out") == [(epoch, row["n"]) for epoch in range(4) for row in EPOCHS[epoch]]
        assert list((folder / "out" / "_staged").iterdir()) == []
