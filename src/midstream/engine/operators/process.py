"""process: a user's function over each key's rows and what it remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.rows import from_rows, to_rows
from midstream.data.times import EpochTimes
from midstream.engine.failure import USER_ERRORS, failed, row_at
from midstream.engine.operators.base import ONLY, AtWork
from midstream.errors import SchemaError, StateError
from midstream.flow.functions import label_of
from midstream.flow.model import Form, Operator, Process
from midstream.flow.schema import conform
from midstream.ids import Revision
from midstream.state.handle import State
from midstream.state.keeper import HandleKeeper, Migrations
from midstream.state.keys import KeyGroups, Namespace, decode_key, group_keys
from midstream.state.task import TaskState
from midstream.state.values import ObjectCodec

TIMERS_AT_ONCE = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def keeper_of(
    operator: Operator, spec: Process, takes: pa.Schema, state: TaskState, times: EpochTimes, *, has_levels: bool
) -> HandleKeeper:
    """The handles of a process in a task; all revisions of its function share them."""
    key_schema = _key_schema(spec, takes)

    def show(stored: bytes) -> object:
        return _plain(decode_key(stored, key_schema))

    what = f"process {operator.name!r}"
    codec = ObjectCodec(what, show)
    return HandleKeeper(what, state, codec, times=times, ttl_us=spec.ttl_us, has_levels=has_levels)


def process_at_work(
    operator: Operator,
    spec: Process,
    function: Callable[..., Any],
    takes: pa.Schema,
    keeper: HandleKeeper,
    revision: Revision,
    migrations: Sequence[tuple[Revision, Callable[[Any, State], None]]] = (),
    *,
    has_event_times: bool = True,
) -> AtWork:
    """A process in place."""
    key_schema = _key_schema(spec, takes)
    steps = [(number, partial(_migrate, operator, key_schema, function)) for number, function in migrations]
    idle = idle_timers(function, has_timers=spec.has_timers, has_event_times=has_event_times)
    work = _Process(operator, spec, function, key_schema, keeper, revision, steps, idle)
    entry = work.rows if spec.form is Form.ROWS else work.batches
    return AtWork((entry,), work.finish, is_quiet=not spec.has_timers)


def idle_timers(function: Callable[..., Any], *, has_timers: bool, has_event_times: bool) -> dict[Namespace, str]:
    """Which timers would never do anything for a function, and why."""
    names = {Namespace.EVENT_TIMER: "event_timer", Namespace.CLOCK_TIMER: "clock_timer"}
    if not has_timers:
        why = (
            f"was called, but {label_of(function)} has no method on_timer(key, time, state) that could be called when "
            f"the time has come. Give an object with __call__ and on_timer"
        )
        return {namespace: f"{name} {why}" for namespace, name in names.items()}
    if not has_event_times:
        return {
            Namespace.EVENT_TIMER: "event_timer was called, but no source of the flow has an event time, so there is "
            "no watermark and the timer would never fire. Give the source event_time=, or use clock_timer"
        }
    return {}


def _key_schema(spec: Process, takes: pa.Schema) -> pa.Schema:
    return pa.schema([takes.field(name) for name in spec.keys])


def _migrate(
    operator: Operator, key_schema: pa.Schema, function: Callable[[Any, State], None], stored: bytes, state: State
) -> None:
    key = _plain(decode_key(stored, key_schema))
    try:
        function(key, state)
    except USER_ERRORS as error:
        raise failed(operator.name, error, {"key": key, "migrate": label_of(function)}) from error


class _Process:
    def __init__(
        self,
        operator: Operator,
        spec: Process,
        function: Callable[..., Any],
        key_schema: pa.Schema,
        keeper: HandleKeeper,
        revision: Revision,
        migrations: Migrations,
        idle: Mapping[Namespace, str],
    ) -> None:
        self._operator = operator
        self._spec = spec
        self._function = function
        self._key_schema = key_schema
        self._keeper = keeper
        self._revision = revision
        self._migrations = migrations
        self._what = keeper.what
        self._idle = idle

    def rows(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Call the function for each row."""
        groups = self._groups(batch)
        keys, states = self._keys(groups), self._states(groups)
        function, results, sources = self._function, list[dict[str, Any]](), list[int]()
        number = 0
        try:
            for number, (row, group) in enumerate(zip(to_rows(batch), groups.group_of_row.tolist(), strict=True)):
                result = function(keys[group], row, states[group])
                if result is None:
                    continue
                if isinstance(result, dict):
                    results.append(result)
                    sources.append(number)
                else:
                    many = self._several(result)
                    results += many
                    sources += [number] * len(many)
        except USER_ERRORS as error:
            raise failed(self._operator.name, error, row_at(batch, number)) from error
        try:
            return {ONLY: from_rows(results, self._operator.schema, self._what)}
        except SchemaError as error:
            index = error.fields.get("row_index")
            guilty = None if index is None else sources[index]
            raise failed(self._operator.name, error, row_at(batch, guilty)) from error

    def batches(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Call the function for the whole slice."""
        groups = self._groups(batch)
        state = BatchState(self._states(groups), self._what)
        try:
            result = conform(
                self._function(Keys(self._keys(groups), groups.group_of_row), batch, state),
                self._operator.schema,
                self._what,
            )
            if self._spec.one_to_one and result.num_rows > batch.num_rows:
                raise SchemaError(f"{self._what} is one_to_one but gave {result.num_rows} rows for {batch.num_rows}")
        except USER_ERRORS as error:
            # Not called again on halves to find the row: its state would have changed meanwhile.
            raise failed(self._operator.name, error, None) from error
        return {ONLY: result}

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Fire the timers that are due, then write what has changed."""
        if self._spec.has_timers:
            yield from self._fire()
        try:
            self._keeper.write(self._revision)
        except StateError as error:
            raise failed(self._operator.name, error, None) from error

    def _fire(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        results: list[dict[str, Any]] = []
        self._keeper.idle_timers = self._idle
        for stored, time in self._keeper.due_timers():
            key = _plain(decode_key(stored, self._key_schema))
            when = _EPOCH + timedelta(microseconds=time)
            try:
                [state] = self._keeper.handles([stored], self._migrations)
                result = self._function.on_timer(key, when, state)  # type: ignore[attr-defined]
                if result is not None:
                    results += [result] if isinstance(result, dict) else self._several(result)
            except USER_ERRORS as error:
                raise failed(self._operator.name, error, {"key": key, "timer": when}) from error
            if len(results) >= TIMERS_AT_ONCE:
                yield {ONLY: self._emitted(results)}
                results = []
        if results:
            yield {ONLY: self._emitted(results)}

    def _emitted(self, results: list[dict[str, Any]]) -> pa.RecordBatch:
        try:
            return from_rows(results, self._operator.schema, f"{self._what}, on_timer")
        except SchemaError as error:
            raise failed(self._operator.name, error, None) from error

    def _several(self, result: Any) -> list[dict[str, Any]]:
        try:
            rows = list(result)
        except TypeError:
            raise SchemaError(
                f"{self._what} returned {type(result).__name__} {result!r:.60}; expected a dict (one row), None, or "
                f"several dicts"
            ) from None
        if self._spec.one_to_one and len(rows) > 1:
            raise SchemaError(f"{self._what} is one_to_one but gave {len(rows)} rows for one")
        return rows

    def _groups(self, batch: pa.RecordBatch) -> KeyGroups:
        try:
            return group_keys(batch, self._spec.keys, self._what)
        except StateError as error:
            raise failed(self._operator.name, error, row_at(batch, error.fields.get("row_index"))) from error

    def _states(self, groups: KeyGroups) -> list[State]:
        self._keeper.idle_timers = self._idle  # revisions share the keeper
        try:
            return self._keeper.handles(groups.keys, self._migrations)
        except StateError as error:
            raise failed(self._operator.name, error, None) from error

    def _keys(self, groups: KeyGroups) -> list[Any]:
        rows = to_rows(groups.distinct)
        if len(self._spec.keys) == 1:
            [name] = self._spec.keys
            return [row[name] for row in rows]
        return [tuple(row.values()) for row in rows]


class Keys(Sequence[Any]):
    """The distinct keys of a slice, for batch functions; ``group_of_row`` says which of them each row has."""

    def __init__(self, keys: list[Any], group_of_row: npt.NDArray[np.int64]) -> None:
        self._keys = keys
        self.group_of_row = group_of_row

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index]

    def __len__(self) -> int:
        return len(self._keys)


class BatchState:
    """The values of all keys of a slice, for batch functions."""

    def __init__(self, states: list[State], what: str) -> None:
        self._states = states
        self._what = what

    def get(self, default: Any = None) -> list[Any]:
        """One value per key, the default where there is none."""
        return [state.get(default) for state in self._states]

    def set(self, values: Sequence[Any]) -> None:
        """Remember one value per key."""
        if len(values) != len(self._states):
            raise StateError(
                f"{self._what}: {len(values)} values were set for {len(self._states)} keys; give one for each"
            )
        for state, value in zip(self._states, values, strict=True):
            state.set(value)

    def __getitem__(self, index: int) -> State:
        """The state of one of the keys, with all that a row function could do with it."""
        return self._states[index]


def _plain(key: tuple[Any, ...]) -> Any:
    """A key as functions see it: the value itself if there is one column."""
    return key[0] if len(key) == 1 else key
