"""The flow as data: named operators and the edges between them, frozen.

The builder makes a :class:`Graph`, the planner reads it, and nothing ever changes one. An operator's description is
separate from its *payload*, the user's object (a function, a table, a stream, a sink target): descriptions are small,
comparable and picklable, and travel to workers; payloads stay on the driver until they are stored.

This module has the operators that give a graph its structure; :mod:`midstream.operators` has all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from midstream.data.schema import to_ddl
from midstream.errors import FunctionError, SchemaError
from midstream.flow.functions import check_callable, pack, refuse_timers
from midstream.flow.spec import (
    ERRORS_RIGHT,
    LATE_RIGHT,
    Contract,
    Delivery,
    InputChange,
    OnError,
    SinkTable,
    Spec,
)
from midstream.storage.blobs import Blob


@dataclass(frozen=True)
class Port:
    """One output of an operator. A route has one port per branch. Operators with windows have an additional port for
    late rows, operators with ``on_error="branch"`` one for bad rows. All other ports have an empty ``branch``."""

    operator: str
    branch: str = ""

    def __str__(self) -> str:
        return f"{self.operator}[{self.branch}]" if self.branch else self.operator


@dataclass(frozen=True)
class Source(Spec):
    """Rows enter the flow. ``event_time`` names the column with the time at which an event happened or was due, if any;
    events may arrive up to ``delay_us`` later than others.

    Event times more than ``max_ahead_us`` ahead of the epoch's clock do not move the watermark. When the source has
    emitted no row for ``idle_us``, the watermark follows the other sources.
    """

    kind: ClassVar[str] = "source"
    is_inlet: ClassVar[bool] = True
    reads_stream: ClassVar[bool] = True

    event_time: str | None = None
    delay_us: int = 0
    max_ahead_us: int | None = None
    idle_us: int | None = None


@dataclass(frozen=True)
class KeyBy(Spec):
    """The operator before an exchange: rows with equal values in ``columns`` meet in one task downstream. Without
    columns, all rows meet in one task."""

    kind: ClassVar[str] = "key_by"

    columns: tuple[str, ...]

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The key columns."""
        return self.columns

    def check_input(self, change: InputChange) -> None:
        """The key columns must stay the same."""
        change.require(self.columns)


