"""Kafka as source and sink, with a real broker: what is read, written and refused, and what readers rely on."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from midstream import Flow, Insert, KafkaSink, MemorySink, Update
from midstream.errors import JobFailed, SetupError
from midstream.testing import run_spark
from tests.brokers import stream_of, that_count
from tests.chaos.processes import live_through_kills
from tests.spark.conftest import PATIENCE_S
from tests.unit.test_docs import ROOT, assert_page_prints

Row = dict[str, Any]


class Topics:
    """The topics of one test: an input, an output, and the output's topic of epochs."""

    def __init__(self, broker: Any, number: int, partitions: int = 2) -> None:
        self.broker = broker
        self.input, self.output = f"in-{number}", f"out-{number}"
        broker.create_topic(self.input, partitions)
        broker.create_topic(self.output, 2)
        broker.create_topic(f"{self.output}.epochs", 1)

    def feed(self, first: int, count: int, **options: Any) -> None:
        records = ((f"k{n % 5}".encode(), json.dumps({"n": n}).encode()) for n in range(first, first + count))
        self.broker.produce(self.input, records, **options)

    def stream(self, spark: Any, **options: Any) -> Any:
        return stream_of(spark, self.broker.servers, self.input, **options)

    def sink(self, **options: Any) -> KafkaSink:
        return KafkaSink(self.broker.servers, self.output, **{"key": "k", **options})

    def all_records(self) -> list[Any]:
        return list(self.broker.read(self.output))

    def records(self) -> list[Any]:
        """Those that count."""
        return that_count(self.all_records(), self.broker.read(f"{self.output}.epochs"))

    def numbers(self) -> list[int]:
        return sorted(json.loads(record.value)["n"] for record in self.records())


_numbers = iter(range(1_000_000))


@pytest.fixture
def topics(kafka: Any) -> Topics:
    return Topics(kafka, next(_numbers))


def parse(row: Row) -> Row:
    return {"k": row["key"].decode(), "n": json.loads(row["value"])["n"]}


def tenfold(row: Row) -> Row:
    return {**parse(row), "n": 10 * parse(row)["n"]}


def flow_of(spark: Any, topics: Topics, *others: Callable[[Any, int], None], **options: Any) -> Flow:
    flow = Flow("kafka")
    rows = flow.source("in", topics.stream(spark, **options), event_time="timestamp")
    parsed = rows.map("parse", parse, returns="k string, n bigint")
    parsed.sink("out", topics.sink())
    for number, other in enumerate(others):
        parsed.sink(f"other {number}", other)
    return flow


def await_records(job: Any, count: int) -> None:
    """Records that are produced at once may be read in several epochs."""
    while job.metrics.rows_in < count:
        assert job.await_epoch(job.metrics.epochs + 1, PATIENCE_S)


def scraped(server: Any, name: str, labels: dict[str, str]) -> float:
    """A value as Prometheus reads it; 0 if it is not there."""
    request = Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.token}"})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return next((float(sample.value) for sample in samples if sample.labels == labels), 0.0)


# ── what is read and written ──────────────────────────────────────────────────────────────────────────────────────


def test_records_are_read_with_headers_and_times_and_written_by_key(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 100, headers=[("trace", b"t1")])
    flow, seen = Flow("kafka"), MemorySink()
    stream = topics.stream(spark, includeHeaders=True, maxOffsetsPerTrigger=40)
    rows = flow.source("in", stream, event_time="timestamp")
    rows.select("heads", "partition", "offset", "timestamp", "headers").sink("seen", seen)
    rows.map("parse", parse, returns="k string, n bigint").sink("out", topics.sink())
    job = run_spark(flow, spark, checkpoint=str(tmp_path / "c"))

    read = topics.broker.read(topics.input)
    assert sorted((row["partition"], row["offset"]) for row in seen.rows) == [(r.partition, r.offset) for r in read]
    assert all(row["headers"] == [{"key": "trace", "value": b"t1"}] for row in seen.rows)
    times = {(row["partition"], row["offset"]): round(1000 * row["timestamp"].timestamp()) for row in seen.rows}
    assert times == {(r.partition, r.offset): r.time_ms for r in read}

    assert [progress.rows_in for progress in job.progress] == [sum(json_sizes(job, epoch)) for epoch in range(3)]
    assert max(progress.rows_in for progress in job.progress) <= 40
    last = json.loads(job.progress[-1].offsets["in"])[topics.input]
    assert last == dict(Counter(str(r.partition) for r in read))
    assert json.loads(job.observation.sources[0].offset) == {topics.input: last}

    assert topics.numbers() == list(range(100))
    written = topics.records()
    assert all(r.key.decode() == json.loads(r.value)["k"] for r in written)
    by_key = {r.key: r.partition for r in written}
    assert all(by_key[r.key] == r.partition for r in written), "records of a key are in one partition"
    assert {r.headers["midstream-job"].decode() for r in written} == {job.id}


