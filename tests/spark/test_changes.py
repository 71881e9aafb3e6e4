"""Changes of a running job on Spark: each row sees one revision, failed changes are undone, nothing is lost."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from typer.testing import CliRunner

from midstream import FileSink, Flow, MemorySink, NoopSink, State, Update
from midstream.audit import decide
from midstream.checkpoint.audit_files import read_history
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import Outcome
from midstream.cli.app import app
from midstream.errors import ChangeFailed, CheckpointError, FlowError, FunctionError, MidstreamError, SchemaError
from midstream.runtime.spark.job import Job
from tests.naive import naive_scheduler

WAIT_S = 180.0
SLOW = pytest.mark.slow
ROWS = 400
Row = dict[str, Any]


def numbers(spark: Any, rows: int = ROWS) -> DataFrame:
    """Epoch e has the numbers from e * rows on, in two partitions."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    frame: DataFrame = source.load().selectExpr("value AS n", "value % 7 AS k")
    return frame


def marking(column: str, mark: int, at: int | None = None, gate: Any = None) -> Callable[[Row], Row]:
    """A function that marks rows; with a gate it waits there on one row, and is slow, so that slices are short."""
    pass_through = None if gate is None else gate.pass_through

    def mark_row(row: Row) -> Row:
        if pass_through is not None:
            time.sleep(0.0005)
            if row["n"] == at:
                pass_through()
        return {**row, column: mark}

    return mark_row


def count_in_list(key: int, row: Row, state: State) -> Row:
    seen = [*state.get([]), row["n"]]
    state.set(seen)
    return {**row, "b": 1, "seen": len(seen)}


def count_in_dict(key: int, row: Row, state: State) -> Row:
    seen = state.get({"n": 0})["n"] + 1
    state.set({"n": seen})
    return {**row, "b": 2, "seen": seen}


def to_dict(key: int, state: State) -> None:
    state.set({"n": len(state.get())})


def two_stages(spark: Any, sink: Any, first: Callable[[Row], Row] | None = None) -> Flow:
    """Three operators that are changed together, on both sides of an exchange; the second one has state."""
    flow = Flow("changing")
    stream = flow.source("numbers", numbers(spark)).map("A", first or marking("a", 1), adds="a int")
    counted = stream.key_by("by_k", "k").process(
        "B", count_in_list, returns="n bigint, k bigint, a int, b int, seen int", one_to_one=True
    )
    counted.map("C", marking("c", 1), adds="c int").sink("out", sink)
    return flow


NEW = (
    Update("A", marking("a", 2)),
    Update("B", count_in_dict, migrate=to_dict),
    Update("C", marking("c", 2)),
)


def check_rows(rows: list[Row], epochs: int) -> dict[int, int]:
    """Check that every number came once, all old or all new, counted per key without gaps; count each revision."""
    rows = committed(rows, epochs)
    assert sorted(row["n"] for row in rows) == list(range(epochs * ROWS))
    revisions: dict[int, int] = defaultdict(int)
    by_key: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        assert row["a"] == row["b"] == row["c"], f"a mixture: {row}"
        revisions[row["a"]] += 1
        by_key[row["k"]].append(row["seen"])
    for seen in by_key.values():
        assert sorted(seen) == list(range(1, len(seen) + 1))
    return dict(revisions)


def committed(rows: list[Row], epochs: int) -> list[Row]:
    """The rows of committed epochs, without those of an epoch that the stop cut off."""
    return [row for row in rows if row["n"] < epochs * ROWS]


def stop_after(job: Job, epochs: int) -> int:
    assert job.await_epoch(epochs, WAIT_S)
    job.stop()
    return job.metrics.epochs


# ── consistent ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "scheduler",
    ["fries", "replay", *(pytest.param(s, marks=SLOW) for s in ("fries-unpruned", "marker", "epoch"))],
)
def test_a_change_within_an_epoch_is_consistent(spark: Any, tmp_path: Path, gate: Any, scheduler: str) -> None:
    out = MemorySink()
    at = ROWS + ROWS // 4
    flow = two_stages(spark, out, marking("a", 1, at=at, gate=gate))
    job = flow.start(spark, checkpoint=str(tmp_path / "c"), audit="n")
    gate.arrive()
    change = job.update(*NEW, scheduler=scheduler)
    gate.open()
    assert change.wait(WAIT_S) is Outcome.APPLIED, change.error
    assert change.delay_ms is not None
    epochs = stop_after(job, 4)
    found = check_rows(out.rows, epochs)
    if scheduler == "epoch":
        assert found[1] == 2 * ROWS, "the epoch in progress is finished as it began"
    elif scheduler == "replay":
        assert found[1] == ROWS, "the epoch in progress is run again as a whole"
    else:
        assert ROWS < found[1] < 2 * ROWS, "some rows of the epoch are old, some are new"
    history = read_history(str(tmp_path / "c" / "audit"))
    verdict = decide(history, {record.revision: record.operators for record in job.history()})
    assert verdict.serialisable, str(verdict)
    assert verdict.rows == epochs * ROWS


