"""A job that reads and writes Kafka while its processes are killed: ``python -m tests.spark.kafka_job FOLDER MASTER``.

It numbers the records of each key, is changed again and again, and rescaled; version v of two operators puts v on rows.
What it reads is in the file ``servers`` of the folder: the brokers, and how many records there are. Started again in
the same folder it goes on; it ends when all records are committed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from midstream import FileSink, Flow, KafkaSink, State, Update
from midstream.checkpoint.change_records import Outcome
from tests.brokers import connector_conf, stream_of
from tests.chaos.job import session

Row = dict[str, Any]
PER_EPOCH = 400


class Parse:
    """Takes a record apart; puts its version on the row."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, row: Row) -> Row:
        """Parse a record."""
        return {"k": row["key"].decode(), "n": json.loads(row["value"])["n"], "a": self.version}


class Count:
    """Numbers the rows of a key."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, key: str, row: Row, state: State) -> Row:
        """Count a row."""
        state.set(state.get(0) + 1)
        return {**row, "b": self.version, "nth": state.get()}


def build(records: Any, servers: str, out: Path, version: int = 1) -> Flow:
    """The flow, with its functions in some version."""
    flow = Flow("kafka")
    rows = flow.source("records", records, event_time="timestamp")
    parsed = rows.map("parse", Parse(version), returns="k string, n bigint, a int")
    counted = parsed.key_by("by k", "k").process(
        "count", Count(version), returns="k string, n bigint, a int, b int, nth bigint", one_to_one=True
    )
    counted.sink("out", KafkaSink(servers, "out", key="k"))
    counted.sink("files", FileSink(out))
    return flow


def main(place: str, master: str) -> None:
    """Run and change the job until all records are committed."""
    folder = Path(place)
    servers, total = (folder / "servers").read_text().split()
    spark = session(master, connector_conf())
    records = stream_of(spark, servers, "in", maxOffsetsPerTrigger=PER_EPOCH)
    job = build(records, servers, folder / "files").start(spark, checkpoint=str(folder / "checkpoint"))
    changes = [record for record in job.history() if record.updates]
    while not _is_read(job, int(total)):
        version = 2 + sum(each.outcome is Outcome.APPLIED for each in changes)
        change = job.update(Update("parse", Parse(version)), Update("count", Count(version)))
        while change.outcome is Outcome.PENDING and not _is_read(job, int(total)):
            change.wait(0.2)
        if version >= 3 and not job.migrations and any(len(stage.partitions) != 3 for stage in job.assignment()):
            job.rescale(3)
        changes = [record for record in job.history() if record.updates]
    job.stop()
    spark.stop()


def _is_read(job: Any, total: int) -> bool:
    """Whether all records are committed."""
    job.await_termination(0.1)  # raises if it has failed
    newest = job.progress[-1].offsets["records"] if job.progress else "{}"
    return bool(sum(json.loads(newest).get("in", {}).values()) == total)


if __name__ == "__main__":
    main(*sys.argv[1:])