def json_sizes(job: Any, epoch: int) -> list[int]:
    """The records by partition of an epoch, from the offsets before and after it."""
    at = [json.loads(progress.offsets["in"]) for progress in job.progress]
    [after] = at[epoch].values()
    before = next(iter(at[epoch - 1].values())) if epoch else {}
    return [end - before.get(partition, 0) for partition, end in after.items()]


@pytest.mark.slow
def test_the_key_and_the_value_may_be_columns(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 10)
    flow = Flow("copy")
    rows = flow.source("in", topics.stream(spark)).map(
        "number", lambda row: {"n": row["offset"], "payload": row["value"]}, returns="n bigint, payload binary"
    )
    rows.sink("out", topics.sink(key="n", value="payload"))
    run_spark(flow, spark, checkpoint=str(tmp_path / "c"))
    read = topics.broker.read(topics.input)
    wanted = Counter((str(r.offset).encode(), r.value) for r in read)
    assert Counter((r.key, r.value) for r in topics.records()) == wanted


@pytest.mark.slow
def test_how_far_a_topic_is_behind_is_observed(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 150)
    flow = flow_of(spark, topics, maxOffsetsPerTrigger=10)
    labels = {"flow": "kafka", "source": "in", "measure": "maxOffsetsBehindLatest"}
    with flow.start(spark, checkpoint=str(tmp_path / "c"), serve=True) as job:
        behind = 0.0
        for seen in job.watch():
            backlog = seen.sources[0].backlog
            behind = max(behind, scraped(job.server, "midstream_source_backlog", labels))
            if backlog.get("maxOffsetsBehindLatest") and behind:
                break
            assert seen.epoch < 15, "no more is read by then"
        assert {"avgOffsetsBehindLatest", "minOffsetsBehindLatest"} <= backlog.keys()
        assert 0 < behind < 150, "of a partition's records, as Prometheus sees it"
        assert job.await_epoch(15, PATIENCE_S)
    assert topics.numbers() == list(range(150))


@pytest.mark.slow
def test_new_partitions_of_a_topic_are_read(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 50)
    # By default the connector learns of new partitions when its client does, every five minutes.
    flow = flow_of(spark, topics, **{"kafka.metadata.max.age.ms": 200})
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, PATIENCE_S)
        topics.broker.add_partitions(topics.input, 3)
        topics.feed(50, 20, partition=2)
        for seen in job.watch():
            if json.loads(seen.sources[0].offset)[topics.input].get("2") == 20:
                break
    assert topics.numbers() == list(range(70))


@pytest.mark.slow
def test_a_broker_that_dies_and_comes_back_is_waited_for(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 200)
    flow = flow_of(spark, topics, maxOffsetsPerTrigger=20)
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(3, PATIENCE_S)
        topics.broker.kill()
        topics.broker.start()
        assert job.await_epoch(10, PATIENCE_S)
    assert topics.numbers() == list(range(200))


@pytest.mark.slow
def test_a_deleted_topic_fails_the_job_and_says_so(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 50)
    flow = flow_of(spark, topics, **{"kafka.metadata.max.age.ms": 200})
    job = flow.start(spark, checkpoint=str(tmp_path / "c"))
    assert job.await_epoch(1, PATIENCE_S)
    topics.broker.delete_topic(topics.input)
    with pytest.raises(JobFailed) as failed:
        job.await_termination(PATIENCE_S)
    assert "Kafka has no such topic, or no longer: it was deleted" in str(failed.value)
    assert f"source 'in' up to {{\"{topics.input}\"" in str(failed.value)
    assert topics.numbers() == list(range(50))