def test_the_naive_scheduler_is_caught(spark: Any, tmp_path: Path, gate: Any) -> None:
    flow = Flow("naive")
    stream = flow.source("numbers", numbers(spark)).map("A", marking("a", 1, at=ROWS // 4, gate=gate), adds="a int")
    stream.key_by("by_k", "k").map("C", marking("c", 1), adds="c int").sink("out", out := MemorySink())
    with flow.start(spark, checkpoint=str(tmp_path / "c"), audit="n") as job:
        gate.arrive()
        with naive_scheduler():
            change = job.update(Update("A", marking("a", 2)), Update("C", marking("c", 2)))
        gate.open()
        assert change.wait(WAIT_S) is Outcome.APPLIED
    assert any(row["a"] != row["c"] for row in out.rows)
    verdict = decide(read_history(str(tmp_path / "c" / "audit")), {change.revision: ("A", "C")})
    assert not verdict.serialisable
    assert "'A'" in str(verdict)
    assert "'C'" in str(verdict)


@SLOW
def test_a_change_does_not_wait_for_the_epoch(spark: Any, tmp_path: Path) -> None:
    def slow(row: Row) -> Row:
        time.sleep(0.005)
        return {**row, "v": 1}

    flow = Flow("slow")
    flow.source("numbers", numbers(spark)).map("FM", slow, adds="v int").sink("out", NoopSink())
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(2, WAIT_S)
        epoch_ms = min(progress.duration_ms for progress in job.progress)
        assert epoch_ms >= 1000
        delays = []
        for _ in range(3):
            change = job.update(Update("FM", slow))
            delays.append(change.wait_effect(WAIT_S))
            assert change.wait(WAIT_S) is Outcome.APPLIED
        assert min(delay for delay in delays if delay is not None) < epoch_ms / 3
        assert all(change.events)


def test_a_changed_schema_travels_to_the_operator_that_expects_it(spark: Any, tmp_path: Path, gate: Any) -> None:
    flow = Flow("schema")
    before = marking("a", 1, at=ROWS // 4, gate=gate)
    stream = flow.source("numbers", numbers(spark)).map("A", before, adds="a int").key_by("by_k", "k")
    stream.map("C", lambda row: {"n": row["n"], "m": row["a"]}, returns="n bigint, m int").sink(
        "out", out := MemorySink()
    )

    def more(row: Row) -> Row:
        return {"n": row["n"], "k": row["k"], "x": 10, "y": "ten"}

    def combine(row: Row) -> Row:
        return {"n": row["n"], "m": row["x"] + len(row["y"])}

    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        gate.arrive()
        with pytest.raises(SchemaError, match="Add an Update\\('C', …\\)"):
            job.update(Update("A", more, returns="n bigint, k bigint, x int, y string"))
        change = job.update(
            Update("A", more, returns="n bigint, k bigint, x int, y string"), Update("C", combine), preflight=False
        )
        gate.open()
        assert change.wait(WAIT_S) is Outcome.APPLIED, change.error
    assert {row["m"] for row in out.rows} == {1, 13}


# ── reversible ────────────────────────────────────────────────────────────────────────────────────────────────────


def broken_on(number: int, how: str) -> Callable[[Row], Any]:
    def broken(row: Row) -> Any:
        if row["n"] != number:
            return {**row, "a": 2}
        if how == "raises":
            raise ValueError("no model for this row")
        if how == "hangs":
            time.sleep(3600)
        return {"wrong": 1}

    return broken


@pytest.mark.parametrize("how", ["raises", pytest.param("hangs", marks=SLOW), pytest.param("wrong schema", marks=SLOW)])
def test_a_change_that_fails_is_rolled_back_and_the_job_continues(
    spark: Any, tmp_path: Path, gate: Any, how: str
) -> None:
    out = MemorySink()
    flow = two_stages(spark, out, marking("a", 1, at=ROWS + 7, gate=gate))
    job = flow.start(spark, checkpoint=str(tmp_path / "c"))
    gate.arrive()
    broken = broken_on(2 * ROWS + 50, how)
    limit = "3 seconds" if how == "hangs" else None
    change = job.update(Update("A", broken), Update("B", count_in_list), time_limit=limit)
    gate.open()
    assert change.wait(WAIT_S) is Outcome.REVERTED, "the epoch within which it took effect is committed"
    error = change.error or ""
    match how:
        case "raises":
            assert "no model for this row" in error
            assert f"'n': {2 * ROWS + 50}" in error
            assert "in broken" in error
        case "wrong schema":
            assert "column 'n': the key is missing" in error
        case "hangs":
            assert "time limit of 3 s" in error
    with pytest.raises(ChangeFailed, match="is reverted"):
        change.require()
    again = job.update(*NEW)
    assert again.wait(WAIT_S) is Outcome.APPLIED, again.error
    assert again.revision > change.revision + 1, "the rollback is a revision, too"
    epochs = stop_after(job, job.metrics.epochs + 1)
    rows = committed(out.rows, epochs)
    assert sorted(row["n"] for row in rows) == list(range(epochs * ROWS)), "nothing is lost or doubled"
    assert [record.outcome for record in job.history()] == [Outcome.REVERTED, Outcome.APPLIED]


def test_a_lost_worker_is_not_blamed_on_the_change_on_trial(spark: Any, tmp_path: Path) -> None:
    flag = tmp_path / "killed"

    def unlucky(row: Row) -> Row:
        """Kills its process once, as a kernel without memory would."""
        if row["n"] % ROWS == 7 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {**row, "a": 2}

    out = MemorySink()
    with two_stages(spark, out).start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, WAIT_S)
        change = job.update(Update("A", unlucky), scheduler="epoch", preflight=False)
        assert change.wait(WAIT_S) is Outcome.APPLIED, change.error
        assert flag.exists()
        assert "the run failed, but no function did" in str(change.events)
        epochs = stop_after(job, job.metrics.epochs + 1)
    assert sorted(row["n"] for row in committed(out.rows, epochs)) == list(range(epochs * ROWS))


def test_a_time_limit_covers_functions_on_the_driver(spark: Any, tmp_path: Path) -> None:
    """A transform runs on the driver, where there is no job to cancel."""
    flow = Flow("driver")
    flow.source("rows", numbers(spark, 10)).transform("same", lambda df: df).sink("out", NoopSink())

    def hangs(df: Any) -> Any:
        while True:
            threading.Event().wait(0.05)

    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, WAIT_S)
        change = job.update(Update("same", hangs), time_limit="1 second", preflight=False)
        assert change.wait(WAIT_S) is Outcome.ROLLED_BACK
        assert "time limit of 1 s" in str(change.error)
        assert job.await_epoch(job.metrics.epochs + 1, WAIT_S), "the job continues"


def test_a_job_reverts_to_an_earlier_revision(spark: Any, tmp_path: Path) -> None:
    flow = two_stages(spark, MemorySink())

    def to_list(key: int, state: State) -> None:
        state.set([0] * state.get()["n"])

    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, WAIT_S)
        with pytest.raises(FlowError, match="there is nothing to revert"):
            job.revert(1)
        assert job.update(*NEW).require(WAIT_S).revision == 2
        with pytest.raises(FlowError, match=r"no revision 9 to go back to; the job has run 1 \(the script\), 2 \(A: "):
            job.revert(9)
        with pytest.raises(FlowError, match="pass a migration back: migrate="):
            job.revert(1)
        back = job.revert(1, migrate={"B": to_list}).require(WAIT_S)
        assert job.revision == back.revision == 3
        epochs = job.metrics.epochs
        assert job.await_epoch(epochs + 1, WAIT_S)
        sink = flow.graph.payloads["out"]
    last = max(row["n"] for row in sink.rows)
    newest = next(row for row in sink.rows if row["n"] == last)
    assert (newest["a"], newest["b"], newest["c"]) == (1, 1, 1)
    check_numbers(sink.rows)
    assert job.history()[-1].note == "back to revision 1"


