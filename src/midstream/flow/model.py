"""The flow as data: named operators and the edges between them, frozen.

The builder makes a :class:`Graph`, the planner reads it, and nothing ever changes one. An operator's description is
kept apart from what the user handed over for it (a function, a table, a stream, a sink target): descriptions are
small, comparable and picklable, and travel to workers; the user's objects stay on the driver until they are stored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from midstream.flow.aggregations import Aggregation, AggregationKind
from midstream.flow.transactions.tables import Table
from midstream.flow.windows import Window

LATE = "late"
"""The branch for rows that came too late for an operator's windows: the input's own rows."""

LATE_RIGHT = "late_right"
"""The same for the right input of a join."""


class Form(enum.StrEnum):
    """How a function is called: with one dict per row, or with one Arrow record batch per slice."""

    ROWS = "rows"
    BATCHES = "batches"


class Contract(enum.StrEnum):
    """How many outputs one input can give; what decides which operators must change together."""

    ONE_TO_ONE = "one-to-one"
    ONE_TO_MANY = "one-to-many"


class How(enum.StrEnum):
    """What a lookup or join does with a (left) row that has no match: drop it, or keep it with nulls."""

    INNER = "inner"
    LEFT = "left"


@dataclass(frozen=True)
class Port:
    """One output of an operator. A route has several, one per branch, and an operator with windows has one for late
    rows; elsewhere ``branch`` is empty."""

    operator: str
    branch: str = ""

    def __str__(self) -> str:
        return f"{self.operator}[{self.branch}]" if self.branch else self.operator


@dataclass(frozen=True)
class Source:
    """Rows come in. ``event_time`` names the column that says when an event happened or was due, if there is one;
    events may arrive ``delay_us`` later than others."""

    event_time: str | None = None
    delay_us: int = 0


@dataclass(frozen=True)
class Map:
    """Each row gives exactly one row."""

    form: Form


@dataclass(frozen=True)
class Filter:
    """Keeps the rows for which the function says so."""

    form: Form


@dataclass(frozen=True)
class FlatMap:
    """Each row gives any number of rows."""

    form: Form


@dataclass(frozen=True)
class KeyBy:
    """Rows with equal values in ``columns`` meet in one task downstream: the operator before an exchange. Without
    columns all rows do."""

    columns: tuple[str, ...]


@dataclass(frozen=True)
class Union:
    """Rows of several streams of one schema, as one stream."""


@dataclass(frozen=True)
class Route:
    """Each row goes to exactly one branch."""

    form: Form
    branches: tuple[str, ...]


@dataclass(frozen=True)
class Lookup:
    """Joins rows with a static table that every worker holds. ``on`` pairs stream columns with table columns."""

    on: tuple[tuple[str, str], ...]
    how: How
    unique: bool
    table_schema: pa.Schema


@dataclass(frozen=True)
class Transform:
    """A DataFrame → DataFrame function that Catalyst runs on the epoch's rows; divides the flow."""


@dataclass(frozen=True)
class Process:
    """A user's function over each key's rows and state. ``keys`` are the columns of the key_by before it.

    ``ttl_us``: state of a key that was not written for so long is gone. ``unique`` is as in a :class:`Join`.
    """

    keys: tuple[str, ...]
    form: Form
    one_to_one: bool = False
    ttl_us: int | None = None
    has_timers: bool = False
    unique: bool = False


@dataclass(frozen=True)
class Aggregate:
    """Aggregations per key: running ones, or per window of the event time in the column ``time``."""

    keys: tuple[str, ...]
    columns: tuple[tuple[str, Aggregation], ...]
    window: Window | None = None
    time: str | None = None

    @property
    def combinable(self) -> bool:
        """Whether rows may be added up anywhere: not by windows, nor when their order counts."""
        kinds = {aggregation.kind for _, aggregation in self.columns}
        return self.window is None and AggregationKind.LAST not in kinds


@dataclass(frozen=True)
class Distinct:
    """The first row of each key; with ``within_us`` the key is forgotten that long after that row's ``time``."""

    keys: tuple[str, ...]
    time: str | None = None
    within_us: int | None = None


