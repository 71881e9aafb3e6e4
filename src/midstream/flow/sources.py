"""Built-in sources: an open-loop generator for load, and a list of epochs for tests.

Both are descriptions. They define every row, independent of the engine and of how it cuts the stream into epochs and
partitions; a runtime only decides how many rows are due. That makes replays and restarts exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from midstream.data.schema import Declared, conform, ddl_of, parse_ddl, require_columns, type_name
from midstream.errors import SchemaError, SourceError
from midstream.flow.schedules import NEVER_US, Constant, Indexes, Schedule, SquareWave, Step

__all__ = [
    "BLOCK",
    "NEVER_US",
    "Constant",
    "GeneratorSource",
    "ListSource",
    "Schedule",
    "SquareWave",
    "Step",
]

BLOCK = 4096
"""The number of rows a generator makes at once. Part of the definition of its rows: random draws are seeded per block.
"""

_EVENT_TIME = pa.timestamp("us", tz="UTC")
_SNAP_BLOCKS = 4

Make = Callable[[Indexes, np.random.Generator], pa.RecordBatch | Mapping[str, Any]]


@dataclass(frozen=True)
class GeneratorSource:
    """An open-loop load: events are due by a schedule, whether or not the job is ready for them.

    ``make(indexes, rng)`` returns the rows of these event indexes, as a record batch or a dict of columns, in the
    schema ``returns`` (Spark DDL). A last column, ``time_column``, holds the time for which each event was *scheduled*,
    so latency measured from it includes every wait. ``rate`` is events per second, or a schedule. The stream ends after
    ``limit`` events; ``max_rows_per_epoch`` bounds an epoch, and further due events wait for the next one.

    Event i is the same in every run with the same ``seed``, however the stream is cut: ``make`` is always called with
    a whole block of :data:`BLOCK` indexes and a random generator seeded by ``(seed, block)``, and rows outside the
    requested range (also those past ``limit``) are dropped. So ``make`` must depend only on its arguments.

    >>> source = GeneratorSource(lambda index, rng: {"user": index % 3}, "user bigint", rate=1000)
    >>> [batch] = source.rows(4, 6, start_us=0)
    >>> batch["user"].to_pylist(), batch["event_time"].cast("int64").to_pylist()
    ([1, 2], [4000, 5000])
    """

    make: Make
    returns: Declared
    rate: Schedule | float
    _: KW_ONLY
    seed: int = 0
    time_column: str = "event_time"
    partitions: int = 2
    limit: int | None = None
    max_rows_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise SourceError(f"GeneratorSource: make is {self.make!r}; give a function of (indexes, rng)")
        object.__setattr__(self, "returns", ddl_of(self.returns))  # workers need no pyspark to read it
        _require_at_least(0, self.seed, "GeneratorSource: seed")
        _require_at_least(1, self.partitions, "GeneratorSource: partitions")
        for name in ("limit", "max_rows_per_epoch"):
            if getattr(self, name) is not None:
                _require_at_least(1, getattr(self, name), f"GeneratorSource: {name}")
        if not self.time_column or self.time_column.lower() in (name.lower() for name in self._made.names):
            raise SchemaError(
                f"GeneratorSource: the time column is {self.time_column!r}, and make returns {self.returns!r}; the "
                "time column is added for you, so leave it out of returns, or name another with time_column=",
                column=self.time_column,
            )
        if not isinstance(self.rate, Schedule):
            object.__setattr__(self, "rate", Constant(self.rate))

    @property
    def schedule(self) -> Schedule:
        """When events are due; :class:`Constant` if the rate was given as a number."""
        assert isinstance(self.rate, Schedule)
        return self.rate

    @cached_property
    def schema(self) -> pa.Schema:
        """Schema of the rows: the columns of ``returns``, then the time column."""
        return self._made.append(pa.field(self.time_column, _EVENT_TIME))

    @property
    def event_time(self) -> str:
        """Name of the time column."""
        return self.time_column

    @property
    def total(self) -> int | None:
        """The total number of events; ``None`` if the stream never ends."""
        return min((n for n in (self.limit, self.schedule.total) if n is not None), default=None)

    def due(self, elapsed_us: int) -> int:
        """How many events are due in the first ``elapsed_us`` microseconds of the stream."""
        count = self.schedule.count_until(elapsed_us)
        return count if self.limit is None else min(count, self.limit)

    def split(self, start_index: int, end_index: int) -> tuple[tuple[int, int], ...]:
        """The range of each partition, for an epoch of the events [start_index, end_index).

        Partitions get contiguous shares of (nearly) equal size, so that events stay in order within each partition. An
        epoch of many blocks is cut at block boundaries, because a block that is cut has to be made twice.

        >>> GeneratorSource(lambda index, rng: {"n": index}, "n bigint", 10, partitions=3).split(0, 10)
        ((0, 3), (3, 6), (6, 10))
        """
        count, parts = end_index - start_index, self.partitions
        cuts = [start_index + count * part // parts for part in range(parts + 1)]
        if count >= parts * _SNAP_BLOCKS * BLOCK:
            cuts[1:-1] = [(cut + BLOCK // 2) // BLOCK * BLOCK for cut in cuts[1:-1]]
        return tuple(pairwise(cuts))

    def rows(self, start_index: int, end_index: int, start_us: int) -> Iterator[pa.RecordBatch]:
        """The events [start_index, end_index) of a stream that started at ``start_us`` (µs since 1970, UTC).

        Yields batches of at most :data:`BLOCK` rows, each made on demand.
        """
        if start_index >= end_index:
            return
        for block in range(start_index // BLOCK, -(-end_index // BLOCK)):
            first = block * BLOCK
            start, end = max(start_index, first), min(end_index, first + BLOCK)
            made = self._block(block).slice(start - first, end - start)
            times = self.schedule.time_of(np.arange(start, end))
            if int(times[-1]) == NEVER_US:
                raise SourceError(f"GeneratorSource: event {end - 1} is never due; the stream has {self.total} events")
            event_time = pa.array(times + start_us).view(_EVENT_TIME)
            yield pa.RecordBatch.from_arrays([*made.columns, event_time], schema=self.schema)

    @cached_property
    def _made(self) -> pa.Schema:
        return parse_ddl(self.returns)

    def _block(self, block: int) -> pa.RecordBatch:
        what = "GeneratorSource: what make returned"
        indexes = np.arange(block * BLOCK, (block + 1) * BLOCK)
        made = self.make(indexes, np.random.default_rng((self.seed, block)))
        batch = _from_columns(made, self._made, what) if isinstance(made, Mapping) else conform(made, self._made, what)
        if batch.num_rows != BLOCK:
            raise SourceError(
                f"{what} has {batch.num_rows} rows for {BLOCK} indexes; give exactly one row for each index"
            )
        return batch


@dataclass(frozen=True, init=False)
class ListSource:
    """Rows as a list of epochs, for tests. On Spark each epoch becomes one micro-batch, whatever the trigger.

    ``schema`` is Spark DDL; a column that a row lacks is null. ``event_time`` names the event-time column, if any.

    >>> source = ListSource([[{"n": 1}, {"n": 2}], [{"n": 3}]], "n bigint")
    >>> [epoch.to_pylist() for epoch in source.epochs]
    [[{'n': 1}, {'n': 2}], [{'n': 3}]]
    """

    epochs: tuple[pa.RecordBatch, ...]
    schema: pa.Schema
    event_time: str | None
    partitions: int

    def __init__(
        self,
        epochs: Sequence[Sequence[Mapping[str, Any]]],
        schema: Declared,
        *,
        event_time: str | None = None,
        partitions: int = 1,
    ) -> None:
        declared = parse_ddl(schema)
        _require_at_least(1, partitions, "ListSource: partitions")
        if event_time is not None:
            require_columns(declared, [event_time], "ListSource: event_time")
            found = declared.field(event_time).type
            if found != _EVENT_TIME:
                raise SchemaError(
                    f"ListSource: event_time column {event_time!r} is {type_name(found)}; it must be timestamp",
                    column=event_time,
                )
        batches = tuple(_from_rows(rows, declared, f"ListSource: epoch {n}") for n, rows in enumerate(epochs))
        object.__setattr__(self, "epochs", batches)
        object.__setattr__(self, "schema", declared)
        object.__setattr__(self, "event_time", event_time)
        object.__setattr__(self, "partitions", partitions)

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        *,
        schema: Declared,
        epoch_rows: int,
        event_time: str | None = None,
        partitions: int = 1,
    ) -> ListSource:
        """Cut one list of rows into epochs of ``epoch_rows`` rows; the last one may be shorter.

        >>> source = ListSource.of([{"n": n} for n in range(5)], schema="n int", epoch_rows=2)
        >>> [epoch.num_rows for epoch in source.epochs]
        [2, 2, 1]
        """
        _require_at_least(1, epoch_rows, "ListSource.of: epoch_rows")
        epochs = [rows[at : at + epoch_rows] for at in range(0, len(rows), epoch_rows)]
        return cls(epochs, schema, event_time=event_time, partitions=partitions)

    def batches(self, epoch: int, partition: int) -> pa.RecordBatch:
        """The rows of one partition in one epoch: a contiguous share, possibly empty."""
        batch = self.epochs[epoch]
        start = batch.num_rows * partition // self.partitions
        return batch.slice(start, batch.num_rows * (partition + 1) // self.partitions - start)


def _require_at_least(least: int, value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SourceError(f"{what} is {value!r}; give a whole number of at least {least}")


def _from_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema, what: str) -> pa.RecordBatch:
    for row in rows:
        if not isinstance(row, Mapping):
            raise SchemaError(f"{what}: a row is {row!r}; give dicts")
        require_columns(schema, row, what)
    return _from_columns({name: [row.get(name) for row in rows] for name in schema.names}, schema, what)


def _from_columns(columns: Mapping[str, Any], schema: pa.Schema, what: str) -> pa.RecordBatch:
    if set(columns) != set(schema.names):
        conform(pa.RecordBatch.from_pydict({name: [] for name in columns}), schema, what)  # raises the error
    arrays = [_column(columns[field.name], field, what) for field in schema]
    lengths = {field.name: len(array) for field, array in zip(schema, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise SchemaError(f"{what}: columns differ in length ({lengths}); give one value for each row")
    return conform(pa.RecordBatch.from_arrays(arrays, schema=schema), schema, what)


def _column(values: Any, field: pa.Field, what: str) -> pa.Array:
    try:
        if pa.types.is_integer(field.type) and isinstance(values, Sequence):
            # With a type, Arrow would truncate 1.5 in a list to 1; a cast refuses.
            return pa.array(values).cast(field.type)
        array = pa.array(values, type=field.type)
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(
            f"{what}: column {field.name!r} is declared {type_name(field.type)}, and the values do not fit: {error}; "
            "give values of that type, or declare another",
            column=field.name,
        ) from error