def check_numbers(rows: list[Row]) -> None:
    by_key: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_key[row["k"]].append(row["seen"])
    assert all(sorted(seen) == list(range(1, len(seen) + 1)) for seen in by_key.values())


# ── refused ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_that_cannot_work_is_refused_before_anything_changes(spark: Any, tmp_path: Path) -> None:
    flow = two_stages(spark, MemorySink())
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(2, WAIT_S)
        with pytest.raises(FlowError, match="has no operator 'D'"):
            job.update(Update("D", marking("a", 2)))
        with pytest.raises(FlowError, match="is called with one argument"):
            job.update(Update("A", lambda: None))
        with pytest.raises(FunctionError, match="cannot be pickled"):
            job.update(Update("A", marking("a", 2, gate=SimpleGate())))
        with pytest.raises(FlowError, match="scheduler 'soon' is not known; allowed: fries"):
            job.update(Update("A", marking("a", 2)), scheduler="soon")
        with pytest.raises(FunctionError, match="pass migrate=") as caught:
            job.update(Update("B", count_in_dict))
        assert "list indices must be integers" in str(caught.value)
        with pytest.raises(SchemaError, match="scheduler='epoch'"):
            job.update(Update("C", marking("d", 2), returns="n bigint, d int"))
        assert job.revision == 1
        assert {record.outcome for record in job.history()} == {Outcome.REFUSED}
        assert job.update(Update("A", marking("a", 2))).require(WAIT_S).revision == 2
    with pytest.raises(MidstreamError, match="is stopped, so it cannot be changed"):
        job.update(Update("A", marking("a", 3)))


