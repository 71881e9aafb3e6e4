"""midstream's own sources on Spark: exact rows, exact epochs, exact restarts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from midstream.errors import SourceError
from midstream.flow.sources import BLOCK, Constant, GeneratorSource, ListSource, Schedule, Step
from midstream.runtime.spark.generator_source import GeneratorReader, stream_of

Epochs = dict[int, pa.Table]


def generator(**options: Any) -> GeneratorSource:
    def make(indexes: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
        return {"index": indexes, "draw": rng.random(len(indexes)), "name": [f"n{i % 5}" for i in indexes.tolist()]}

    options = {"rate": 1_000_000, "seed": 3, **options}
    return GeneratorSource(make, "index bigint, draw double, name string", **options)


def start(
    frame: DataFrame, epochs: Epochs, checkpoint: Path, *, fail_in: int | None = None, **trigger: Any
) -> StreamingQuery:
    """Start a query that keeps each epoch's rows; it can be made to fail in an epoch, after it got the rows."""

    def keep(batch: DataFrame, epoch: int) -> None:
        epochs[epoch] = batch.toArrow()
        if epoch == fail_in:
            raise RuntimeError(f"made to fail in epoch {epoch}")

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


def drain(frame: DataFrame, checkpoint: Path) -> Epochs:
    epochs: Epochs = {}
    start(frame, epochs, checkpoint, availableNow=True).awaitTermination()
    return epochs


def in_order(epochs: Epochs) -> pa.Table:
    return pa.concat_tables([epochs[epoch] for epoch in sorted(epochs)])


def started_at(table: pa.Table, schedule: Schedule) -> set[int]:
    """When the stream must have started, computed from each row."""
    times = table["event_time"].cast(pa.int64()).to_numpy()
    return set((times - schedule.time_of(table["index"].to_numpy())).tolist())


# --- the generator -----------------------------------------------------------------------------------------------


def test_rows_equal_those_of_an_independent_computation(spark: SparkSession, tmp_path: Path):
    count = 2 * BLOCK + 1000
    table = in_order(drain(stream_of(spark, generator(limit=count)), tmp_path))

    draws = [np.random.default_rng((3, block)).random(BLOCK) for block in range(3)]
    assert table["index"].to_pylist() == list(range(count))
    assert table["draw"].to_pylist() == np.concatenate(draws)[:count].tolist()
    assert table["name"].to_pylist() == [f"n{i % 5}" for i in range(count)]


def test_event_times_are_as_scheduled(spark: SparkSession, tmp_path: Path):
    before = dt.datetime.now(dt.UTC)
    source = generator(rate=Step(((0, 100), (10, 7), (60, 0))))
    frame = stream_of(spark, source)
    table = in_order(drain(frame, tmp_path))
    after = dt.datetime.now(dt.UTC)

    assert table.num_rows == source.total == 1350
    assert dict(frame.dtypes)["event_time"] == "timestamp"
    (origin,) = started_at(table, source.schedule)
    assert before <= dt.datetime.fromtimestamp(origin / 1e6, dt.UTC) <= after


def test_an_epoch_is_limited_and_shared_among_partitions(spark: SparkSession, tmp_path: Path):
    source = generator(limit=2500, max_rows_per_epoch=1000, partitions=3)
    partitions = []

    def count(batch: DataFrame, epoch: int) -> None:
        partitions.append([len(rows) for rows in batch.rdd.glom().collect()])

    query = stream_of(spark, source).writeStream.foreachBatch(count).trigger(availableNow=True).start()
    query.awaitTermination()
    assert partitions == [[333, 333, 334], [333, 333, 334], [166, 167, 167]]


def test_a_restart_continues_the_open_loop_without_gap_or_repeat(spark: SparkSession, tmp_path: Path):
    first = drain(stream_of(spark, generator(limit=12_000, max_rows_per_epoch=4000)), tmp_path)
    second = drain(stream_of(spark, generator(limit=30_000, max_rows_per_epoch=7000)), tmp_path)

    assert [first[epoch].num_rows for epoch in sorted(first)] == [4000, 4000, 4000]
    assert {epoch: table.num_rows for epoch, table in second.items()} == {3: 7000, 4: 7000, 5: 4000}
    table = in_order(first | second)
    assert table["index"].to_pylist() == list(range(30_000))
    assert len(started_at(table, Constant(1_000_000))) == 1


@pytest.mark.parametrize("fails", [0, 2])
def test_a_replayed_epoch_has_the_same_rows(spark: SparkSession, tmp_path: Path, fails: int):
    source = generator(limit=5000, max_rows_per_epoch=1000)
    first: Epochs = {}
    query = start(stream_of(spark, source), first, tmp_path, fail_in=fails, availableNow=True)
    with pytest.raises(StreamingQueryException, match="made to fail"):
        query.awaitTermination()
    second = drain(stream_of(spark, source), tmp_path)

    assert min(second) == fails
    assert second[fails] == first[fails]
    table = in_order(first | second)
    assert table["index"].to_pylist() == list(range(5000))
    assert len(started_at(table, source.schedule)) == 1


def test_a_finished_stream_stays_finished(spark: SparkSession, tmp_path: Path):
    source = generator(limit=10)
    assert in_order(drain(stream_of(spark, source), tmp_path)).num_rows == 10
    assert drain(stream_of(spark, source), tmp_path) == {}


def test_an_endless_generator_ends_an_available_now_run_with_what_was_due(spark: SparkSession, tmp_path: Path):
    source = generator(rate=1000)
    first: Epochs = {}
    query = start(stream_of(spark, source), first, tmp_path, fail_in=1)
    with pytest.raises(StreamingQueryException, match="made to fail"):
        query.awaitTermination()
    second = drain(stream_of(spark, source), tmp_path)

    table = in_order(first | second)
    assert max(second) > max(first)  # what became due while the query was down
    assert table["index"].to_pylist() == list(range(table.num_rows))


