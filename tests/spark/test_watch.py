"""Observations of a job on Spark: one for each epoch, however fast they come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from midstream import Flow, NoopSink, agg


def test_a_job_is_watched_from_its_first_epoch_to_its_end(spark: Any, tmp_path: Path) -> None:
    for number in range(4):
        file = tmp_path / f"{number}.json"
        file.write_text("".join(json.dumps({"k": "hot" if i % 4 else "cold", "n": i}) + "\n" for i in range(8)))
        os.utime(file, 2 * (1_700_000_000 + number,))
    flow = Flow("watched")
    files = spark.readStream.schema("k string, n bigint").option("maxFilesPerTrigger", 1).json(str(tmp_path / "*.json"))
    keyed = flow.source("files", files).key_by("by", "k")
    keyed.aggregate("sum", n=agg.sum("n")).sink("out", NoopSink())
    with flow.start(spark, checkpoint=str(tmp_path / "c"), trigger="available-now") as job:
        watch = job.watch()
        seen = list(watch)
    assert [each.epoch for each in seen] == [0, 1, 2, 3]
    assert watch.dropped == 0
    assert [each.totals.rows_in for each in seen] == [8, 16, 24, 32]
    last = job.observation
    assert last is not None
    assert last.epoch == 3
    found = {each.operator: each for each in last.operators}
    assert found["by"].heavy_keys.heaviest == ("'hot'", 0.75)
    assert found["sum"].state_bytes > 0
    assert 2 <= found["sum"].keys_at_most <= 8
    assert last.worker_memory_bytes > 20 << 20
    assert 0 < last.utilisation <= 1
    # Spark was asked in the middle of the run; files have nothing to say.
    assert [source.backlog for each in seen for source in each.sources] == [{}] * 4
    assert list(job.watch()) == []