class SimpleGate:
    """Something that cannot be sent to workers."""

    @property
    def pass_through(self) -> Any:
        import threading

        return threading.Lock()


@SLOW
def test_the_columns_of_a_sink_may_change_between_epochs(spark: Any, tmp_path: Path) -> None:
    flow = Flow("columns")
    stream = flow.source("numbers", numbers(spark, rows=10)).map("A", marking("a", 1), adds="a int")
    stream.sink("out", FileSink(str(tmp_path / "out")))
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, WAIT_S)
        change = job.update(
            Update("A", lambda row: {"n": row["n"], "z": "z"}, returns="n bigint, z string"), scheduler="epoch"
        )
        assert change.wait(WAIT_S) is Outcome.APPLIED, change.error
        first = change.record.epoch
    files = str(tmp_path / "out" / "epoch-{:010d}-*")
    assert spark.read.parquet(files.format(0)).columns == ["n", "k", "a", "epoch"]
    assert spark.read.parquet(files.format(first)).columns == ["n", "z", "epoch"]


def test_explain_changes_nothing(spark: Any, tmp_path: Path) -> None:
    flow = two_stages(spark, NoopSink())
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, WAIT_S)
        alone = job.explain(Update("A", marking("a", 2)))
        assert "begins at A" in str(alone)
        assert "expected wait: about 8 ms" in str(alone)
        assert alone.to_svg().startswith("<svg")
        both = job.explain(*NEW)
        assert "travels with the rows of" in str(both)
        assert "expected wait: up to" in str(both)
        assert job.revision == 1
        assert job.history() == []


