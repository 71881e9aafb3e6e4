"""A Kafka broker in a temporary folder on free ports: one process, broker and controller in one (KRaft)."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from . import jars
from .ports import free_ports

STARTED = "Kafka Server started"
PATIENCE_S = 60.0
CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
"""Any name of a cluster; Kafka wants 16 bytes in base 64."""


@dataclass(frozen=True)
class Record:
    """A record as an independent client reads it."""

    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]
    partition: int
    offset: int
    time_ms: int


class Broker:
    """A running broker. Made by :func:`broker`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, controller = free_ports(2)
        self._process: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=50)
        self._settings = folder / "server.properties"
        self._settings.write_text(_settings(self._port, controller, folder / "data"), encoding="utf-8")
        self._run("kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(self._settings))
        self.start()

    @property
    def servers(self) -> str:
        """The address, for ``kafka.bootstrap.servers``."""
        return f"127.0.0.1:{self._port}"

    # ── the process ───────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start it, again after :meth:`kill`, and wait until it is ready."""
        command = [*self._java("-Xmx512m", "-XX:TieredStopAtLevel=1"), "kafka.Kafka", str(self._settings)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ready = threading.Event()

        def listen() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    self._said.append(line)
                    if STARTED in line:
                        ready.set()
            ready.set()  # it has ended

        self._process, self._listener = process, threading.Thread(target=listen, name="kafka-broker", daemon=True)
        self._listener.start()
        if not ready.wait(PATIENCE_S) or STARTED not in "".join(self._said):
            said = "".join(self._said)
            self.kill()
            raise RuntimeError(f"the broker did not start:\n{said}")

    def kill(self) -> None:
        """End it as a failing machine would. What was acknowledged is in its folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._listener.join()
            self._said.clear()
            self._process = None

    def _java(self, *options: str) -> list[str]:
        own = [str(path) for path in jars.present(jars.BROKER)]
        path = ":".join([*own, f"{jars.spark_jars()}/*"])
        logging = Path(__file__).with_name("log4j2.properties").as_uri()
        return [jars.java(), *options, f"-Dlog4j2.configurationFile={logging}", "-cp", path]

    def _run(self, *command: str) -> None:
        done = subprocess.run([*self._java(), *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")

    # ── topics and records ────────────────────────────────────────────────────────────────────────────────────────

    def create_topic(self, name: str, partitions: int = 2) -> None:
        """Create a topic, and wait until it is there."""
        admin = self._admin()  # ends what is pending when it goes
        [done] = admin.create_topics([NewTopic(name, partitions, 1)]).values()
        done.result(PATIENCE_S)
        self._wait(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        """Give a topic more partitions."""
        admin = self._admin()  # ends what is pending when it goes
        [done] = admin.create_partitions([NewPartitions(name, total)]).values()
        done.result(PATIENCE_S)
        self._wait(name, total)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all that is in it."""
        admin = self._admin()  # ends what is pending when it goes
        [done] = admin.delete_topics([name]).values()
        done.result(PATIENCE_S)
        self._wait(name, None)

    def _wait(self, name: str, partitions: int | None) -> None:
        """Wait until the broker tells its clients so, which it does a moment after it has agreed."""
        until = time.monotonic() + PATIENCE_S
        while self.topics().get(name) != partitions:
            if time.monotonic() > until:
                raise RuntimeError(f"the topic {name!r} has {self.topics().get(name)} partitions, not {partitions}")

    def topics(self) -> dict[str, int]:
        """All topics, and how many partitions they have."""
        found = self._admin().list_topics(timeout=PATIENCE_S).topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers})

    def produce(
        self,
        topic: str,
        records: Iterable[tuple[bytes | None, bytes]],
        *,
        partition: int = -1,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """Write records of key and value, and wait until all are acknowledged."""
        errors: list[KafkaError] = []

        def told(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                errors.append(error)

        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 5})
        for key, value in records:
            while True:
                try:
                    producer.produce(topic, value, key, partition, headers=[*headers], on_delivery=told)
                except BufferError:  # full: let some of it go
                    producer.poll(0.1)
                    continue
                break
        producer.flush(PATIENCE_S)
        if errors:
            raise RuntimeError(f"{len(errors)} records were not written: {errors[0]}")

    def read(self, topic: str) -> list[Record]:
        """All records that a topic has now, by partition and offset."""
        settings = {"bootstrap.servers": self.servers, "group.id": "reader", "enable.auto.commit": False}
        consumer = Consumer({**settings, "enable.partition.eof": False, "auto.offset.reset": "earliest"})
        try:
            places = [TopicPartition(topic, number, 0) for number in range(self.topics()[topic])]
            ends = {place.partition: consumer.get_watermark_offsets(place)[1] for place in places}
            consumer.assign(places)
            found: list[Record] = []
            while len(found) < sum(ends.values()):
                message = consumer.poll(PATIENCE_S)
                if message is None or message.error() is not None:
                    raise RuntimeError(f"{topic} cannot be read: {message and message.error()}")
                if (message.offset() or 0) < ends[message.partition() or 0]:
                    found.append(_record(message))
            return sorted(found, key=lambda each: (each.partition, each.offset))
        finally:
            consumer.close()


def _record(message: Message) -> Record:
    headers = {name: bytes(value) for name, value in dict(message.headers() or ()).items()}  # type: ignore[arg-type]
    key, value, (_, time_ms) = message.key(), message.value(), message.timestamp()
    return Record(key, value, headers, message.partition() or 0, message.offset() or 0, time_ms)


@contextlib.contextmanager
def broker() -> Iterator[Broker]:
    """Start a broker; at the end it and its data are gone. ``python -m examples.kafka.jars`` fetches it."""
    if not jars.present(jars.BROKER):
        raise RuntimeError(f"the jars of the broker are missing; {jars.COMMAND} fetches them")
    folder = Path(tempfile.mkdtemp(prefix="midstream-kafka-"))
    started: Broker | None = None
    try:
        started = Broker(folder)
        yield started
    finally:
        if started is not None:
            started.kill()
        shutil.rmtree(folder)


def _settings(port: int, controller: int, data: Path) -> str:
    return "\n".join(
        [
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.voters=1@127.0.0.1:{controller}",
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names=CONTROLLER",
            f"log.dirs={data}",
            "offsets.topic.replication.factor=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            "auto.create.topics.enable=false",
            "log.cleaner.enable=false",
        ]
    )
