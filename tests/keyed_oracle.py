"""The meaning of stateful operators, defined a second time: plain dicts, lists and loops over whole epochs.

Like :mod:`tests.oracle`, to which it adds state, it shares nothing with the engine but the graph. It remembers all rows
ever seen and processes them again each time, so nothing can be forgotten too early or too late.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from midstream.flow.aggregations import Aggregation
from midstream.flow.model import Graph, Operator
from midstream.flow.spec import ERRORS, ERRORS_RIGHT, LATE, LATE_RIGHT, Form, How, OnError
from midstream.flow.windows import Session, Sliding, Tumbling
from midstream.operators.aggregate import Aggregate
from midstream.operators.distinct import Distinct
from midstream.operators.join import Join
from midstream.operators.process import Process
from tests.oracle import Answer, Row, divided, interpret, require_fit

Key = tuple[Any, ...]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVENT, CLOCK = "event", "clock"
moment_behind_all = 1 << 62


def us(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def moment(time: int) -> datetime:
    return EPOCH + timedelta(microseconds=time)


@dataclass(frozen=True)
class Times:
    """The times of an epoch, in microseconds; watermarks are None until every source has produced a row."""

    clock: int
    late_before: int | None
    watermark: int | None
    closing: bool = False

    def was_over(self, time: int) -> bool:
        return self.late_before is not None and time <= self.late_before

    def is_over(self, time: int) -> bool:
        return self.watermark is not None and time <= self.watermark


class Remembering(Protocol):
    """A stateful operator, from its first epoch on."""

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        """Rows by branch."""


class KeyedOracle:
    """A flow, epoch by epoch."""

    def __init__(self, graph: Graph, meanings: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._graph = graph
        self._meanings = dict(meanings or {})
        self._latest: dict[str, int] = {}
        self._heard: dict[str, int] = {}
        self.watermark: int | None = None
        self.operators: dict[str, Any] = {}
        """The stateful operators, by name."""

    def epoch(self, sources: Mapping[str, Sequence[Row]], clock: int | None = None, closing: bool = False) -> Answer:
        """The next epoch; without a clock, one in which no event time is in the future. The last one may be closing."""
        before = self.watermark
        for op in self._timed():
            seen = [us(row[op.spec.event_time]) for row in sources[op.name] if row[op.spec.event_time] is not None]
            if clock is not None and op.spec.max_ahead_us is not None:
                seen = [time for time in seen if time <= clock + op.spec.max_ahead_us]
            if seen:
                self._latest[op.name] = max(*seen, self._latest.get(op.name, seen[0]))
            if seen or op.name not in self._heard:
                self._heard[op.name] = clock or 0
        self._advance(clock or 0)
        times = Times(clock or 0, before, moment_behind_all if closing else self.watermark, closing)

        def remembers(op: Operator, inputs: list[list[Row]]) -> dict[str, list[Row]]:
            if op.name not in self.operators:
                self.operators[op.name] = self._made(op)
            asides: dict[str, list[Row]] = {}
            good = []
            for rows, keys, time, branch in zip(inputs, *_needs(op), (ERRORS, ERRORS_RIGHT), strict=False):
                kept, asides[branch] = divided(op, rows, keys, time)
                good.append(kept)
            found: dict[str, list[Row]] = self.operators[op.name].epoch(copy.deepcopy(good), times)
            for branch in op.error_branches:
                found[branch] = asides[branch] + found.get(branch, [])
            return found

        return interpret(self._graph, sources, self._meanings, remembers)

    def _advance(self, clock: int) -> None:
        """All sources count that have recently produced a row, or cannot be idle."""
        counted = [
            op for op in self._timed() if op.spec.idle_us is None or clock - self._heard[op.name] < op.spec.idle_us
        ]
        if counted and all(op.name in self._latest for op in counted):
            slowest = min(self._latest[op.name] - op.spec.delay_us for op in counted)
            self.watermark = slowest if self.watermark is None else max(self.watermark, slowest)

    def _timed(self) -> list[Any]:
        return [self._graph[name] for name, source in self._graph.sources.items() if source.event_time is not None]

    def _made(self, op: Operator) -> Remembering:
        match op.spec:
            case Process() as spec:
                function = self._meanings[op.name] if spec.form is Form.BATCHES else self._graph.payloads[op.name]
                return Remembered(spec, function, op, self._graph.schema_of(op.inputs[0]).names)
            case Aggregate(window=None) as spec:
                return Running(spec)
            case Aggregate(window=Session(gap)) as spec:
                return Sessions(spec, gap)
            case Aggregate(window=Tumbling(size, offset, None)) as spec:
                return Windows(spec, size, size, offset)
            case Aggregate(window=Sliding(size, every, offset, None)) as spec:
                return Windows(spec, size, every, offset)
            case Distinct() as spec:
                return Firsts(spec)
            case Join() as spec:
                left, right = (self._graph.schema_of(port).names for port in op.inputs)
                return Pairs(spec, left, [name for name in right if name not in spec.right_keys])
        raise AssertionError(f"the oracle does not know {op.kind}")


def _needs(op: Operator) -> tuple[list[tuple[str, ...]], list[list[str]]]:
    """The key columns and the times that an operator needs from each of its inputs."""
    match op.spec:
        case Join() as spec:
            return [spec.left_keys, spec.right_keys], [[spec.left_time], [spec.right_time]]
        case Aggregate(keys=keys, time=time) | Distinct(keys=keys, time=time):
            return [keys], [[] if time is None else [time]]
        case Process(keys=keys):
            return [keys], [[]]
    raise AssertionError(f"the oracle does not know {op.kind}")


def key_of(row: Row, columns: Iterable[str]) -> Key:
    return tuple(row[column] for column in columns)


# ── process ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class OfKey:
    """The state of one key."""

    value: list[Any] = field(default_factory=list)
    """One value, or none."""
    lists: dict[str, list[Any]] = field(default_factory=dict)
    maps: dict[str, dict[Any, Any]] = field(default_factory=dict)
    written_at: int | None = None


class Remembered:
    """A process: a user's function over plain lists and dicts."""

    def __init__(self, spec: Process, function: Any, op: Operator, takes: list[str]) -> None:
        self._takes = takes
        self._spec = spec
        self._function = function
        self._op = op
        self.keys: dict[Key, OfKey] = {}
        self.timers: set[tuple[int, str, Key]] = set()

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        ttl = self._spec.ttl_us
        if ttl is not None:
            gone = [
                k for k, of in self.keys.items() if of.written_at is not None and of.written_at + ttl <= times.clock
            ]
            for key in gone:
                del self.keys[key]
        results: list[Row] = []
        bad: list[Row] = []
        for row in inputs[0]:
            key = key_of(row, self._spec.keys)
            found = self._called(self._function, key, copy.deepcopy(row), times)
            if isinstance(found, str):
                bad.append({**row, "error": found})
            else:
                results += found
        at_first = set(self.timers)
        while self._spec.has_timers and (due := self._due(times)):
            if times.closing:  # all existing timers, but none that those set
                due = [timer for timer in due if timer in at_first or timer[1] == CLOCK]
                if not due:
                    break
            time, kind, key = min(due)
            at_first.discard((time, kind, key))
            self.timers.remove((time, kind, key))
            found = self._called(self._function.on_timer, key, moment(time), times)
            if isinstance(found, str):
                nothing = dict.fromkeys(self._takes)
                reason = f"on_timer at {moment(time)}: {found}"
                bad.append({**nothing, **dict(zip(self._spec.keys, key, strict=True)), "error": reason})
            else:
                results += found
        return {"": results, ERRORS: bad}

    def _called(self, function: Any, key: Key, given: Any, times: Times) -> list[Row] | str:
        """The result of a call; if it fails, the reason, with all its changes undone."""
        before = copy.deepcopy((self.keys.get(key), self.timers))
        try:
            rows = _rows(function(_plain(key), given, self._handle(key, times)))
            for row in rows:
                require_fit(row, self._op.schema)
        except Exception as error:
            if self._op.on_error is OnError.FAIL:
                raise
            of, self.timers = before
            if of is None:
                del self.keys[key]
            else:
                self.keys[key] = of
            return f"{type(error).__name__}: {error}"
        return rows

    def _handle(self, key: Key, times: Times) -> Handle:
        return Handle(self, key, self.keys.setdefault(key, OfKey()), times)

    def _due(self, times: Times) -> list[tuple[int, str, Key]]:
        limits = {EVENT: times.watermark, CLOCK: times.clock}
        return [t for t in self.timers if (limit := limits[t[1]]) is not None and t[0] <= limit]


