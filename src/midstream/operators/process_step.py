"""The step of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.data.key_space import KeySpace
from midstream.data.row_check import RowCheck
from midstream.data.rows import from_rows, to_rows
from midstream.data.schema import columns_of, conform
from midstream.data.times import EpochTimes
from midstream.engine.bad_rows import ErrorsBranch, Reasons, Screen, by_halves, checked_rows, merged, reason_of
from midstream.engine.failure import USER_ERRORS, failed, row_at
from midstream.engine.steps import ONLY, OperatorInTask
from midstream.errors import SchemaError, StateError
from midstream.flow.functions import label_of
from midstream.flow.model import Operator
from midstream.flow.spec import Form, OnError
from midstream.ids import Revision
from midstream.state.handle import State
from midstream.state.keeper import HandleKeeper, Migrations
from midstream.state.keyed_states import KeyedStates
from midstream.state.keys import Namespace, SortedKeys, decode_key, encode_key, group_keys
from midstream.state.task import TaskState
from midstream.state.undo import Undo
from midstream.state.values import ObjectCodec

if TYPE_CHECKING:
    from midstream.operators.process import Process

TIMERS_AT_ONCE = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def keeper_of(
    operator: Operator, spec: Process, takes: pa.Schema, state: TaskState, times: EpochTimes, *, has_levels: bool
) -> HandleKeeper:
    """The state handles of a process in a task; all revisions of its function share them."""
    key_schema = columns_of(takes, spec.keys)

    def show(stored: bytes) -> object:
        return _plain(decode_key(stored, key_schema, state.space))

    what = f"process {operator.name!r}"
    codec = ObjectCodec(what, show)
    undo = Undo() if operator.on_error is OnError.BRANCH else None
    return HandleKeeper(what, state, codec, times=times, ttl_us=spec.ttl_us, has_levels=has_levels, undo=undo)


def instantiate_process(
    operator: Operator,
    spec: Process,
    function: Callable[..., Any],
    takes: pa.Schema,
    keeper: HandleKeeper,
    revision: Revision,
    migrations: Sequence[tuple[Revision, Callable[[Any, State], None]]] = (),
    *,
    has_event_times: bool = True,
) -> OperatorInTask:
    """Build a process in a task."""
    key_schema = columns_of(takes, spec.keys)
    steps = [
        (number, partial(_migrate, operator, key_schema, keeper.space, function)) for number, function in migrations
    ]
    idle = idle_timers(function, has_timers=spec.has_timers, has_event_times=has_event_times)
    kind = _ProcessStep if operator.on_error is OnError.FAIL else _TolerantProcess
    work = kind(operator, spec, function, takes, keeper, revision, steps, idle)
    entry = work.rows if spec.form is Form.ROWS else work.batches
    return OperatorInTask((entry,), work.finish, is_quiet=not spec.has_timers, keyed=work.keyed)


def idle_timers(function: Callable[..., Any], *, has_timers: bool, has_event_times: bool) -> dict[Namespace, str]:
    """The kinds of timers that could never fire for a function, with the reasons."""
    names = {Namespace.EVENT_TIMER: "event_timer", Namespace.CLOCK_TIMER: "clock_timer"}
    if not has_timers:
        why = (
            f"was called, but {label_of(function)} has no method on_timer(key, time, state) to call when the timer "
            f"fires. Give an object with __call__ and on_timer"
        )
        return {namespace: f"{name} {why}" for namespace, name in names.items()}
    if not has_event_times:
        return {
            Namespace.EVENT_TIMER: "event_timer was called, but no source of the flow has an event time, so there is "
            "no watermark and the timer would never fire. Give the source event_time=, or use clock_timer"
        }
    return {}


def _migrate(
    operator: Operator,
    key_schema: pa.Schema,
    space: KeySpace,
    function: Callable[[Any, State], None],
    stored: bytes,
    state: State,
) -> None:
    key = _plain(decode_key(stored, key_schema, space))
    try:
        function(key, state)
    except USER_ERRORS as error:
        raise failed(operator.name, error, {"key": key, "migrate": label_of(function)}) from error


class _ProcessStep:
    def __init__(
        self,
        operator: Operator,
        spec: Process,
        function: Callable[..., Any],
        takes: pa.Schema,
        keeper: HandleKeeper,
        revision: Revision,
        migrations: Migrations,
        idle: Mapping[Namespace, str],
    ) -> None:
        self._takes = takes
        self._operator = operator
        self._spec = spec
        self._function = function
        self._key_schema = columns_of(takes, spec.keys)
        self._keeper = keeper
        self._revision = revision
        self._migrations = migrations
        self._what = keeper.what
        self._idle = idle

    def rows(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Call the function for each row."""
        groups = self._groups(batch)
        keys, states = self._keys(groups), self._states(groups.keys)
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
        states = self._states(groups.keys)
        try:
            return {ONLY: self._called(groups, states, batch)}
        except USER_ERRORS as error:
            # Not called again on halves to find the row, because the first call may have changed state.
            raise failed(self._operator.name, error, None) from error

    def _called(self, groups: SortedKeys, states: list[State], batch: pa.RecordBatch) -> pa.RecordBatch:
        """Call a batch function and check its result."""
        keys = Keys(self._keys(groups), groups.group_of_row)
        result = conform(self._function(keys, batch, BatchState(states, self._what)), self._operator.schema, self._what)
        if self._spec.one_to_one and result.num_rows > batch.num_rows:
            raise SchemaError(f"{self._what} is one_to_one but returned {result.num_rows} rows for {batch.num_rows}")
        return result

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Fire the timers that are due, then write changed state."""
        if self._spec.has_timers:
            yield from self._fire()
        try:
            self._keeper.write(self._revision)
        except StateError as error:
            raise failed(self._operator.name, error, None) from error

    def keyed(self) -> KeyedStates:
        """The state of all keys, for handlers at the end of the epoch."""
        if self._keeper.undo is not None:
            self._keeper.undo.begin()  # what rows have changed stays changed
        return KeyedStates(
            self._keeper.task,
            self._states,
            lambda stored: _plain(decode_key(stored, self._key_schema, self._keeper.space)),
            self._stored,
            lambda: self._keeper.write(self._revision),
        )

    def _stored(self, key: Any) -> bytes:
        values = key if isinstance(key, tuple) and len(self._key_schema) > 1 else (key,)
        return encode_key(values, self._key_schema, self._what, space=self._keeper.space)

    def _fire(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        results: list[dict[str, Any]] = []
        self._keeper.idle_timers = self._idle
        for stored, time in self._keeper.due_timers():
            key = _plain(decode_key(stored, self._key_schema, self._keeper.space))
            when = _EPOCH + timedelta(microseconds=time)
            try:
                [state] = self._keeper.handles([stored], self._migrations)
                result = self._function.on_timer(key, when, state)  # type: ignore[attr-defined]
                if result is not None:
                    results += [result] if isinstance(result, dict) else self._several(result)
            except USER_ERRORS as error:
                raise failed(self._operator.name, error, {"key": key, "timer": when}) from error
            if len(results) >= TIMERS_AT_ONCE:
                yield {ONLY: self._emitted(results, f"{self._what}, on_timer")}
                results = []
            self._relieve()
        if results:
            yield {ONLY: self._emitted(results, f"{self._what}, on_timer")}

    def _emitted(self, results: list[dict[str, Any]], what: str) -> pa.RecordBatch:
        try:
            return from_rows(results, self._operator.schema, what)
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
            raise SchemaError(f"{self._what} is one_to_one but returned {len(rows)} rows for one")
        return rows

    def _groups(self, batch: pa.RecordBatch) -> SortedKeys:
        self._relieve()
        try:
            return group_keys(batch, self._spec.keyed_by, self._what, space=self._keeper.space)
        except StateError as error:
            raise failed(self._operator.name, error, row_at(batch, error.fields.get("row_index"))) from error

    def _relieve(self) -> None:
        """Called between two calls of the function, so nobody uses a handle."""
        try:
            self._keeper.relieve(self._revision)
        except StateError as error:
            raise failed(self._operator.name, error, None) from error

    def _states(self, keys: Sequence[bytes]) -> list[State]:
        self._keeper.idle_timers = self._idle  # revisions share the keeper
        try:
            return self._keeper.handles(keys, self._migrations)
        except StateError as error:
            raise failed(self._operator.name, error, None) from error

    def _keys(self, groups: SortedKeys) -> list[Any]:
        rows = to_rows(groups.distinct)
        if len(self._spec.keyed_by) == 1:
            [name] = self._spec.keyed_by
            return [row[name] for row in rows]
        return [tuple(row.values()) for row in rows]


class _TolerantProcess(_ProcessStep):
    """A process whose bad rows leave by the errors branch. If the function fails, its changes to state are undone."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._errors_branch = ErrorsBranch(self._operator)
        self._screen = Screen(self._errors_branch, keys=self._spec.keyed_by)
        self._check = RowCheck(self._operator.schema, self._what)
        assert self._keeper.undo is not None
        self._undo = self._keeper.undo

    def rows(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Call the function for each row."""
        reasons = self._screen.reasons(batch)
        places, good = _others(batch, reasons)
        readable, unreadable = checked_rows(self._operator, good)
        reasons.update((places[place], reason) for place, reason in unreadable.items())
        groups = self._groups(good)
        keys, states, group_of_row = self._keys(groups), self._states(groups.keys), groups.group_of_row.tolist()
        results: list[dict[str, Any]] = []
        for place, row in readable:
            group = group_of_row[place]
            found = self._attempt(self._function, keys[group], row, states[group])
            if isinstance(found, str):
                reasons[places[place]] = found
            else:
                results += found
        return {ONLY: self._emitted(results, self._what), **self._errors_branch.rows(batch, reasons)}

    def batches(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Call the function for the slice; if it raises, for the halves."""
        reasons = self._screen.reasons(batch)
        places, good = _others(batch, reasons)

        def attempt(start: int, stop: int) -> Mapping[str, pa.RecordBatch]:
            rows = good.slice(start, stop - start)
            groups = self._groups(rows)
            states = self._states(groups.keys)
            self._undo.begin()
            try:
                return {ONLY: self._called(groups, states, rows)}
            except BaseException:
                self._undo.roll_back()
                raise

        try:
            parts, errors = by_halves(good.num_rows, attempt) if good.num_rows else ([], {})
        except MemoryError as error:
            raise failed(self._operator.name, error, None) from error
        reasons.update((places[place], reason_of(error)) for place, error in errors.items())
        return {**merged(parts), **self._errors_branch.rows(batch, reasons)}

    def _fire(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        results: list[dict[str, Any]] = []
        bad: list[tuple[dict[str, Any], str]] = []
        for stored, time in self._keeper.due_timers():
            values = decode_key(stored, self._key_schema, self._keeper.space)
            when = _EPOCH + timedelta(microseconds=time)
            [state] = self._states([stored])
            found = self._attempt(self._function.on_timer, _plain(values), when, state)  # type: ignore[attr-defined]
            if isinstance(found, str):
                bad.append((dict(zip(self._spec.keyed_by, values, strict=True)), f"on_timer at {when}: {found}"))
            else:
                results += found
            if len(results) + len(bad) >= TIMERS_AT_ONCE:
                yield self._fired(results, bad)
                results, bad = [], []
            self._relieve()
        if results or bad:
            yield self._fired(results, bad)

    def _fired(
        self, results: list[dict[str, Any]], bad: list[tuple[dict[str, Any], str]]
    ) -> Mapping[str, pa.RecordBatch]:
        fired = {ONLY: self._emitted(results, f"{self._what}, on_timer")} if results else {}
        if bad:
            fired.update(self._errors_branch.keys([key for key, _ in bad], [reason for _, reason in bad], self._takes))
        return fired

    def _attempt(self, function: Callable[..., Any], *given: Any) -> list[dict[str, Any]] | str:
        """The rows that a call returns, or the reason why it failed. A failed call leaves state unchanged."""
        self._undo.begin()
        try:
            result = function(*given)
            if result is None:
                return []
            rows = [result] if isinstance(result, dict) else self._several(result)
            for row in rows:
                self._check(row)
        except MemoryError as error:
            raise failed(self._operator.name, error, None) from error
        except USER_ERRORS as error:
            self._undo.roll_back()
            return reason_of(error)
        return rows


def _others(batch: pa.RecordBatch, reasons: Reasons) -> tuple[Sequence[int], pa.RecordBatch]:
    """The positions of the rows of a batch that are not bad, and these rows."""
    if not reasons:
        return range(batch.num_rows), batch
    places = [place for place in range(batch.num_rows) if place not in reasons]
    return places, batch.take(pa.array(places, pa.int64()))


class Keys(Sequence[Any]):
    """The distinct keys of a slice, for batch functions; ``group_of_row`` holds the index of each row's key."""

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
        """One value per key; the default for keys without one."""
        return [state.get(default) for state in self._states]

    def set(self, values: Sequence[Any]) -> None:
        """Store one value per key."""
        if len(values) != len(self._states):
            raise StateError(
                f"{self._what}: {len(values)} values were set for {len(self._states)} keys; give one for each"
            )
        for state, value in zip(self._states, values, strict=True):
            state.set(value)

    def __getitem__(self, index: int) -> State:
        """The state of one of the keys, as a row function gets it."""
        return self._states[index]


def _plain(key: tuple[Any, ...]) -> Any:
    """A key as functions get it: the value itself if there is one column."""
    return key[0] if len(key) == 1 else key