# ── through restarts ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_survives_a_restart_of_the_old_script(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, folder = MemorySink(), str(tmp_path / "c")
    with two_stages(spark, out).start(spark, checkpoint=folder) as job:
        assert job.await_epoch(1, WAIT_S)
        assert job.update(*NEW, by="ann").require(WAIT_S).revision == 2
    rows = committed(out.rows, job.metrics.epochs)
    out = MemorySink()
    with caplog.at_level(logging.WARNING, "midstream"), two_stages(spark, out).start(spark, checkpoint=folder) as job:
        assert job.await_epoch(2, WAIT_S)
        assert job.revision == 2
    assert "operator 'B' runs count_in_dict, to which ann changed it (revision 2)" in caplog.text
    assert {row["b"] for row in out.rows} == {2}
    # An epoch that we had committed, but Spark had not, is run again with the same result.
    check_numbers(list({row["n"]: row for row in (*rows, *out.rows)}.values()))

    # A damaged log is refused, except with changes="drop".
    out = MemorySink()
    (tmp_path / "c" / "changes" / "0000000001.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"entry 1 of the log of changes .* is damaged.*changes='drop'"):
        two_stages(spark, out).start(spark, checkpoint=folder)
    caplog.clear()
    with two_stages(spark, out).start(spark, checkpoint=folder, changes="drop") as job:
        assert job.revision == 3
        assert job.history()[-1].drops
        job.update(Update("B", count_in_dict), preflight=False)
    [message] = [record.getMessage() for record in caplog.records if record.name == "midstream"]
    assert "entry 1 of the log of changes" in message
    with pytest.raises(FlowError, match="changes='both' is not known; allowed: 'keep', 'drop'"):
        two_stages(spark, out).start(spark, checkpoint=folder, changes="both")


# ── reverts of a job that cannot start ────────────────────────────────────────────────────────────────────────────


class ModelFromFile:
    """A model that is loaded from a file when it is unpickled, like one from an installed package."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.mark = int(Path(path).read_text())

    def __reduce__(self) -> Any:
        return ModelFromFile, (self.path,)

    def __call__(self, row: Row) -> Row:
        return {**row, "a": self.mark}


@pytest.mark.slow
def test_a_job_that_cannot_start_can_be_reverted(spark: Any, tmp_path: Path) -> None:
    folder, model = str(tmp_path / "c"), tmp_path / "model"
    model.write_text("5")
    rows: list[Row] = []

    def life(out: MemorySink, **options: Any) -> Job:
        return two_stages(spark, out).start(spark, checkpoint=folder, **options)

    with life(out := MemorySink()) as job:
        assert job.await_epoch(1, WAIT_S)
        job.update(Update("C", marking("c", 3))).require(WAIT_S)
        job.update(Update("A", ModelFromFile(str(model)))).require(WAIT_S)
        epochs = stop_after(job, job.metrics.epochs + 1)
    rows += committed(out.rows, epochs)
    model.unlink()
    with pytest.raises(CheckpointError, match=r"can no longer be loaded.*'midstream revert CHECKPOINT 2'"):
        life(MemorySink())
    with pytest.raises(FlowError, match="revert_to=2 and changes='drop' contradict each other"):
        life(MemorySink(), revert_to=2, changes="drop")
    with pytest.raises(FlowError, match=r"no revision 7 to go back to; the job has run 1 \(the script\), 2 \(C: "):
        life(MemorySink(), revert_to=7)
    with pytest.raises(CheckpointError, match="can no longer be loaded"):
        life(MemorySink(), revert_to=3)
    assert len(ChangeLog(f"{folder}/changes").records()) == 2, "a refusal changes nothing"

    result = CliRunner().invoke(app, ["revert", folder, "2"])
    assert result.exit_code == 0, result.output
    with life(out := MemorySink()) as job:
        assert job.await_epoch(2, WAIT_S)
        assert (job.revision, job.history()[-1].note) == (4, "back to revision 2, offline")
    newest = {row["n"]: row for row in out.rows}
    assert {(row["a"], row["c"]) for row in newest.values()} == {(1, 3)}
    rows += newest.values()

    with life(out := MemorySink(), revert_to=1) as job:
        assert job.await_epoch(2, WAIT_S)
        assert (job.revision, job.history()[-1].note) == (5, "back to revision 1, at a start")
    assert {(row["a"], row["c"]) for row in out.rows} == {(1, 1)}
    rows += out.rows
    # An epoch that a stop cut off is run again with the same counts.
    check_numbers(list({row["n"]: row for row in rows}.values()))


def test_a_transform_that_spark_cannot_analyse_is_refused(spark: Any, tmp_path: Path) -> None:
    flow = Flow("transforming")
    stream = flow.source("numbers", numbers(spark)).map("A", marking("a", 1), adds="a int")
    stream.transform("T", lambda df: df.select("n", "a"), returns="n bigint, a int").sink("out", NoopSink())
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, WAIT_S)
        with pytest.raises(FlowError, match=r"transform 'T' fails on an empty DataFrame .*\n?.*missing"):
            job.update(Update("T", lambda df: df.select("n", "missing")))
        with pytest.raises(SchemaError, match="column 'a' is string, declared is int"):
            job.update(Update("T", lambda df: df.selectExpr("n", "'x' AS a")))
        with pytest.raises(FlowError, match="transform 'T' fails on an empty DataFrame"):
            job.update(Update("A", lambda row: {"n": 1}, returns="n bigint"), scheduler="epoch")
        assert job.revision == 1
        assert {record.outcome for record in job.history()} == {Outcome.REFUSED}
        job.update(Update("T", lambda df: df.selectExpr("n", "a + 1 AS a"))).require(WAIT_S)
        back = job.revert(1).require(WAIT_S)
        assert back.record.operators == ("T",)
