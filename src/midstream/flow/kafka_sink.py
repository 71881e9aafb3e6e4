"""A sink for topics of Kafka: what it writes, and how its readers know which records count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from midstream.data.schema import require_columns, type_name
from midstream.errors import FlowError, SchemaError
from midstream.flow.spec import Delivery

__all__ = ["HEADERS", "KafkaSink", "check_records"]

JOB, SINK, EPOCH, RUN, POSITION = (f"midstream-{name}" for name in ("job", "sink", "epoch", "run", "position"))

HEADERS = (JOB, SINK, EPOCH, RUN, POSITION)
"""The headers of each record."""

_RESERVED = ("topic", "kafka.bootstrap.servers", "includeHeaders")


@dataclass(frozen=True)
class KafkaSink:
    """Writes each row as a record of a topic, from the tasks, with Spark's own connector.

    **Guarantee: at least once; exactly once for readers that follow the epochs' topic.** Kafka cannot take a record
    back. An epoch that runs again, after a crash or the roll-back of a change, therefore adds its records once more,
    under another run. Each record has the headers ``midstream-job``, ``-sink``, ``-epoch``, ``-run`` and
    ``-position``, and the topic ``epochs_topic`` says which run of each epoch counts: the last one that was begun,
    once the epoch is committed. :func:`midstream.runs_that_count` reads it. Of records with the same headers (Spark
    tried a task again) a reader takes one.

    ``key`` names the column that becomes the record's key: binary as it is, text as UTF-8, whole numbers as text.
    Records of a key go to one partition of the topic. ``value`` names the column that becomes the value, text or
    binary; by default the value is a JSON object of all columns. ``options`` are the connector's, such as
    ``kafka.security.protocol``.

    Both topics must be there when the job starts; that of the epochs, by default ``<topic>.epochs``, has one
    partition. The session needs the connector, see ``local_session(packages=…)``. A job on the local runtime cannot
    write to Kafka.

    >>> KafkaSink("broker:9092", "alerts", key="user").epochs_topic
    'alerts.epochs'
    """

    servers: str
    topic: str
    key: str | None = None
    value: str | None = None
    epochs_topic: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    delivery = Delivery.FRAME

    def __post_init__(self) -> None:
        for name, example in (("servers", "broker:9092"), ("topic", "alerts")):
            found = getattr(self, name)
            if not isinstance(found, str) or not found.strip():
                raise FlowError(f"KafkaSink: {name} is {found!r}; give a text such as {example!r}")
        if not self.epochs_topic:
            object.__setattr__(self, "epochs_topic", f"{self.topic}.epochs")
        if self.epochs_topic == self.topic:
            raise FlowError(f"KafkaSink: epochs_topic is {self.topic!r} as well; give it a topic of its own")
        options = {str(name): str(value) for name, value in self.options.items()}
        if taken := [name for name in _RESERVED if name in options]:
            raise FlowError(f"KafkaSink: options has {', '.join(taken)}, which the sink sets itself; leave it out")
        object.__setattr__(self, "options", options)

    @property
    def client(self) -> dict[str, str]:
        """The settings of a Kafka client: those options that begin with ``kafka.``, without that."""
        mine = {name[6:]: value for name, value in self.options.items() if name.startswith("kafka.")}
        return {"bootstrap.servers": self.servers, **mine}


def check_records(target: KafkaSink, schema: pa.Schema, what: str) -> None:
    """Refuse columns that cannot be the key or the value of a record."""
    for name, part in ((target.key, "key"), (target.value, "value")):
        if name is None:
            continue
        require_columns(schema, [name], f"{what}, {part}")
        kind = schema.field(name).type
        is_plain = pa.types.is_string(kind) or pa.types.is_binary(kind)
        if not is_plain and not (part == "key" and pa.types.is_integer(kind)):
            allowed = "text, binary or a whole number" if part == "key" else "text or binary"
            raise SchemaError(
                f"{what}: column {name!r} is {type_name(kind)}, and the {part} of a record is {allowed}; make it "
                f"one in a with_columns before the sink",
                column=name,
            )
