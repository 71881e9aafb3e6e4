"""A Kafka broker for tests, and what an independent reader makes of the topics of a sink.

The broker is Apache Kafka's own, in a process of its own. Without its jars, or without the client, tests that need it
are skipped with that reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from examples.kafka import jars
from midstream import runs_that_count


@contextlib.contextmanager
def kafka_broker() -> Iterator[Any]:
    """Start a broker. Skips the test if there is none."""
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed, with which tests reach Kafka")
    for part in (jars.BROKER, jars.CONNECTOR):
        if not jars.present(part):
            pytest.skip(f"the jars of Kafka's {part} are not in {jars.folder()}; {jars.COMMAND} fetches them")
    from examples.kafka.broker import broker

    with broker() as started:
        yield started


def connector_conf() -> dict[str, bool | float | int | str | None]:
    """The setting that gives a session the connector; none if its jars are missing."""
    found = jars.present(jars.CONNECTOR)
    return {"spark.jars": ",".join(map(str, found))} if found else {}


def stream_of(spark: Any, servers: str, topic: str, **options: Any) -> Any:
    """All records of a topic, as a stream."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    return reader.options(**{"startingOffsets": "earliest", **options}).load()


def that_count(records: Iterable[Any], notes: Iterable[Any]) -> list[Any]:
    """The records of a sink that count, each once: the recipe of docs/kafka.md for a plain client."""
    counts = runs_that_count(note.value for note in notes)
    found, seen = [], set()
    for record in records:
        job, sink, epoch, run, position = (record.headers[f"midstream-{name}"].decode() for name in HEADERS)
        place = (job, sink, int(epoch), position)
        if counts.get(place[:3]) == run and place not in seen:
            seen.add(place)
            found.append(record)
    return found


HEADERS = ("job", "sink", "epoch", "run", "position")
