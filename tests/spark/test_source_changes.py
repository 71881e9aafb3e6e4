"""Sources of a running job on Spark: added, removed, found again; what cannot be read is handed back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamReader

from midstream import Flow, GeneratorSource, Insert, MemorySink, Remove, State
from midstream.checkpoint.change_records import Outcome
from midstream.errors import CheckpointError
from midstream.runtime.spark.job import Job

WAIT_S = 120.0
COUNTED = "s string, n bigint, total bigint"
Row = dict[str, Any]


class Folder:
    """A folder that is read as a stream: each file has three numbers and the name of the source."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, 0
        path.mkdir()

    def put(self, files: int = 1) -> None:
        for _ in range(files):
            rows = [{"s": self.path.name, "n": 3 * self.files + i} for i in range(3)]
            (self.path.parent / "new").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            (self.path.parent / "new").rename(self.path / f"{self.files:03d}.json")
            self.files += 1

    def read(self, spark: Any) -> Any:
        return spark.readStream.schema("s string, n bigint").option("maxFilesPerTrigger", 1).json(str(self.path))

    @property
    def rows(self) -> int:
        return 3 * self.files


def count(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {**row, "total": state.get()}


def united(old: Any, new: Any) -> Any:
    return old.union("all", new)


def sources_flow(spark: Any, out: MemorySink, *folders: Folder) -> Flow:
    """The folders, united, and counted by source."""
    flow = Flow("sources")
    first, *others = [flow.source(folder.path.name, folder.read(spark)) for folder in folders]
    rows = first.union("all", *others) if others else first
    rows.key_by("by s", "s").process("count", count, one_to_one=True, returns=COUNTED).sink("out", out)
    return flow


def rows_of(out: MemorySink, folder: Folder) -> list[Row]:
    return [row for row in out.rows if row["s"] == folder.path.name]


def wait_for(job: Job, out: MemorySink, folder: Folder) -> None:
    """Wait until all that a folder has has left the job: each number once, counted without a gap. Files come in any
    order."""
    while len(rows_of(out, folder)) < folder.rows:
        assert job.await_epoch(job.metrics.epochs + 1, WAIT_S), "no further epoch"
    found = rows_of(out, folder)
    assert sorted(row["n"] for row in found) == list(range(folder.rows))
    assert sorted(row["total"] for row in found) == list(range(1, folder.rows + 1))


class Broken(DataSource):
    """A source that cannot say how far it reaches."""

    @classmethod
    def name(cls) -> str:
        return "broken"

    def schema(self) -> str:
        return "s string, n bigint"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return BrokenReader()


class BrokenReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        raise OSError("no route to the source")

    def read(self, partition: Any) -> Any:
        raise AssertionError("nothing was planned")


def test_sources_come_and_go_and_come_back_without_losing_or_doubling_a_row(spark: Any, tmp_path: Path) -> None:
    a, b = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    a.put(2)
    out, checkpoint = MemorySink(), str(tmp_path / "checkpoint")
    add = Insert(united, between=("a", "by s"), source=lambda flow: flow.source("b", b.read(spark)))
    with sources_flow(spark, out, a).start(spark, checkpoint=checkpoint, partitions=2) as job:
        wait_for(job, out, a)
        # Nothing is to be read, so no epoch runs: the hand-over must not wait for one.
        change = job.update(add)
        a.put()
        b.put(2)
        change.require(WAIT_S)
        wait_for(job, out, a)
        wait_for(job, out, b)
        assert any("the sources are handed over, after" in event.what for event in change.events)
        assert "hands the sources over" in change.record.plan

        removal = job.update(Remove("b"))
        a.put()  # an epoch, in which the trial can end
        removal.require(WAIT_S)
        assert list(job.graph.sources) == ["a"]
        b.put()  # nobody reads it
        a.put(2)
        wait_for(job, out, a)
        assert len(rows_of(out, b)) == 6

        back = job.update(Insert(source=lambda flow: flow.source("b", b.read(spark)), before="all"))
        a.put()
        back.require(WAIT_S)
        wait_for(job, out, a)
        wait_for(job, out, b)
        epochs = [record.outcome for record in job.history()]
    assert epochs == [Outcome.APPLIED] * 3
    # A restart goes on with both; the script of the first start lacks one, which cannot be stored.
    with pytest.raises(CheckpointError, match=r"'b' was inserted while the job ran.*Put it into the script"):
        sources_flow(spark, out, a).start(spark, checkpoint=checkpoint)
    stranger = sources_flow(spark, out, a, b, Folder(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"reads the sources a, b; the flow now has a, b, other"):
        stranger.start(spark, checkpoint=checkpoint)
    a.put()
    b.put()
    with sources_flow(spark, out, a, b).start(spark, checkpoint=checkpoint) as job:
        wait_for(job, out, a)
        wait_for(job, out, b)


def test_a_change_to_a_source_that_cannot_be_read_is_rolled_back(spark: Any, tmp_path: Path) -> None:
    a = Folder(tmp_path / "a")
    a.put()
    spark.dataSource.register(Broken)
    out = MemorySink()
    flow = sources_flow(spark, out, a)
    with flow.start(spark, checkpoint=str(tmp_path / "checkpoint"), partitions=2) as job:
        wait_for(job, out, a)
        broken = spark.readStream.format("broken").load()
        change = job.update(Insert(united, between=("a", "by s"), source=lambda flow: flow.source("broken", broken)))
        assert change.wait(WAIT_S) is Outcome.ROLLED_BACK
        assert "its sources could not be read" in str(change.error)
        a.put(2)
        wait_for(job, out, a)
        assert list(job.graph.sources) == ["a"]


def test_sources_that_cannot_be_handed_over_are_refused_and_nothing_changes(spark: Any, tmp_path: Path) -> None:
    a, b, c = (Folder(tmp_path / name) for name in "abc")
    a.put()
    out = MemorySink()
    flow = Flow("two in one")
    both = a.read(spark).unionAll(b.read(spark))
    rows = flow.source("both", both)
    rows.key_by("by s", "s").process("count", count, one_to_one=True, returns=COUNTED).sink("out", out)
    with flow.start(spark, checkpoint=str(tmp_path / "one"), partitions=2) as job:
        wait_for(job, out, a)
        with pytest.raises(CheckpointError, match="Spark's log counts 2 streams"):
            job.update(Insert(united, between=("both", "by s"), source=lambda flow: flow.source("c", c.read(spark))))
        a.put()
        wait_for(job, out, a)
        assert job.revision == 1
        assert [record.outcome for record in job.history()] == [Outcome.REFUSED]

    flow, once = Flow("deduplicated"), MemorySink()
    flow.source("a", a.read(spark).dropDuplicates(["n"])).sink("out", once)
    with flow.start(spark, checkpoint=str(tmp_path / "two"), partitions=2) as job:
        assert job.await_epoch(1, WAIT_S)
        with pytest.raises(CheckpointError, match="keeps state in Spark"):
            job.update(Insert(united, between=("a", "out"), source=lambda flow: flow.source("c", c.read(spark))))


@pytest.mark.slow
def test_a_script_with_other_sources_is_deployed(spark: Any, tmp_path: Path) -> None:
    def generator(first: int) -> GeneratorSource:
        def make(index: Any, rng: Any) -> dict[str, Any]:
            return {"n": index + first}

        return GeneratorSource(make, "n bigint", rate=200, partitions=1)

    def script(sink: MemorySink, *names: str) -> Flow:
        flow = Flow("deployed")
        first, *others = [flow.source(name, generator(1_000_000 * int(name[1:]))) for name in names]
        first.union("all", *others).drop("no time", "event_time").sink("out", sink)
        return flow

    out, checkpoint = MemorySink(), str(tmp_path / "checkpoint")
    with script(out, "s1", "s2").start(spark, checkpoint=checkpoint, partitions=2) as job:
        assert job.await_epoch(2, WAIT_S)
        explained = str(job.explain_deployment(script(out, "s1", "s3")))
        assert "adds source 's3'" in explained
        assert "removes source 's2'; how far it was read is kept under its name" in explained
        assert "hands the sources over" in explained
        change = job.deploy(script(out, "s1", "s3"))
        assert change is not None
        change.require(WAIT_S)
        assert job.await_epoch(job.metrics.epochs + 2, WAIT_S)
        assert job.deploy(script(out, "s1", "s3")) is None
    for name in (1, 2, 3):
        found = sorted(row["n"] for row in out.rows if row["n"] // 1_000_000 == name)
        assert found == list(range(1_000_000 * name, 1_000_000 * name + len(found)))
        assert found
    # The old script runs what was deployed: a generator can be stored.
    with script(out, "s1", "s2").start(spark, checkpoint=checkpoint) as job:
        assert list(job.graph.sources) == ["s1", "s3"]
        assert job.await_epoch(2, WAIT_S)
    found = sorted(row["n"] for row in out.rows if row["n"] // 1_000_000 == 3)
    assert found == list(range(3_000_000, 3_000_000 + len(found)))