def test_several_sources_live_in_one_session(spark: SparkSession, tmp_path: Path):
    frames = [stream_of(spark, ListSource([[{"n": n}]], "n int")) for n in (1, 2)]
    assert [in_order(drain(frame, tmp_path / str(n))).to_pylist() for n, frame in enumerate(frames)] == [
        [{"n": 1}],
        [{"n": 2}],
    ]


def test_only_descriptions_of_midstream_become_streams(spark: SparkSession):
    with pytest.raises(SourceError, match="must be a GeneratorSource, a ListSource or a DeltaSource"):
        stream_of(spark, [1, 2])  # type: ignore[arg-type]


# --- the list ----------------------------------------------------------------------------------------------------

LIST = ListSource(
    [[{"n": n} for n in range(5)], [], [{"n": 5}], [{"n": n} for n in range(6, 9)]], "n bigint", partitions=2
)


def numbers(epochs: Epochs) -> dict[int, list[int]]:
    return {epoch: table["n"].to_pylist() for epoch, table in epochs.items()}


def by_available_now(query: Callable[..., StreamingQuery]) -> None:
    query(availableNow=True).awaitTermination()


def by_default(query: Callable[..., StreamingQuery]) -> None:
    running = query()
    running.processAllAvailable()
    running.stop()


@pytest.mark.parametrize("run", [by_available_now, by_default])
def test_each_list_epoch_is_one_micro_batch(spark: SparkSession, tmp_path: Path, run: Callable[..., None]):
    epochs: Epochs = {}
    run(lambda **trigger: start(stream_of(spark, LIST), epochs, tmp_path, **trigger))
    assert numbers(epochs) == {0: [0, 1, 2, 3, 4], 1: [], 2: [5], 3: [6, 7, 8]}


def test_a_list_continues_where_the_checkpoint_ends(spark: SparkSession, tmp_path: Path):
    first: Epochs = {}
    query = start(stream_of(spark, LIST), first, tmp_path, fail_in=2, availableNow=True)
    with pytest.raises(StreamingQueryException, match="made to fail"):
        query.awaitTermination()
    assert numbers(first) == {0: [0, 1, 2, 3, 4], 1: [], 2: [5]}
    assert numbers(drain(stream_of(spark, LIST), tmp_path)) == {2: [5], 3: [6, 7, 8]}


def test_every_type_arrives_as_it_was_given(spark: SparkSession, tmp_path: Path):
    row = {
        "i": 1,
        "d": Decimal("12.50"),
        "s": "ä",
        "b": b"\x00\x01",
        "day": dt.date(2024, 2, 29),
        "at": dt.datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=dt.UTC),
        "local": dt.datetime(2024, 2, 29, 12, 0, 0, 123456),
        "list": [1, None],
        "map": [("k", 2.5)],
        "nested": {"x": True, "ys": ["y"]},
    }
    ddl = (
        "i int NOT NULL, d decimal(10, 2), s string, b binary, day date, at timestamp, local timestamp_ntz, "
        "list array<smallint>, map map<string, double>, nested struct<x: boolean, ys: array<string>>"
    )
    nothing = dict.fromkeys(row) | {"i": 2}
    source = ListSource([[row, nothing]], ddl, event_time="at")
    (table,) = drain(stream_of(spark, source), tmp_path).values()
    assert table.to_pylist() == [row, nothing]


# --- the readers' side of the conversation with Spark, without Spark ------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.now


def test_due_events_follow_the_clock_and_the_limit_of_the_epoch():
    clock = Clock()
    reader = GeneratorReader(generator(rate=1000, max_rows_per_epoch=10), clock)
    begin = reader.initialOffset()
    assert reader.latestOffset(begin, ReadAllAvailable()) == begin
    clock.now += 1_000_000
    assert reader.initialOffset() == begin
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    assert reader.latestOffset(begin, ReadMaxRows(10)) == begin | {"index": 10}
    assert reader.latestOffset(begin, ReadAllAvailable()) == begin | {"index": 1000}
    assert reader.reportLatestOffset() == begin | {"index": 1000}


def test_a_clock_that_is_set_back_withdraws_no_events():
    clock = Clock()
    reader = GeneratorReader(generator(rate=1000), clock)
    at = reader.initialOffset() | {"index": 500}
    clock.now -= 10_000_000
    assert reader.latestOffset(at, ReadAllAvailable()) == at


def test_after_a_restart_the_events_of_the_pause_are_due():
    clock = Clock()
    checkpointed = {"start_us": clock.now - 60_000_000, "index": 5}
    reader = GeneratorReader(generator(rate=1000), clock)
    assert reader.latestOffset(checkpointed, ReadAllAvailable()) == checkpointed | {"index": 60_000}


def test_available_now_fixes_the_due_events():
    clock = Clock()
    reader = GeneratorReader(generator(rate=1000), clock)
    at = {"start_us": clock.now - 1_000_000, "index": 0}
    reader.prepareForTriggerAvailableNow()
    clock.now += 5_000_000
    end = reader.latestOffset(at, ReadAllAvailable())
    assert end["index"] == 1000
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_first_epoch_that_is_replayed_keeps_the_start_that_was_logged():
    clock = Clock()
    source = generator(limit=10, partitions=1)
    logged = GeneratorReader(source, clock).initialOffset() | {"index": 10}
    clock.now += 1_000_000
    again = GeneratorReader(source, clock)
    (partition,) = again.partitions(again.initialOffset(), logged)
    (batch,) = again.read(partition)
    assert started_at(pa.Table.from_batches([batch]), Constant(1_000_000)) == {logged["start_us"]}