class Handle:
    """The interface of midstream.State for a function, without its checks."""

    def __init__(self, owner: Remembered, key: Key, of: OfKey, times: Times) -> None:
        self._owner, self._key, self._of, self._times = owner, key, of, times

    def wrote(self) -> None:
        self._of.written_at = self._times.clock

    def get(self, default: Any = None) -> Any:
        return self._of.value[0] if self._of.value else default

    def set(self, value: Any) -> None:
        self._of.value = [value]
        self.wrote()

    def delete(self) -> None:
        self._of.value = []
        self.wrote()

    def list(self, name: str = "list") -> Items:
        return Items(self, self._of.lists.setdefault(name, []))

    def map(self, name: str = "map") -> Mapped:
        return Mapped(self, self._of.maps.setdefault(name, {}))

    def clear(self) -> None:
        self.delete()
        self._of.lists.clear()
        self._of.maps.clear()

    @property
    def now(self) -> datetime:
        return moment(self._times.clock)

    @property
    def watermark(self) -> datetime | None:
        if self._times.closing:
            return datetime.max.replace(tzinfo=UTC)
        return None if self._times.watermark is None else moment(self._times.watermark)

    def event_timer(self, time: datetime) -> None:
        self._owner.timers.add((us(time), EVENT, self._key))

    def clock_timer(self, time: datetime) -> None:
        self._owner.timers.add((us(time), CLOCK, self._key))

    def cancel_event_timer(self, time: datetime) -> None:
        self._owner.timers.discard((us(time), EVENT, self._key))

    def cancel_clock_timer(self, time: datetime) -> None:
        self._owner.timers.discard((us(time), CLOCK, self._key))


