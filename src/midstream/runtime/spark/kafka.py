"""Writes Kafka sinks: records from the tasks, and notes of epochs from the driver. See :class:`~midstream.KafkaSink`.

The connector, and Kafka's client that comes with it, are classes in the JVM; midstream has no client of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from midstream.errors import SetupError
from midstream.flow.kafka_notes import EpochNote
from midstream.flow.kafka_sink import HEADERS, KafkaSink
from midstream.flow.model import Graph, Sink
from midstream.ids import Epoch
from midstream.runtime.reporting import summary
from midstream.runtime.spark.stage_columns import quoted

__all__ = ["EpochNotes", "check_topics", "write_records"]

PROVIDER = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13"
PATIENCE_MS = "15000"

_log = logging.getLogger("midstream")


def check_topics(spark: SparkSession, graph: Graph) -> None:
    """Refuse Kafka sinks that cannot be written: no connector, no broker, no topic. Only reads."""
    for name, target in _kafka_sinks(graph):
        what = f"sink {name!r}"
        if not _has_connector(spark):
            raise SetupError(
                f"{what}: the session has no connector for Kafka. Start it with spark.jars.packages={PACKAGE}:VERSION, "
                f"of the version of Spark ({spark.version}); e.g. local_session(packages=['{PACKAGE}:{spark.version}'])"
            )
        partitions = _partitions(spark, target, what)
        for topic in (target.topic, target.epochs_topic):
            if topic not in partitions:
                raise SetupError(
                    f"{what}: there is no topic {topic!r} on {target.servers}; create it"
                    + (", with one partition: it says which runs of epochs count" if topic != target.topic else "")
                )
        if partitions[target.epochs_topic] != 1:
            raise SetupError(
                f"{what}: the topic {target.epochs_topic!r} has {partitions[target.epochs_topic]} partitions; it needs "
                f"exactly one, because the order of its records counts"
            )


def write_records(target: KafkaSink, rows: DataFrame, note: EpochNote) -> None:
    """Write rows as records of one run of an epoch, in one Spark job."""
    names = rows.columns
    headers = dict(zip(HEADERS, (note.job, note.sink, str(note.epoch), note.run), strict=False))
    # Within a run the order of a task's rows is fixed, so another attempt gives a row the same number.
    position = F.monotonically_increasing_id().cast("string").cast("binary")
    columns = [
        _key(rows, target.key).alias("key"),
        _value(target.value, names).alias("value"),
        F.array(
            *[_header(name, F.lit(text).cast("binary")) for name, text in headers.items()],
            _header(HEADERS[-1], position),
        ).alias("headers"),
    ]
    writer = rows.select(*columns).write.format("kafka").mode("append").options(**target.options)
    writer.option("kafka.bootstrap.servers", target.servers).option("topic", target.topic).save()


def _key(rows: DataFrame, name: str | None) -> Column:
    if name is None:
        return F.lit(None).cast("binary")
    kind = dict(rows.dtypes)[name]
    column = F.col(quoted(name))
    return column if kind == "binary" else column.cast("string").cast("binary")


def _value(name: str | None, names: list[str]) -> Column:
    if name is not None:
        return F.col(quoted(name)).cast("binary")
    of_all = F.struct(*[F.col(quoted(each)) for each in names])
    return F.to_json(of_all, {"ignoreNullFields": "false", "timeZone": "UTC"}).cast("binary")


def _header(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), value.alias("value"))


class EpochNotes:
    """Tells readers of Kafka sinks which run of an epoch counts. One producer for each topic of epochs.

    In the order of an epoch: :meth:`run_begins`, :meth:`begin` for each sink, :meth:`committed`. At a start,
    :meth:`start` makes up for the last note, which a crash may have swallowed.
    """

    def __init__(self, spark: SparkSession, job: str) -> None:
        self._spark = spark
        self._job = job
        self._lock = threading.Lock()
        """Several sinks may begin at the same time, in threads."""
        self._producers: dict[tuple[str, str], Any] = {}
        """By brokers and topic of epochs."""
        self._open: dict[str, tuple[KafkaSink, EpochNote]] = {}
        """Sinks that the run in progress has written, or is writing."""
        self._said: list[tuple[KafkaSink, EpochNote, Any]] = []
        """Notes of the last commit, and futures of the broker's answers."""

    def start(self, graph: Graph, epoch: Epoch) -> None:
        """Note the newest committed epoch again."""
        for name, target in _kafka_sinks(graph):
            self._say(target, EpochNote(self._job, name, epoch))

    def run_begins(self, epoch: Epoch) -> None:
        """A run of an epoch begins. Records of an earlier run are void, also those of sinks that have been removed
        since."""
        for target, note in self._open.values():
            self._say(target, EpochNote(self._job, note.sink, Epoch(epoch - 1)))
        self._open = {}
        self._settle()

    def begin(self, sink: str, target: KafkaSink, epoch: Epoch) -> EpochNote:
        """Note that a run of an epoch begins, and wait until the broker has the note: the run's records must come after
        it."""
        note = EpochNote(self._job, sink, epoch, uuid.uuid4().hex)
        with self._lock:
            self._open[sink] = target, note
        self._send(target, note).get()
        return note

    def committed(self, epoch: Epoch) -> None:
        """Note that an epoch is committed. Never raises: a note that fails is sent again when the next run begins."""
        written, self._open = self._open, {}
        for target, note in written.values():
            self._say(target, EpochNote(self._job, note.sink, epoch))

    def _say(self, target: KafkaSink, note: EpochNote) -> None:
        try:
            answer = self._send(target, note)
        except Exception as error:
            _log.warning("readers of sink %r learn later of epoch %d: %s", note.sink, note.epoch, summary(error))
            answer = None
        self._said.append((target, note, answer))

    def _settle(self) -> None:
        """Make sure that all notes have arrived: a later note makes up only for the one before it."""
        while self._said:
            target, note, answer = self._said[0]
            try:
                if answer is None:
                    answer = self._send(target, note)
                answer.get()
            except Py4JJavaError:
                self._send(target, note).get()
            self._said.pop(0)

    def close(self) -> None:
        """Send what is pending, and let go of the producers."""
        while self._producers:
            _, producer = self._producers.popitem()
            with contextlib.suppress(Exception):  # Spark may be gone
                producer.close()

    def _send(self, target: KafkaSink, note: EpochNote) -> Any:
        """A future of the broker's answer."""
        place = (target.servers, target.epochs_topic)
        jvm = _jvm(self._spark)
        with self._lock:
            if place not in self._producers:
                settings = _properties(self._spark, {"max.block.ms": PATIENCE_MS, **target.client, "acks": "all"})
                bytes_ = jvm.org.apache.kafka.common.serialization.ByteArraySerializer
                producer = jvm.org.apache.kafka.clients.producer.KafkaProducer
                self._producers[place] = producer(settings, bytes_(), bytes_())
        record = jvm.org.apache.kafka.clients.producer.ProducerRecord
        return self._producers[place].send(record(target.epochs_topic, note.key, msgspec.json.encode(note)))