@dataclass(frozen=True)
class Join:
    """Pairs of rows of two keyed streams with equal keys, in one window or at most ``within_us`` apart.

    ``left_keys`` and ``right_keys`` correspond by position; ``left_time`` and ``right_time`` name the event times.
    ``unique`` is the user's promise that at most one row comes out for each row of the *source*, as of a self-join on
    the primary key, so that a change of what stands behind it may begin there. Unlike ``one_to_one`` it says nothing of
    the operator's own inputs, and nothing checks it while the flow runs.
    """

    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    left_time: str
    right_time: str
    how: How
    window: Window | None = None
    within_us: int | None = None
    unique: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns as the result has them."""
        return self.left_keys


@dataclass(frozen=True)
class Transact:
    """Each row triggers a transaction over tables that all of them share, in the order of the column ``order_by``.

    ``which`` is the column that says by name which of the ``transactions`` a row triggers; rows that agree in the
    column ``domain`` have tables of their own. ``timed``: ``order_by`` is the event time of the source, so rows of
    before the watermark are late.
    """

    transactions: tuple[str, ...]
    tables: tuple[Table, ...]
    order_by: str
    which: str | None = None
    domain: str | None = None
    timed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns by which rows were brought together: none if all of them were."""
        return () if self.domain is None else (self.domain,)


@dataclass(frozen=True)
class Sink:
    """Rows go out. ``drains`` says that its writer reads every row exactly once, so that none need be kept for it."""

    drains: bool = True


Stateful = Process | Aggregate | Distinct | Join | Transact
"""Operators that keep state; they stand behind a key_by."""

Spec = Source | Map | Filter | FlatMap | KeyBy | Union | Route | Lookup | Transform | Sink | Stateful


@dataclass(frozen=True)
class Operator:
    """A node of the graph. ``schema`` is that of the rows it emits (for a sink: of the rows it takes)."""

    name: str
    spec: Spec
    inputs: tuple[Port, ...]
    schema: pa.Schema

    @property
    def kind(self) -> str:
        """The operator's kind as the user would say it.

        >>> Operator("m", FlatMap(Form.ROWS), (), pa.schema([])).kind
        'flat_map'
        """
        name = type(self.spec).__name__
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))

    @property
    def ports(self) -> tuple[Port, ...]:
        """The operator's outputs, in order."""
        if isinstance(self.spec, Sink):
            return ()
        if isinstance(self.spec, Route):
            return tuple(Port(self.name, branch) for branch in self.spec.branches)
        if isinstance(self.spec, Join):
            return (Port(self.name), Port(self.name, LATE), Port(self.name, LATE_RIGHT))
        if (isinstance(self.spec, Aggregate) and self.spec.window is not None) or (
            isinstance(self.spec, Transact) and self.spec.timed
        ):
            return (Port(self.name), Port(self.name, LATE))
        return (Port(self.name),)

    @property
    def contract(self) -> Contract:
        """How many outputs one input can give, over all of the operator's ports."""
        match self.spec:
            case FlatMap() | Transform() | Lookup(unique=False) | Aggregate() | Join() | Process(one_to_one=False):
                return Contract.ONE_TO_MANY
            case _:
                return Contract.ONE_TO_ONE


def port_schema(operators: Mapping[str, Operator], port: Port) -> pa.Schema:
    """Schema of the rows that leave a port of one of these operators."""
    producer = operators[port.operator]
    if not isinstance(producer.spec, Route) and port.branch in (LATE, LATE_RIGHT):
        return port_schema(operators, producer.inputs[port.branch == LATE_RIGHT])
    return producer.schema


@dataclass(frozen=True)
class Graph:
    """A whole flow. ``operators`` stand in an order in which inputs come before their consumers.

    ``payloads`` holds what the user handed over, by operator name: the function, table, stream or sink target.
    ``written_for`` holds the columns that an operator's inputs had when it was given its function, if they have had
    other ones since. Changes must leave the operator those, and not what happened to be added meanwhile.
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
        """Names of the operators that read this port; several of them mean that rows are replicated."""
        return self._consumers.get(port, ())

    def of(self, spec: type[Spec]) -> tuple[Operator, ...]:
        """All operators of one kind, e.g. ``graph.of(Sink)``."""
        return tuple(op for op in self.operators if isinstance(op.spec, spec))

    def schema_of(self, port: Port) -> pa.Schema:
        """Schema of the rows that leave a port. Late rows are as they came in."""
        return port_schema(self._by_name, port)

    @cached_property
    def event_times(self) -> dict[str, str]:
        """For each operator, the event-time column of a source above it that its own rows still carry."""
        above: dict[str, dict[str, None]] = {}
        for op in self.operators:
            columns = dict.fromkeys(column for port in op.inputs for column in above[port.operator])
            if isinstance(op.spec, Source) and op.spec.event_time:
                columns[op.spec.event_time] = None
            above[op.name] = {
                column: None
                for column in columns
                if column in op.schema.names and pa.types.is_timestamp(op.schema.field(column).type)
            }
        return {name: next(iter(columns)) for name, columns in above.items() if columns}

    @property
    def edges(self) -> tuple[tuple[Port, str], ...]:
        """Every (output port, consumer) pair, in the consumers' order."""
        return tuple((port, op.name) for op in self.operators for port in op.inputs)
