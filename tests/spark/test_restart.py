"""Restarts from a checkpoint: after a stop, after a crash of the driver; and refusals of other checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream import FileSink, Flow, ListSource, MemorySink, NoopSink, committed_files
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError
from midstream.storage.documents import FORMAT
from midstream.storage.table_files import epochs_of
from midstream.testing import run_spark
from tests.spark.conftest import PATIENCE_S, Passage

Row = dict[str, Any]


def same(row: Row) -> Row:
    return row


def negated(row: Row) -> Row:
    return {**row, "n": -row["n"]}


def write_numbers(folder: Path, name: str, numbers: range) -> None:
    """Write a file for a file source elsewhere and move it into place; Spark reads the oldest first."""
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{name}"
    hidden.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
    os.utime(hidden, 2 * (1_700_000_000 + numbers.start,))
    hidden.rename(folder / name)


def file_flow(spark: Any, folder: Path, function: Callable[[Row], Row], *sinks: Any) -> Flow:
    """Reads one file in each epoch, so that epochs are known in advance."""
    flow = Flow("files")
    files = spark.readStream.schema("n bigint").option("maxFilesPerTrigger", 1)
    stream = flow.source("files", files.json(str(folder))).map("work", function)
    keyed = stream.key_by("by_n", "n").map("behind", same)
    for i, sink in enumerate(sinks):
        (keyed if i % 2 else stream).sink(f"out{i}", sink)
    return flow


# ── after a stop ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stopped_job_continues_with_changed_functions_and_operators(spark: Any, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "in", str(tmp_path / "c")
    write_numbers(source, "a.json", range(10))
    first = run_spark(file_flow(spark, source, same, out := MemorySink(), NoopSink()), spark, checkpoint=checkpoint)

    write_numbers(source, "b.json", range(10, 20))
    flow = Flow("files")
    files = flow.source("files", spark.readStream.schema("n bigint").json(str(source)))
    odd = files.filter("odd", lambda row: row["n"] % 2)
    odd.map("work", lambda row: {"n": -row["n"]}).sink("other", more := MemorySink())
    second = run_spark(flow, spark, checkpoint=checkpoint)

    assert second.id == first.id
    assert [p.epoch for p in first.progress] == [0]
    assert [p.epoch for p in second.progress] == [1]
    assert sorted(row["n"] for row in out.rows) == list(range(10))
    assert sorted(row["n"] for row in more.rows) == [-19, -17, -15, -13, -11]

    nothing_new = run_spark(flow, spark, checkpoint=checkpoint)
    assert nothing_new.metrics.epochs == 0


def test_a_backlog_after_a_stop_is_worked_off_in_epochs_as_small_as_the_source_allows(
    spark: Any, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "in", str(tmp_path / "c")
    write_numbers(source, "0.json", range(10))
    run_spark(file_flow(spark, source, same, out := MemorySink(), NoopSink()), spark, checkpoint=checkpoint)

    for i in range(1, 6):  # what comes in while the job is down
        write_numbers(source, f"{i}.json", range(10 * i, 10 * i + 10))
    later = run_spark(file_flow(spark, source, same, more := MemorySink(), NoopSink()), spark, checkpoint=checkpoint)

    assert [(p.epoch, p.rows_in) for p in later.progress] == [(epoch, 10) for epoch in range(1, 6)]
    assert sorted(row["n"] for row in out.rows + more.rows) == list(range(60))


def test_a_checkpoint_may_have_any_name_and_be_relative(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and the JVM have other working directories than this process."""
    monkeypatch.chdir(tmp_path)
    flow = Flow("named")
    rows = flow.source("rows", ListSource([[{"n": 1}], [{"n": 2}]], "n bigint"))
    rows.key_by("by_n", "n").map("same", same).sink("out", FileSink("o u t/größe 100%"))
    run_spark(flow, spark, checkpoint="c h/é c%20k")
    assert (tmp_path / "c h" / "é c%20k" / "midstream.json").exists()
    assert (tmp_path / "c h" / "é c%20k" / "spark" / "commits" / "1").exists()
    files = committed_files("o u t/größe 100%")
    assert {epochs_of(name) for name in files} == {(0, 0), (1, 1)}
    assert run_spark(flow, spark, checkpoint="c h/é c%20k").metrics.epochs == 0