def _kafka_sinks(graph: Graph) -> Iterator[tuple[str, KafkaSink]]:
    for op in graph.of(Sink):
        target = graph.payloads.get(op.name)
        if isinstance(target, KafkaSink):
            yield op.name, target


def _has_connector(spark: SparkSession) -> bool:
    jvm = _jvm(spark)
    try:
        jvm.java.lang.Class.forName(PROVIDER, False, jvm.java.lang.Thread.currentThread().getContextClassLoader())
    except Py4JJavaError:
        return False
    return True


def _partitions(spark: SparkSession, target: KafkaSink, what: str) -> dict[str, int]:
    """The number of partitions of those of a sink's topics that exist."""
    limits = {"request.timeout.ms": PATIENCE_MS, "default.api.timeout.ms": PATIENCE_MS}
    admin: Any = None
    try:
        admin = _jvm(spark).org.apache.kafka.clients.admin.Admin.create(_properties(spark, {**limits, **target.client}))
        existing = admin.listTopics().names().get()
        wanted = _jvm(spark).java.util.ArrayList()
        for topic in (target.topic, target.epochs_topic):
            if existing.contains(topic):
                wanted.add(topic)
        found = admin.describeTopics(wanted).allTopicNames().get()
        return {topic: int(found.get(topic).partitions().size()) for topic in wanted}
    except Py4JJavaError as error:
        raise SetupError(
            f"{what}: Kafka at {target.servers} cannot be asked for its topics: {summary(error)}"
        ) from None
    finally:
        if admin is not None:
            admin.close()


def _properties(spark: SparkSession, settings: dict[str, str]) -> Any:
    found = _jvm(spark).java.util.Properties()
    for name, value in settings.items():
        found.setProperty(name, value)
    return found


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm
