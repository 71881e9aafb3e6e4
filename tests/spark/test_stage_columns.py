"""What is made once for a job and used in every epoch: how often Spark is asked, and that results stay the same."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]
from py4j.java_gateway import GatewayConnection  # type: ignore[import-untyped]
from pyspark.util import PythonEvalType

from midstream import FileSink, Flow, ListSource, MemorySink, NoopSink
from midstream.runtime.spark import heartbeat
from midstream.runtime.spark.stage_columns import PreparedColumns, PublicColumns, columns_for
from midstream.runtime.spark.worker import RUN_PROPERTY, decode_frames
from midstream.testing import run_local, run_spark

EPOCHS = 5
CALLS_OF_AN_EPOCH = 21
"""PySpark 6 before it calls us; the run's property and tag 4; three stages 3, two exchanges 2 × 3; the rows' way back
8. Every further one costs 0.2 ms and more."""
FREED = "m\n"
"""How a command begins that says which objects Python no longer uses. They come when Python collects garbage."""


@contextmanager
def commands_sent() -> Iterator[list[str]]:
    """What Python has the JVM do meanwhile."""
    classes = (GatewayConnection, ClientServerConnection)
    originals = [each.send_command for each in classes]
    sent: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def send(connection: Any, command: str, *given: Any, **more: Any) -> Any:
            if not command.startswith(FREED):
                sent.append(command)
            return original(connection, command, *given, **more)

        return send

    for each, original in zip(classes, originals, strict=True):
        each.send_command = noting(original)
    try:
        yield sent
    finally:
        for each, original in zip(classes, originals, strict=True):
            each.send_command = original


def branch(batch: pa.RecordBatch) -> pa.Array:
    return pa.array([("files", "memory", "noop")[n % 3] for n in batch["a.b"].to_pylist()])


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def flow_of(out: Path, memory: MemorySink) -> Flow:
    """Two exchanges and three sinks of midstream's own; the names of columns have dots and backticks."""
    epochs = [[{"a.b": 10 * epoch + n, "c`d.e": n % 4} for n in range(10)] for epoch in range(EPOCHS)]
    flow = Flow("columns")
    rows = flow.source("rows", ListSource(epochs, "`a.b` bigint, `c``d.e` bigint"))
    first = rows.key_by("by d", "c`d.e").map_batches("first", same)
    branches = (
        first.key_by("by b", "a.b")
        .map_batches("second", same)
        .route_batches("branch", branch, branches=("files", "memory", "noop"))
    )
    branches["files"].sink("files", FileSink(out))
    branches["memory"].sink("memory", memory)
    branches["noop"].sink("noop", NoopSink())
    return flow


def marks_of(sent: list[str]) -> list[int]:
    """Where each run begins."""
    return [i for i, command in enumerate(sent) if f"setLocalProperty\ns{RUN_PROPERTY}\ns" in command]


def calls_of_epochs(sent: list[str]) -> list[int]:
    """How many commands there are from each run to the next."""
    return [after - before for before, after in pairwise(marks_of(sent))]


def in_order(memory: MemorySink) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in memory.rows)


def test_an_epoch_makes_few_calls_to_the_jvm(spark: Any, tmp_path: Path) -> None:
    with commands_sent() as sent:
        job = run_spark(flow_of(tmp_path / "out", MemorySink()), spark, checkpoint=str(tmp_path / "c"), partitions=2)

    last = job.progress[-1]
    assert [phase.name for phase in last.phases] == ["idle", "plan", "stage 0", "stage 1", "stage 2", "sinks", "commit"]
    assert all(phase.ms > 0 for phase in last.phases)
    assert sum(phase.ms for phase in last.phases if phase.name in ("plan", "sinks")) < last.duration_ms
    counts = calls_of_epochs(sent)
    assert len(counts) == EPOCHS - 1
    # The second epoch may still learn how wide rows are.
    marks = marks_of(sent)
    assert max(counts[2:]) <= CALLS_OF_AN_EPOCH, sent[marks[-2] : marks[-1]]
    ends = [i for i, command in enumerate(sent) if f"setLocalProperty\ns{RUN_PROPERTY}\nn" in command]
    assert len(ends) == EPOCHS
    assert all(begin < end for begin, end in zip(marks, ends, strict=True)), "each run takes its property back"