@dataclass(frozen=True)
class Union(Spec):
    """Merges several streams with the same schema into one."""

    kind: ClassVar[str] = "union"
    inputs_are_alike: ClassVar[bool] = True

    def check_input(self, change: InputChange) -> None:
        """Accept any columns: :meth:`derived` checks that all inputs have the same ones."""

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The common columns of all inputs."""
        for other in inputs[1:]:
            if not other.equals(inputs[0]):
                raise SchemaError(
                    f"after the change {what} would unite ({to_ddl(inputs[0])}) and ({to_ddl(other)}); update all its "
                    f"inputs, so that they have the same columns"
                )
        return self, inputs[0]


@dataclass(frozen=True)
class Transform(Spec):
    """A DataFrame → DataFrame function that Catalyst runs on the epoch's rows; divides the flow.

    Its payload is a pair: the function, and its equivalent for the local runtime or None.
    """

    kind: ClassVar[str] = "transform"
    is_inlet: ClassVar[bool] = True
    is_outlet: ClassVar[bool] = True
    runs_whole_epochs: ClassVar[bool] = True
    is_updatable: ClassVar[bool] = True
    declares_columns: ClassVar[bool] = True

    @property
    def contract(self) -> Contract:
        """A query may return any number of rows."""
        return Contract.ONE_TO_MANY

    @property
    def blocks(self) -> bool:
        """A transform is one query over all rows of an epoch."""
        return True

    def begins(self, branch: str) -> bool:
        """A query does not reveal which row resulted from which."""
        return True

    def gives_many(self, branch: str) -> bool:
        """Every row that it emits counts as a new source row."""
        return False

    @property
    def function_takes(self) -> tuple[str, ...]:
        """The transform's function takes the epoch's rows as a DataFrame."""
        return ("a DataFrame",)

    def packed(self, payload: Any, operator: str) -> Blob | None:
        """Stored so that a later revert can restore it. The function runs on the driver and may hold DataFrames, which
        cannot be stored."""
        try:
            return pack(payload[0], operator)
        except FunctionError:
            return None

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """Replace the function of each runtime."""
        check_callable(function, operator, *self.function_takes)
        refuse_timers(function, operator)
        if local is not None:
            check_callable(local, operator, "a pyarrow.Table")
        return self, (function, local)

    def check_input(self, change: InputChange) -> None:
        """Accept any columns: Catalyst checks whether the query can take them."""


@dataclass(frozen=True)
class Sink(Spec):
    """Rows leave the flow: how they reach the sink and, for files, where and how tasks write them.

    ``wanted`` is the number of rows that the sink reads, if it does not read all of them.
    """

    kind: ClassVar[str] = "sink"
    is_outlet: ClassVar[bool] = True

    delivery: Delivery = Delivery.FRAME
    table: SinkTable | None = None
    wanted: int | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """None: nothing follows a sink."""
        return ()

    def check_input(self, change: InputChange) -> None:
        """Accept any columns: what a sink can take depends on when the change takes effect, which is checked later."""


@dataclass(frozen=True)
class Operator:
    """A node of the graph. ``schema`` is the schema of the rows it emits (for a sink: of the rows it takes).

    ``on_error`` decides what happens to rows that fail in its function or have an unusable key or time.
    """

    name: str
    spec: Spec
    inputs: tuple[Port, ...]
    schema: pa.Schema
    on_error: OnError = OnError.FAIL

    @property
    def kind(self) -> str:
        """The operator's kind, as users know it."""
        return self.spec.kind

    @property
    def ports(self) -> tuple[Port, ...]:
        """The operator's outputs, in order."""
        spec = self.spec
        return tuple(Port(self.name, each) for each in (*spec.outputs, *spec.late_branches, *self.error_branches))

    @property
    def late_branches(self) -> tuple[str, ...]:
        """The branches for late rows, one for each input that may have late rows."""
        return self.spec.late_branches

    @property
    def error_branches(self) -> tuple[str, ...]:
        """The branches for bad rows, one for each input; none when a bad row fails the epoch."""
        return () if self.on_error is OnError.FAIL else self.spec.error_branches

    @property
    def contract(self) -> Contract:
        """How many output rows one input row can lead to, over all of the operator's ports."""
        return self.spec.contract

    @property
    def delivery(self) -> Delivery | None:
        """How rows reach it, if it is a sink."""
        return self.spec.delivery if isinstance(self.spec, Sink) else None

    @property
    def table(self) -> SinkTable | None:
        """Where and how tasks write its files, if it is a file sink."""
        return self.spec.table if isinstance(self.spec, Sink) else None


def port_schema(operators: Mapping[str, Operator], port: Port) -> pa.Schema:
    """Schema of the rows that leave a port of one of these operators."""
    producer = operators[port.operator]
    if port.branch in producer.late_branches:
        return port_schema(operators, producer.inputs[port.branch == LATE_RIGHT])
    if port.branch in producer.error_branches:
        takes = producer.schema  # a source has no input
        if producer.inputs:
            takes = port_schema(operators, producer.inputs[port.branch == ERRORS_RIGHT])
        return producer.spec.errors_schema(takes)
    return producer.schema