@pytest.mark.slow
def test_the_code_of_the_page_prints_what_the_page_says(
    spark: Any, kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic, partitions in (("orders", 2), ("totals", 2), ("totals.epochs", 1)):
        kafka.create_topic(topic, partitions)
    orders = [("ann", 3), ("bob", 5), ("ann", 4)]
    records = ((user.encode(), json.dumps({"user": user, "amount": amount}).encode()) for user, amount in orders)
    kafka.produce("orders", records)
    monkeypatch.chdir(tmp_path)
    assert_page_prints(ROOT / "docs" / "kafka.md", True, {"spark": spark, "servers": kafka.servers})


# ── what is refused before anything changes ───────────────────────────────────────────────────────────────────────


def test_missing_topics_and_brokers_are_reported(spark: Any, topics: Topics, tmp_path: Path) -> None:
    def started(sink: KafkaSink) -> None:
        flow = Flow("refused")
        flow.source("in", topics.stream(spark)).select("values", "value").sink("out", sink)
        flow.start(spark, checkpoint=str(tmp_path / "c"))

    servers = topics.broker.servers
    cases = [
        (KafkaSink(servers, "nowhere"), f"sink 'out': there is no topic 'nowhere' on {servers}; create it$"),
        (
            KafkaSink(servers, topics.output, epochs_topic="nowhere"),
            "no topic 'nowhere' on .*; create it, with one partition: it says which runs of epochs count",
        ),
        (
            KafkaSink(servers, topics.output, epochs_topic=topics.input),
            f"the topic '{topics.input}' has 2 partitions; it needs exactly one",
        ),
        (
            KafkaSink(
                "127.0.0.1:1", "t", options={"kafka.default.api.timeout.ms": "900", "kafka.request.timeout.ms": "500"}
            ),
            "sink 'out': Kafka at 127.0.0.1:1 cannot be asked for its topics: .*[Tt]imed? ?out",
        ),
    ]
    for sink, says in cases:
        with pytest.raises(SetupError, match=says):
            started(sink)
    assert not (tmp_path / "c").exists()


# ── what readers can rely on ──────────────────────────────────────────────────────────────────────────────────────


def refuses_tens(rows: Any, epoch: int) -> None:
    """Another sink, which fails on the rows of the change after the Kafka sink has written them."""
    if any(row["n"] >= 1000 for row in rows.collect()):
        raise OSError("disk full")


@pytest.mark.slow
def test_records_of_a_change_that_was_rolled_back_do_not_count(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(100, 50)
    flow = flow_of(spark, topics, refuses_tens)
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, PATIENCE_S)
        change = job.update(Update("parse", tenfold), preflight=False)
        topics.feed(150, 50)
        assert str(change.wait(PATIENCE_S)) == "rolled back"
        await_records(job, 100)
    found = Counter(json.loads(record.value)["n"] for record in topics.all_records())
    assert any(n >= 1000 for n in found), "the run that was rolled back has left records"
    assert topics.numbers() == list(range(100, 200))


@pytest.mark.slow
def test_a_sink_that_a_change_adds_needs_its_topics(spark: Any, topics: Topics, tmp_path: Path) -> None:
    topics.feed(0, 20)
    flow, out = Flow("kafka"), MemorySink()
    rows = flow.source("in", topics.stream(spark), event_time="timestamp")
    rows.map("parse", parse, returns="k string, n bigint").sink("out", out)
    with flow.start(spark, checkpoint=str(tmp_path / "c")) as job:
        assert job.await_epoch(1, PATIENCE_S)
        for target, outcome in ((KafkaSink(topics.broker.servers, "nowhere"), "refused"), (topics.sink(), "applied")):
            insert = Insert(lambda rows, target=target: rows.sink("copy", target), after="parse")
            if outcome == "refused":
                with pytest.raises(SetupError, match="sink 'copy': there is no topic 'nowhere'"):
                    job.update(insert)
                continue
            change = job.update(insert)
            topics.feed(20, 20)
            assert str(change.wait(PATIENCE_S)) == outcome
        await_records(job, 40)
    assert topics.numbers() == list(range(20, 40))


@pytest.mark.slow
def test_the_last_epoch_counts_although_the_driver_died_before_it_could_say_so(
    spark: Any, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midstream.runtime.spark.kafka import EpochNotes

    topics.feed(0, 30)
    with monkeypatch.context() as patched:
        patched.setattr(EpochNotes, "committed", lambda *args: None)
        run_spark(flow_of(spark, topics), spark, checkpoint=str(tmp_path / "c"))
    assert topics.numbers() == []
    run_spark(flow_of(spark, topics), spark, checkpoint=str(tmp_path / "c"))
    assert topics.numbers() == list(range(30))


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("seed", [1, 2])
def test_changes_a_rescale_and_kills_leave_each_record_once(kafka: Any, seed: int, tmp_path: Path) -> None:
    """Workers and drivers die while a job is changed and rescaled. The oracle counts the records of each key."""
    folder = tmp_path.resolve()
    records = 8_000
    for name, partitions in (("in", 2), ("out", 2), ("out.epochs", 1)):
        if name in kafka.topics():
            kafka.delete_topic(name)
        kafka.create_topic(name, partitions)
    kafka.produce("in", ((f"k{n % 7}".encode(), json.dumps({"n": n}).encode()) for n in range(records)))
    (folder / "servers").write_text(f"{kafka.servers} {records}")
    live_through_kills(folder, "tests.spark.kafka_job", random.Random(seed))

    rows = [json.loads(r.value) for r in that_count(kafka.read("out"), kafka.read("out.epochs"))]
    assert sorted(row["n"] for row in rows) == list(range(records))
    parts = (folder / "files").glob("[!._]*")
    filed = [row for part in parts for row in pq.ParquetFile(part).read(["k", "n", "a", "b", "nth"]).to_pylist()]
    by_number = {row["n"]: row for row in rows}
    assert {row["n"]: row for row in filed} == by_number, "both sinks have the same rows"
    assert all(row["a"] == row["b"] for row in rows), "no row met a half of a change"
    assert len({row["a"] for row in rows}) > 2, "there were changes"
    for key in range(7):
        nth = sorted(row["nth"] for row in rows if row["k"] == f"k{key}")
        assert nth == list(range(1, len(nth) + 1)), "each row of a key was counted once"