@pytest.mark.parametrize("made_by", [pytest.param(PreparedColumns, marks=pytest.mark.slow), PublicColumns])
def test_results_are_the_same_with_and_without_private_names(
    made_by: Callable[[], PublicColumns], spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = MemorySink(), MemorySink()
    run_local(flow_of(tmp_path / "local", expected), checkpoint=str(tmp_path / "l"))
    monkeypatch.setattr(heartbeat, "columns_for", lambda spark: made_by())
    run_spark(flow_of(tmp_path / "spark", found), spark, checkpoint=str(tmp_path / "s"), partitions=2)

    assert in_order(found) == in_order(expected)
    assert spark.read.parquet(str(tmp_path / "spark")).count() == len(range(0, 10 * EPOCHS, 3))


def test_a_pyspark_without_the_private_names_is_supported(
    spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert type(columns_for(spark)) is PreparedColumns
    assert caplog.messages == []
    with monkeypatch.context() as without:
        without.delattr(PythonEvalType, "SQL_MAP_ARROW_ITER_UDF")
        assert type(columns_for(spark)) is PublicColumns
    assert "SQL_MAP_ARROW_ITER_UDF" in caplog.text


def test_a_pyspark_that_wraps_the_session_in_each_epoch_is_supported(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("pyspark.sql.utils.ForeachBatchFunction")
    memory = MemorySink()
    with commands_sent() as sent:
        run_spark(flow_of(tmp_path / "out", memory), spark, checkpoint=str(tmp_path / "c"), partitions=2)
    assert len(memory.rows) == len([n for n in range(10 * EPOCHS) if n % 3 == 1])
    assert "ForeachBatchFunction" in caplog.text
    assert max(calls_of_epochs(sent)[2:]) > CALLS_OF_AN_EPOCH


def test_a_column_is_reused_until_a_run_does_not_need_it_or_files_are_added(spark: Any, tmp_path: Path) -> None:
    columns, rows = PreparedColumns(), spark.range(1)

    def calls(ddl: str) -> int:
        with commands_sent() as sent:
            columns.map(rows, ("id",), decode_frames, (), ddl)
        return len(sent)

    assert calls("n bigint") > 10
    assert calls("n bigint") == 1
    assert calls("m bigint") > 10, "other columns are left"
    columns.begin()
    assert calls("n bigint") == 1
    columns.begin()
    assert calls("m bigint") > 10, "the last run did without it"
    with zipfile.ZipFile(tmp_path / "added_later.zip", "w") as added:
        added.writestr("added_later.py", "X = 1")
    spark.sparkContext.addPyFile(str(added.filename))
    assert calls("m bigint") > 10, "functions made before do not know the file"


def test_a_callable_sink_may_compute_its_rows_in_a_thread_of_its_own(spark: Any, tmp_path: Path) -> None:
    """Such a thread has none of the properties of the one that runs the epoch."""
    seen: list[tuple[int, list[int]]] = []

    def write(df: Any, epoch: int) -> None:
        thread = threading.Thread(target=lambda: seen.append((epoch, sorted(row.n for row in df.collect()))))
        thread.start()
        thread.join()

    flow = Flow("threads")
    rows = flow.source("rows", ListSource([[{"n": 1}, {"n": 2}], [{"n": 3}]], "n bigint"))
    rows.key_by("by n", "n").map_batches("same", same).sink("out", write)
    run_spark(flow, spark, checkpoint=str(tmp_path), partitions=2)

    assert seen == [(0, [1, 2]), (1, [3])]


def test_two_jobs_of_an_application_do_not_take_each_others_rows(spark: Any, tmp_path: Path) -> None:
    expected, found = MemorySink(), [MemorySink(), MemorySink()]
    run_local(flow_of(tmp_path / "local", expected), checkpoint=str(tmp_path / "l"))
    run = partial(run_spark, spark=spark, partitions=2)
    threads = [
        threading.Thread(
            target=run, args=(flow_of(tmp_path / f"out{i}", sink),), kwargs={"checkpoint": str(tmp_path / f"c{i}")}
        )
        for i, sink in enumerate(found)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [in_order(sink) for sink in found] == 2 * [in_order(expected)]