# ── after a crash of the driver ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("in a function", marks=pytest.mark.slow),
        pytest.param("after the sinks", marks=pytest.mark.slow),
        "after the manifest",
    ],
)
@pytest.mark.timeout(4 * PATIENCE_S)  # a JVM has to start first
def test_after_a_crash_of_the_driver_nothing_is_missing_or_doubled(
    spark: Any, tmp_path: Path, gate: Any, driver: Any, moment: str
) -> None:
    for i in range(3):
        write_numbers(tmp_path / "in", f"{i}.json", range(10 * i, 10 * i + 10))
    victim = driver(crash, tmp_path, gate.port, moment)
    gate.arrive()
    victim.kill()
    sinks = [FileSink(tmp_path / f"out{i}") for i in range(2)]
    before = [path.name for path in sorted((tmp_path / "c" / "epochs").iterdir())]
    assert len(before) == (2 if moment == "after the manifest" else 1)

    job = run_spark(file_flow(spark, tmp_path / "in", negated, *sinks), spark, checkpoint=str(tmp_path / "c"))

    is_final = moment == "after the manifest"
    assert [p.epoch for p in job.progress] == ([2] if is_final else [1, 2]), "what was not committed runs again"
    for sink in sinks:
        found = sorted((row.epoch, row.n) for row in spark.read.parquet(sink.path).collect())
        by_old_script = 20 if is_final else 10
        assert found == sorted((n // 10, n if n < by_old_script else -n) for n in range(30))


def crash(folder: str, port: str, moment: str) -> None:
    """Runs in another process, and waits in its second epoch to be killed."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    wait, root, commit = Passage(int(port)), Path(folder), Checkpoint.commit

    def wait_in_function(row: Row) -> Row:
        if row["n"] == 13:
            wait()
        return row

    def commit_and_wait(checkpoint: Checkpoint, manifest: Any) -> None:
        commit(checkpoint, manifest)
        if manifest.epoch == 1:
            wait()

    def wait_in_sink(df: Any, epoch: int) -> None:
        if epoch == 1:
            wait()

    function = same
    sinks: list[Any] = [FileSink(root / "out0"), FileSink(root / "out1")]
    match moment:
        case "in a function":
            function = wait_in_function
        case "after the sinks":
            sinks.append(wait_in_sink)
        case "after the manifest":
            Checkpoint.commit = commit_and_wait  # type: ignore[method-assign, assignment]
    file_flow(spark, root / "in", function, *sinks).start(spark, checkpoint=f"{folder}/c").await_termination()


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────


def small_flow(name: str = "small", sources: tuple[str, ...] = ("rows",)) -> Flow:
    flow = Flow(name)
    for source in sources:
        flow.source(source, ListSource([[{"n": 1}]], "n bigint")).sink(f"{source}_out", NoopSink())
    return flow


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(spark: Any, tmp_path: Path) -> Path:
    """The checkpoint of `small_flow()`, after one epoch."""
    run_spark(small_flow(), spark, checkpoint=str(tmp_path / "c"))
    return tmp_path / "c"


def test_another_flows_checkpoint_is_refused_and_unchanged(spark: Any, checkpoint: Path) -> None:
    before = contents(checkpoint)

    def refused(flow: Flow, says: str) -> None:
        with pytest.raises(CheckpointError, match=says):
            flow.start(spark, checkpoint=str(checkpoint))
        assert contents(checkpoint) == before

    refused(small_flow("other"), "belongs to the flow 'small', not to 'other'")
    refused(small_flow(sources=("rows", "more")), "reads the sources rows; the flow now has more, rows")
    refused(small_flow(sources=("lines",)), "reads the sources rows; the flow now has lines")

    identity = checkpoint / "midstream.json"
    whole = before["midstream.json"]
    for damaged, says in [
        (b"", "is damaged"),
        (whole[:20], "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "is damaged"),
        (whole.replace(b'"format":%d' % FORMAT, b'"format":99'), "has format 99"),
    ]:
        identity.write_bytes(damaged)
        before["midstream.json"] = damaged
        refused(small_flow(), says)
    identity.write_bytes(whole)
    assert run_spark(small_flow(), spark, checkpoint=str(checkpoint)).metrics.epochs == 0


def test_a_folder_with_other_files_is_refused_and_unchanged(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("Once")
    with pytest.raises(CheckpointError, match=r"holds other things \(chapter1\.txt\)"):
        small_flow().start(spark, checkpoint=str(folder))
    assert contents(folder) == {"chapter1.txt": b"Once"}


@pytest.mark.parametrize("location", ["file", "file/below", "nowhere://bucket/x"])
def test_a_place_that_cannot_hold_a_checkpoint_is_refused(spark: Any, tmp_path: Path, location: str) -> None:
    (tmp_path / "file").write_text("I am a file")
    with pytest.raises(CheckpointError, match=location):
        small_flow().start(spark, checkpoint=location if "://" in location else str(tmp_path / location))
    assert contents(tmp_path) == {"file": b"I am a file"}


# ── after a loss of power ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("torn", ["commits", pytest.param("offsets and commits", marks=pytest.mark.slow)])
def test_a_job_continues_after_sparks_log_lost_its_end_in_a_power_loss(spark: Any, tmp_path: Path, torn: str):
    """Spark does not sync its log; midstream syncs what manifests refer to, so only the newest files can be torn."""
    out, location = FileSink(tmp_path / "out"), tmp_path / "c"
    for i in range(2):
        write_numbers(tmp_path / "in", f"{i}.json", range(10 * i, 10 * i + 10))
    run_spark(file_flow(spark, tmp_path / "in", same, out, NoopSink()), spark, checkpoint=str(location))
    (location / "spark" / "commits" / "1").write_bytes(b"")
    if torn == "offsets and commits":
        (location / "spark" / "offsets" / "1").write_bytes(b'v1\n{"batchWatermar')
        (location / "epochs" / "0000000001").unlink()  # it was not written before the offsets were on disk
    write_numbers(tmp_path / "in", "2.json", range(20, 30))

    run_spark(file_flow(spark, tmp_path / "in", same, out, NoopSink()), spark, checkpoint=str(location))

    assert sorted(row.n for row in spark.read.parquet(out.path).collect()) == list(range(30))
    assert (location / "spark" / "commits" / "1.torn").exists()