@dataclass(frozen=True)
class Graph:
    """A whole flow. ``operators`` are in topological order: inputs before their consumers.

    ``payloads`` holds the user's objects by operator name: the function, table, stream or sink target. ``written_for``
    holds the columns that an operator's inputs had when it got its function, if they have changed since. A change must
    keep those columns, but not columns that were added later.
    """

    name: str
    operators: tuple[Operator, ...]
    payloads: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    written_for: Mapping[str, tuple[pa.Schema, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _by_name(self) -> dict[str, Operator]:
        return {op.name: op for op in self.operators}

    @cached_property
    def _consumers(self) -> dict[Port, tuple[str, ...]]:
        found: dict[Port, list[str]] = {}
        for op in self.operators:
            for port in dict.fromkeys(op.inputs):
                found.setdefault(port, []).append(op.name)
        return {port: tuple(names) for port, names in found.items()}

    def __getitem__(self, name: str) -> Operator:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def consumers(self, port: Port) -> tuple[str, ...]:
        """Names of the operators that read this port; if there are several, each gets every row."""
        return self._consumers.get(port, ())

    def of(self, spec: type[Spec]) -> tuple[Operator, ...]:
        """All operators of one kind, e.g. ``graph.of(Sink)``."""
        return tuple(op for op in self.operators if isinstance(op.spec, spec))

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The descriptions of all sources, by name."""
        return {op.name: op.spec for op in self.operators if isinstance(op.spec, Source)}

    def reads_as(self, other: Graph) -> bool:
        """Whether another flow has the same sources, reading the same streams."""
        names = self.sources.keys()
        return names == other.sources.keys() and all(
            self.payloads.get(name) is other.payloads.get(name) for name in names
        )

    def schema_of(self, port: Port) -> pa.Schema:
        """Schema of the rows that leave a port. Late rows have the input's columns; bad rows also have the reason."""
        return port_schema(self._by_name, port)

    @cached_property
    def event_times(self) -> dict[str, str]:
        """For each operator, the event-time column of a source above it that its own rows still carry."""
        found = ((op.name, self.event_time_of(Port(op.name))) for op in self.operators)
        return {name: column for name, column in found if column is not None}

    def event_time_of(self, port: Port) -> str | None:
        """The same for the rows that leave a port: late and bad rows carry the input's columns."""
        return next(iter(self._event_times[self._carrier(port)]), None)

    def _carrier(self, port: Port) -> str:
        """The operator that defined the columns of the rows that leave by a port."""
        op = self[port.operator]
        while op.inputs and port.branch in (*op.late_branches, *op.error_branches):
            port = op.inputs[port.branch in (LATE_RIGHT, ERRORS_RIGHT)]
            op = self[port.operator]
        return op.name

    @cached_property
    def _event_times(self) -> dict[str, dict[str, None]]:
        above: dict[str, dict[str, None]] = {}
        for op in self.operators:
            carried = dict.fromkeys(column for port in op.inputs for column in above[self._carrier(port)])
            columns = dict.fromkeys((op.spec.kept((column,)) or (column,))[0] for column in carried)
            if op.name in self.sources and (time := self.sources[op.name].event_time):
                columns[time] = None
            above[op.name] = {
                column: None
                for column in columns
                if column in op.schema.names and pa.types.is_timestamp(op.schema.field(column).type)
            }
        return above

    def is_keyed(self, port: Port) -> bool:
        """Whether rows that leave by this port go to the task that owns their key. Bad rows have no key."""
        return self[port.operator].spec.partition_by is not None and not port.branch

    def key_of(self, port: Port) -> tuple[str, ...] | None:
        """The columns of a key_by above this port that have not been touched since, under the names that they have now.

        Rows with equal values in them are in one task.
        """
        op = self[port.operator]
        return None if port.branch in (*op.late_branches, *op.error_branches) else self._keys[op.name]

    @cached_property
    def _keys(self) -> dict[str, tuple[str, ...] | None]:
        found: dict[str, tuple[str, ...] | None] = {}
        for op in self.operators:
            key = op.spec.partition_by
            if key is None and op.inputs:
                port = op.inputs[0]
                above = self[port.operator]
                if port.branch not in (*above.late_branches, *above.error_branches):
                    key = op.spec.kept(found[above.name] or ()) or None
            found[op.name] = key
        return found

    @property
    def edges(self) -> tuple[tuple[Port, str], ...]:
        """Every (output port, consumer) pair, in the consumers' order."""
        return tuple((port, op.name) for op in self.operators for port in op.inputs)
