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

ERRORS = "errors"
"""The branch for bad rows of an operator with ``on_error="branch"``: the input's own columns, and the reason."""

ERRORS_RIGHT = "errors_right"
"""The same for the right input of a join."""

ERROR_COLUMN = "error"
"""The column of an errors branch that holds the reason."""


class OnError(enum.StrEnum):
    """What becomes of a bad row: the epoch fails, with the row in the error; or the row leaves by a branch."""

    FAIL = "fail"
    BRANCH = "branch"


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
    """One output of an operator. A route has several, one per branch; an operator with windows has one for late rows,
    and one with ``on_error="branch"`` has one for bad rows; elsewhere ``branch`` is empty."""

    operator: str
    branch: str = ""

    def __str__(self) -> str:
        return f"{self.operator}[{self.branch}]" if self.branch else self.operator


@dataclass(frozen=True)
class Source:
    """Rows come in. ``event_time`` names the column that says when an event happened or was due, if there is one;
    events may arrive ``delay_us`` later than others.

    Event times more than ``max_ahead_us`` ahead of the epoch's clock do not move the watermark. While the source has
    given no row for ``idle_us``, the watermark goes by the other sources.
    """

    event_time: str | None = None
    delay_us: int = 0
    max_ahead_us: int | None = None
    idle_us: int | None = None


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
    """A node of the graph. ``schema`` is that of the rows it emits (for a sink: of the rows it takes).

    ``on_error`` says what becomes of rows that its function, key or time cannot take.
    """

    name: str
    spec: Spec
    inputs: tuple[Port, ...]
    schema: pa.Schema
    on_error: OnError = OnError.FAIL

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
        match self.spec:
            case Sink():
                branches: tuple[str, ...] = ()
            case Route():
                branches = self.spec.branches
            case _:
                branches = ("", *self.late_branches)
        return tuple(Port(self.name, branch) for branch in (*branches, *self.error_branches))

    @property
    def late_branches(self) -> tuple[str, ...]:
        """The branches for late rows, one for each input that may have some."""
        match self.spec:
            case Join():
                return (LATE, LATE_RIGHT)
            case Aggregate(window=window) if window is not None:
                return (LATE,)
            case Transact(timed=True):
                return (LATE,)
            case _:
                return ()

    @property
    def error_branches(self) -> tuple[str, ...]:
        """The branches for bad rows, one for each input; none when a bad row fails the epoch."""
        if self.on_error is OnError.FAIL:
            return ()
        return (ERRORS, ERRORS_RIGHT) if isinstance(self.spec, Join) else (ERRORS,)

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
    if port.branch in producer.late_branches:
        return port_schema(operators, producer.inputs[port.branch == LATE_RIGHT])
    if port.branch in producer.error_branches:
        if isinstance(producer.spec, Source):
            return errors_schema(producer.spec, producer.schema)
        return errors_schema(producer.spec, port_schema(operators, producer.inputs[port.branch == ERRORS_RIGHT]))
    return producer.schema


def errors_schema(spec: Spec, takes: pa.Schema) -> pa.Schema:
    """Schema of the bad rows of an operator: the columns that it takes, and the reason.

    Where a timer of a process fails there is no row, only a key, so the other columns may be null.

    >>> errors_schema(Map(Form.ROWS), pa.schema([("n", pa.int64())])).names
    ['n', 'error']
    """
    columns = list(takes)
    if isinstance(spec, Process):
        columns = [column if column.name in spec.keys else column.with_nullable(True) for column in columns]
    return pa.schema([*columns, pa.field(ERROR_COLUMN, pa.string(), nullable=False)])


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
        """Schema of the rows that leave a port. Late rows are as they came in; bad ones have the reason, too."""
        return port_schema(self._by_name, port)

    @cached_property
    def event_times(self) -> dict[str, str]:
        """For each operator, the event-time column of a source above it that its own rows still carry."""
        found = ((op.name, self.event_time_of(Port(op.name))) for op in self.operators)
        return {name: column for name, column in found if column is not None}

    def event_time_of(self, port: Port) -> str | None:
        """The same for the rows that leave a port: late and bad ones carry what came in."""
        return next(iter(self._event_times[self._carrier(port)]), None)

    def _carrier(self, port: Port) -> str:
        """The operator whose rows leave by a port, as far as their own columns go."""
        op = self[port.operator]
        while op.inputs and port.branch in (*op.late_branches, *op.error_branches):
            port = op.inputs[port.branch in (LATE_RIGHT, ERRORS_RIGHT)]
            op = self[port.operator]
        return op.name

    @cached_property
    def _event_times(self) -> dict[str, dict[str, None]]:
        above: dict[str, dict[str, None]] = {}
        for op in self.operators:
            columns = dict.fromkeys(column for port in op.inputs for column in above[self._carrier(port)])
            if isinstance(op.spec, Source) and op.spec.event_time:
                columns[op.spec.event_time] = None
            above[op.name] = {
                column: None
                for column in columns
                if column in op.schema.names and pa.types.is_timestamp(op.schema.field(column).type)
            }
        return above

    def is_keyed(self, port: Port) -> bool:
        """Whether rows that leave by this port go to the task that owns their key. Bad rows have none."""
        return isinstance(self[port.operator].spec, KeyBy) and not port.branch

    @property
    def edges(self) -> tuple[tuple[Port, str], ...]:
        """Every (output port, consumer) pair, in the consumers' order."""
        return tuple((port, op.name) for op in self.operators for port in op.inputs)