class Items:
    def __init__(self, handle: Handle, items: list[Any]) -> None:
        self._handle, self._items = handle, items

    def append(self, item: Any, keep: int | None = None) -> None:
        self._items.append(item)
        if keep is not None:
            del self._items[:-keep]
        self._handle.wrote()

    def extend(self, items: Iterable[Any]) -> None:
        self._items.extend(items)
        self._handle.wrote()

    def clear(self) -> None:
        self._items.clear()
        self._handle.wrote()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Mapped(MutableMapping[Any, Any]):
    def __init__(self, handle: Handle, items: dict[Any, Any]) -> None:
        self._handle, self._items = handle, items

    def __getitem__(self, item: Any) -> Any:
        return self._items[item]

    def __setitem__(self, item: Any, value: Any) -> None:
        self._items[item] = value
        self._handle.wrote()

    def __delitem__(self, item: Any) -> None:
        del self._items[item]
        self._handle.wrote()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)


def _plain(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


def _rows(result: Any) -> list[Row]:
    if result is None:
        return []
    return [result] if isinstance(result, dict) else list(result)


# ── aggregate ─────────────────────────────────────────────────────────────────────────────────────────────────────


def aggregated(rows: Sequence[Row], aggregation: Aggregation) -> Any:
    """An aggregation over rows in order of arrival."""
    if aggregation.column is None:
        return len(rows)
    values = [row[aggregation.column] for row in rows if row[aggregation.column] is not None]
    match str(aggregation.kind):
        case "count":
            return len(values)
        case "approx_distinct":
            return len(set(values))  # exact for so few values
        case "last":
            return values[-aggregation.limit :]
        case "mean":
            return sum(values) / len(values) if values else None
        case "sum":
            return sum(values) if values else None
        case "min":
            return min(values, default=None)
        case "max":
            return max(values, default=None)
    raise AssertionError(f"the oracle does not know {aggregation}")


def result(spec: Aggregate, key: Key, rows: Sequence[Row], bounds: tuple[int, int] | None = None) -> Row:
    window = {} if bounds is None else dict(zip(("window_start", "window_end"), map(moment, bounds), strict=True))
    totals = {column: aggregated(rows, aggregation) for column, aggregation in spec.columns}
    return dict(zip(spec.keys, key, strict=True)) | window | totals


class Running:
    def __init__(self, spec: Aggregate) -> None:
        self._spec = spec
        self.rows: dict[Key, list[Row]] = {}

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        for row in inputs[0]:
            self.rows.setdefault(key_of(row, self._spec.keys), []).append(row)
        touched = dict.fromkeys(key_of(row, self._spec.keys) for row in inputs[0])
        return {"": [result(self._spec, key, self.rows[key]) for key in touched]}

    def totals(self) -> dict[Key, Row]:
        """The totals of every key."""
        return {key: result(self._spec, key, rows) for key, rows in self.rows.items()}


class Windows:
    def __init__(self, spec: Aggregate, size: int, every: int, offset: int) -> None:
        self._spec, self._size, self._every, self.offset = spec, size, every, offset
        self.open: dict[tuple[Key, int], list[Row]] = {}
        """Rows by key and end of the window."""

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        late = []
        for row in inputs[0]:
            ends = [end for end in self._ends(us(row[self._spec.time or ""])) if not times.was_over(end)]
            for end in ends:
                self.open.setdefault((key_of(row, self._spec.keys), end), []).append(row)
            if not ends:
                late.append(row)
        closed = [place for place in self.open if times.is_over(place[1])]
        rows = [result(self._spec, key, self.open.pop((key, end)), (end - self._size, end)) for key, end in closed]
        return {"": rows, LATE: late}

    def _ends(self, time: int) -> Iterator[int]:
        """The ends of all windows that contain this time; windows begin ``offset`` after multiples of ``every``."""
        first = time - self._size + 1
        start = first + (self.offset - first) % self._every
        while start <= time:
            yield start + self._size
            start += self._every


@dataclass
class OneSession:
    first: int
    last: int
    rows: list[Row]
    new: bool


class Sessions:
    def __init__(self, spec: Aggregate, gap: int) -> None:
        self._spec, self._gap = spec, gap
        self.open: dict[Key, list[OneSession]] = {}

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        closed, late = [], []
        found = self.open
        for sessions in found.values():
            for session in sessions:
                session.new = False
        for row in inputs[0]:
            time = us(row[self._spec.time or ""])
            found.setdefault(key_of(row, self._spec.keys), []).append(OneSession(time, time, [row], True))
        self.open = {}
        for key, sessions in found.items():
            for one in self._linked(sessions):
                end = one.last + self._gap
                if times.was_over(end):
                    late += one.rows
                elif times.is_over(end):
                    closed.append(result(self._spec, key, one.rows, (one.first, end)))
                else:
                    self.open.setdefault(key, []).append(one)
        return {"": closed, LATE: late}

    def _linked(self, sessions: list[OneSession]) -> list[OneSession]:
        """Sessions linked by a chain, as one. Earlier rows come first, by session, then the new ones."""
        chains: list[list[OneSession]] = []
        for one in sorted(sessions, key=lambda one: one.first):
            if chains and one.first - max(each.last for each in chains[-1]) < self._gap:
                chains[-1].append(one)
            else:
                chains.append([one])
        arrival = {id(one): number for number, one in enumerate(sessions)}
        return [
            OneSession(
                min(one.first for one in chain),
                max(one.last for one in chain),
                [
                    row
                    for one in sorted(chain, key=lambda one: (one.new, arrival[id(one)] if one.new else one.first))
                    for row in one.rows
                ],
                False,
            )
            for chain in chains
        ]


# ── distinct and join ─────────────────────────────────────────────────────────────────────────────────────────────


class Firsts:
    def __init__(self, spec: Distinct) -> None:
        self._spec = spec
        self.known: dict[Key, int | None] = {}
        """Per key: when to forget it."""

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        passed = []
        for row in inputs[0]:
            key = key_of(row, self._spec.keys)
            if key not in self.known:
                passed.append(row)
                within = self._spec.within_us
                self.known[key] = None if within is None else us(row[self._spec.time or ""]) + within
        self.known = {key: end for key, end in self.known.items() if end is None or not times.is_over(end)}
        return {"": passed}


@dataclass
class Waiting:
    row: Row
    key: Key
    time: int
    met: bool = False
    given_up: bool = False


class Pairs:
    """A join, as a nested loop over all rows that ever arrived in time."""

    def __init__(self, spec: Join, left: list[str], added: list[str]) -> None:
        self._spec, self._left, self._added = spec, left, added
        self.left: list[Waiting] = []
        self.right: list[Waiting] = []

    def epoch(self, inputs: list[list[Row]], times: Times) -> dict[str, list[Row]]:
        spec = self._spec
        sides = [(spec.left_keys, spec.left_time, inputs[0]), (spec.right_keys, spec.right_time, inputs[1])]
        late, came = [], []
        for keys, time, rows in sides:
            found = [Waiting(row, key_of(row, keys), us(row[time])) for row in rows]
            late.append([one.row for one in found if self._is_late(one, times)])
            came.append([one for one in found if not self._is_late(one, times)])
        new_pairs = itertools.chain(
            itertools.product(self.left, came[1]), itertools.product(came[0], [*self.right, *came[1]])
        )
        results = []
        for left, right in new_pairs:
            if left.key == right.key and self._near(left.time, right.time):
                left.met = right.met = True
                results.append(left.row | {name: right.row[name] for name in self._added})
        self.left += came[0]
        self.right += came[1]
        if spec.how in (How.LEFT, How.FULL):
            results += [one.row | dict.fromkeys(self._added) for one in self._given_up(self.left, self._after, times)]
        if spec.how in (How.RIGHT, How.FULL):
            for one in self._given_up(self.right, self._before, times):
                key = dict(zip(spec.left_keys, (one.row[name] for name in spec.right_keys), strict=True))
                results.append(dict.fromkeys(self._left) | key | {name: one.row[name] for name in self._added})
        return {"": results, LATE: late[0], LATE_RIGHT: late[1]}

    def _given_up(self, side: list[Waiting], reach: int, times: Times) -> list[Waiting]:
        found = [one for one in side if not one.met and not one.given_up and self._is_alone(one, reach, times)]
        for one in found:
            one.given_up = True
        return found

    def waiting(self) -> tuple[set[tuple[int, Key]], set[tuple[int, Key]]]:
        """Rows of either side that may still be emitted with nulls."""
        left, right = (
            {(one.time, one.key) for one in side if not one.met and not one.given_up}
            for side in (self.left, self.right)
        )
        return left, right

    @property
    def _before(self) -> int:
        return self._spec.within_us or 0

    @property
    def _after(self) -> int:
        return self._before if self._spec.after_us is None else self._spec.after_us

    def _near(self, left: int, right: int) -> bool:
        if self._spec.within_us is not None:
            return left - self._before <= right <= left + self._after
        return self._end(left) == self._end(right)

    def _is_late(self, one: Waiting, times: Times) -> bool:
        if self._spec.within_us is not None:
            return times.late_before is not None and one.time < times.late_before
        return times.was_over(self._end(one.time))

    def _is_alone(self, one: Waiting, reach: int, times: Times) -> bool:
        if self._spec.within_us is not None:
            return times.watermark is not None and one.time + reach < times.watermark
        return times.is_over(self._end(one.time))

    def _end(self, time: int) -> int:
        assert isinstance(self._spec.window, Tumbling)
        size, offset = self._spec.window.size_us, self._spec.window.offset_us
        return ((time - offset) // size + 1) * size + offset
