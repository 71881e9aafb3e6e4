"""Random flows that are changed while they run: graphs, functions that tell which version they are, and changes.

A function of version 0 is what the flow was written with; the n-th change brings version n of the operators that it
updates. Functions write their name and version on the rows that they pass (the column ``trace``), and filters and
routes decide otherwise in each version. So what comes of a source row tells by which versions it was processed.

Everything is drawn from one seed: a seed is all there is to a case.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from midstream import Flow, ListSource, MemorySink, State, Stream, Tune, Update, agg
from midstream.change import prepare
from midstream.checkpoint.change_records import ChangeRecord
from midstream.engine.collector import FRAME_BYTES
from midstream.flow.model import Port
from midstream.operators.stream import KeyedStream
from midstream.runtime.local import runtime as local
from midstream.runtime.local import tasks as local_tasks
from midstream.runtime.local.tasks import MAX_SLICE
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, MigrateAt, run_local
from tests.ledger import Add, Ledger
from tests.oracle import Row
from tests.simulation.flows import small_frames
from tests.simulation.plan_flows import PlanEdit, Planner, edits_of

DDL = "id bigint, n int, k string, w bigint, trace string, at timestamp"
RIGHT = "rid bigint, rtrace string, rat timestamp"
PAIRED = f"{DDL}, rtrace string, rat timestamp"
AT = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = ("", "a", "b", "é", "日本")
CONSISTENT = ("fries", "fries-unpruned", "marker", "epoch", "marker", "replay")
MAX_EXPANSIONS = 2


# ── functions: each knows its operator and its version ────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Versioned:
    """A function of an operator."""

    name: str
    version: int = 0

    def chance(self, row: Row, sides: int) -> int:
        """A number below ``sides`` that depends on the row and on the version, and on nothing else."""
        return zlib.crc32(f"{row['id']} {self.name} {self.version}".encode()) % sides

    def marked(self, row: Row, more: str = "") -> Row:
        """The row, with a note that this version has seen it."""
        return {**row, "trace": f"{row['trace']} {self.name}@{self.version}{more}", "w": row["w"] + self.version + 1}


@dataclass(frozen=True)
class Mark(Versioned):
    """A map. ``gives`` and ``takes`` say whether it adds the column ``extra``, or takes it away again."""

    gives: bool = False
    takes: bool = False

    def __call__(self, row: Row) -> Row:
        more = f"+{row['extra']}" if self.takes else ""
        made = self.marked({name: value for name, value in row.items() if name != "extra"}, more)
        return {**made, "extra": self.version} if self.gives else made

    def batches(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([self(row) for row in batch.to_pylist()], schema=batch.schema)


@dataclass(frozen=True)
class Keep(Versioned):
    """A filter."""

    def __call__(self, row: Row) -> bool:
        return self.chance(row, 4) > 0

    def batches(self, batch: pa.RecordBatch) -> pa.Array:
        return pa.array([self(row) for row in batch.to_pylist()], pa.bool_())


@dataclass(frozen=True)
class Copy(Versioned):
    """A flat_map: one copy or two."""

    def __call__(self, row: Row) -> Iterator[Row]:
        for number in range(1 + self.chance(row, 2)):
            yield self.marked(row, f"#{number}")

    def batches(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [made for row in batch.to_pylist() for made in self(row)]
        return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


@dataclass(frozen=True)
class Choose(Versioned):
    """A route."""

    branches: tuple[str, ...] = ()

    def __call__(self, row: Row) -> str:
        return self.branches[self.chance(row, len(self.branches))]

    def batches(self, batch: pa.RecordBatch) -> pa.Array:
        return pa.array([self(row) for row in batch.to_pylist()])


@dataclass(frozen=True)
class Project(Versioned):
    """A map to the columns of a join's right side."""

    def __call__(self, row: Row) -> Row:
        return {"rid": row["id"], "rtrace": f"{row['trace']} {self.name}@{self.version}", "rat": row["at"]}


@dataclass(frozen=True)
class Fold(Versioned):
    """A map from a join's columns back to a source's."""

    def __call__(self, row: Row) -> Row:
        made = self.marked(row, f"({row['rtrace']})")
        return {name: value for name, value in made.items() if name not in ("rtrace", "rat")}


@dataclass(frozen=True)
class Remember(Versioned):
    """A process. It keeps, per key, a log of what it was called with.

    The value is the layout of the state, ``log`` has the id of each row, None for a timer, with the version and the
    layout that were found; ``moves`` counts the migrations, by the layout that they led to. If it ``emits``, its timers
    give rows.
    """

    layout: int = 0
    emits: bool = False

    def __call__(self, key: Any, row: Row, state: State) -> Row:
        self.note(row["id"], state)
        state.clock_timer(state.now)  # fires when the epoch ends
        return self.marked(row)

    def on_timer(self, key: Any, time: datetime, state: State) -> Row | None:
        numbers = [number for number, _, _ in state.list("log")]
        self.note(None, state)
        return self.timed(key, since_timer(numbers))

    def timed(self, key: Any, numbers: Sequence[int]) -> Row | None:
        """What a timer gives when rows of these ids came since the one before.

        Its id is negative, and of no other row: it is made of the operator's number and the last source row.
        """
        last = max(numbers, default=0)
        if not self.emits or last <= 0:
            return None
        made = {"id": -(100 * last + self.number), "n": 0, "k": key, "w": 0, "trace": "", "at": AT}
        return self.marked(made, "!")

    @property
    def number(self) -> int:
        """The operator's own number."""
        return int(self.name.removeprefix("process"))

    def note(self, number: int | None, state: State) -> None:
        found = state.get(self.layout)
        state.list("log").append((number, self.version, found))
        state.set(found)


def since_timer(numbers: Sequence[int | None]) -> list[int]:
    """The ids at the end of a log that came since the last timer."""
    found: list[int] = []
    for number in reversed(numbers):
        if number is None:
            break
        found.append(number)
    return found


@dataclass(frozen=True)
class Move:
    """Brings the state of a process to a layout."""

    layout: int

    def __call__(self, key: Any, state: State) -> None:
        moves = state.map("moves")
        moves[self.layout] = moves.get(self.layout, 0) + 1
        state.set(self.layout)


# ── broken ones ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Broken:
    """What a user deploys by mistake, in place of a map or a process."""

    inner: Any
    how: str

    def __call__(self, *args: Any) -> Any:
        row = args[0] if len(args) == 1 else args[1]
        if self.how == "always" or (self.how == "sometimes" and row["id"] % 2):
            raise ValueError(f"broken: {row['id']}")
        made = self.inner(*args)
        if self.how == "schema":
            return {**made, "w": "a text"}
        return [made, made] if self.how == "twice" else made


@dataclass(frozen=True)
class BrokenProcess(Broken):
    """In place of a process with timers."""

    def on_timer(self, *args: Any) -> Any:
        return self.inner.on_timer(*args)


# ── a case ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Planned:
    """A change that is to be made."""

    epoch: int
    scheduler: str
    functions: dict[str, Any]
    moves: frozenset[str] = frozenset()
    """Processes whose state it migrates."""
    returns: dict[str, str] = field(default_factory=dict)
    how: str | None = None
    """If it is broken."""
    preflight: bool = False
    time_limit: str | None = None
    plan: list[PlanEdit] = field(default_factory=list)
    knobs: dict[str, int] = field(default_factory=dict)

    def request(self) -> ChangeAt:
        updates = [
            Update(
                name,
                function,
                migrate=Move(function.layout) if name in self.moves else None,
                returns=self.returns.get(name),
            )
            for name, function in self.functions.items()
        ]
        edits = (*edits_of(self.plan), *updates, *([Tune(**self.knobs)] if self.knobs else []))
        return ChangeAt(self.epoch, edits, self.scheduler, self.preflight, self.time_limit)


@dataclass
class ChangingCase:
    """A flow, the changes that are made to it, and what is needed to run it."""

    checkpoint: str
    flow: Flow = field(default_factory=lambda: Flow("random"))
    epochs: dict[str, list[list[Row]]] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    batched: set[str] = field(default_factory=set)
    sinks: dict[str, MemorySink] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    """Sinks of aggregates, and the sink that has the rows which were added up."""
    changes: list[Planned] = field(default_factory=list)
    migrations: list[MigrateAt] = field(default_factory=list)
    moved: list[ChangeRecord] = field(default_factory=list)
    """What became of the migrations; the history of the run has the changes only."""
    partitions: int = 1
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    frame_bytes: int = FRAME_BYTES
    max_slice: int = MAX_SLICE
    drivers: int = 0
    """How many there were: one at first, and one after each crash."""
    disagreements: list[str] = field(default_factory=list)
    """What the ledger said when a driver had crashed."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(Path(self.checkpoint).parent / "ledger.db")

    @property
    def length(self) -> int:
        """The number of epochs."""
        return max(map(len, self.epochs.values()))

    def run(self) -> LocalRun:
        def restarted(runtime: Any) -> None:
            self.drivers += 1
            self.disagreements += self.ledger.problems(self.checkpoint)
            start_driver(runtime)

        start_driver = local._Runtime._start_driver
        self.ledger.create()
        # To find the source of a class, Python parses its whole module, which would take most of the time here.
        with (
            small_frames(self.frame_bytes),
            patch.object(local_tasks, "MAX_SLICE", self.max_slice),
            patch.object(local._Runtime, "_start_driver", restarted),
            patch.object(prepare, "_source", lambda function: ""),
        ):
            run = run_local(
                self.flow,
                partitions=self.partitions,
                seed=self.seed,
                faults=self.faults,
                clock=ManualClock(int(AT.timestamp() * 1e6)),
                checkpoint=self.checkpoint,
                changes=[*(change.request() for change in self._as_given()), *self.migrations],
                audit="id",
            )
        self.moved = [record for record in run.history if record.migration is not None]
        return replace(run, history=tuple(record for record in run.history if record.migration is None))

    def _as_given(self) -> list[Planned]:
        """A batch operator is given the batch form of its function."""
        return [
            replace(
                change,
                functions={
                    name: function.batches if name in self.batched else function
                    for name, function in change.functions.items()
                },
            )
            for change in self.changes
        ]

    def __str__(self) -> str:
        lines = [f"partitions={self.partitions} seed={self.seed} frame_bytes={self.frame_bytes}"]
        lines[0] += f" max_slice={self.max_slice} {self.faults}"
        for op in self.flow._operators.values():
            payload = [len(rows) for rows in self.epochs[op.name]] if op.name in self.epochs else None
            lines.append(f"  {op.name} = {op.spec} of {', '.join(map(str, op.inputs)) or '—'} {payload or ''}")
        lines += [f"  {change}" for change in self.changes]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Some:
    """A stream, and what is known of it."""

    stream: Stream
    steady: bool = True
    """It has rows in every epoch in which its source has some, with odd and even ids."""
    expansions: int = 0


class _Builder:
    def __init__(self, rng: random.Random, checkpoint: str, schedulers: Sequence[str], broken: bool) -> None:
        self.rng = rng
        self.case = ChangingCase(checkpoint)
        self.schedulers = schedulers
        self.broken = broken
        self.streams: list[_Some] = []
        self.steady: set[str] = set()
        self.added = 0
        self.ids = 0
        self.is_large = False
        self.is_deep = False
        self.chain: list[str] = []
        """What stands one behind the other, with an exchange between each two."""

    def build(self) -> ChangingCase:
        rng, case = self.rng, self.case
        # Large ones are rare: many small ones find more. But a row can meet a mixture only if a change begins while it
        # is on its way from one updated operator to another. That takes exchanges between them, and many rows.
        self.is_deep = rng.random() < 0.6
        self.is_large = not self.is_deep and rng.random() < 0.15
        moments = sorted(rng.randint(0, 1) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
        # An epoch for each change to prove itself in, and one more.
        for _ in range(1 if self.is_deep else rng.choice((1, 1, 1, 2))):
            self.source(moments, len(moments) + 1)
        kinds: dict[Callable[[], None], int] = {
            self.map: 5,
            self.filter: 2,
            self.flat_map: 2,
            self.route: 2,
            self.union: 3,
            self.process: 5,
            self.key_by: 2,
            self.self_join: 2,
        }
        if self.is_deep:
            self.deepen()
        for _ in range(rng.randint(0, 2) if self.is_deep else rng.randint(2, 9 if self.is_large else 4)):
            rng.choices(list(kinds), weights=list(kinds.values()))[0]()
        if not case.functions:
            self.map()
        self.ends()
        case.partitions = rng.choice((1, 2, 2, 3))
        case.seed = rng.randrange(1 << 32)
        case.frame_bytes = rng.choice((1000, FRAME_BYTES) if self.is_deep else (200, 1000, FRAME_BYTES))
        # Changes come between slices: with the usual ones, tasks of so few rows would hardly have two.
        case.max_slice = MAX_SLICE if self.is_deep else rng.choice((12, 24, MAX_SLICE))
        for epoch in moments:
            case.changes.append(self.change(epoch))
        if rng.random() < 0.3:
            self.widen()
        return case

    # ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────

    def source(self, moments: Sequence[int], quiet: int) -> None:
        """Two epochs in which changes may come, and quiet ones."""
        rng, name = self.rng, self.name("source")
        sizes = [rng.choice((20, 60, 120) if self.is_large else (4, 12, 40)) for _ in range(2)] + [2] * quiet
        if self.is_deep:
            for epoch in moments:
                sizes[epoch] = rng.choice((200, 300))
        epochs = [[self.row() for _ in range(size)] for size in sizes]
        self.case.epochs[name] = epochs
        listed = ListSource(epochs, DDL, partitions=rng.randint(1, 2))
        self.add(_Some(self.case.flow.source(name, listed, event_time="at")))

    def row(self) -> Row:
        self.ids += 1
        return {"id": self.ids, "n": self.rng.randint(0, 9), "k": self.rng.choice(KEYS), "w": 0, "trace": "", "at": AT}

    def deepen(self) -> None:
        """A chain with two or three exchanges, and something to update on both sides of each."""
        for depth in range(self.rng.randint(3, 4)):
            if depth:
                self.add(replace(self.streams[-1], stream=self.keyed(self.streams[-1])))
            self.rng.choice((self.map, self.map, self.flat_map, self.process))()
        self.chain = list(self.case.functions)

    def map(self) -> None:
        self.function("map", Mark, self.pick())

    def filter(self) -> None:
        self.function("filter", Keep, self.pick(), steady=False)

    def flat_map(self) -> None:
        some = self.pick()
        if some.expansions < MAX_EXPANSIONS:
            self.function("flat_map", Copy, replace(some, expansions=some.expansions + 1))

    def route(self) -> None:
        some, name, branches = self.pick(), self.name("route"), ("left", "right")
        self.case.functions[name] = function = Choose(name, branches=branches)
        if self.rng.random() < 0.5:
            routed = some.stream.route(name, function, branches=branches)
        else:
            routed = some.stream.route_batches(name, function.batches, branches=branches)
            self.case.batched.add(name)
        if some.steady:
            self.steady.add(name)
        for branch in branches:
            self.add(replace(some, stream=routed[branch], steady=False))

    def union(self) -> None:
        some = self.pick()
        others = [each for each in self.streams if each.stream is not some.stream]
        if others and (other := self.rng.choice(others)).expansions + some.expansions <= MAX_EXPANSIONS:
            made = some.stream.union(self.name("union"), other.stream)
            expansions = max(some.expansions, other.expansions) + 1
            self.add(_Some(made, some.steady or other.steady, expansions))

    def key_by(self) -> None:
        some = self.pick()
        self.add(replace(some, stream=self.keyed(some)))

    def process(self) -> None:
        some, name = self.pick(), self.name("process")
        self.case.functions[name] = function = Remember(name, emits=self.rng.random() < 0.5)
        made = self.keyed(some).process(name, function, one_to_one=self.rng.random() < 0.7)
        if some.steady:
            self.steady.add(name)
        self.add(replace(some, stream=made))

    def self_join(self) -> None:
        """Two ways of a stream's rows, joined by their ids again; a promise of uniqueness where it can be kept."""
        some = self.pick()
        if some.expansions >= MAX_EXPANSIONS:
            return
        project, fold, left = self.name("project"), self.name("fold"), some
        if self.rng.random() < 0.5:
            self.function("map", Mark, some)
            left = self.streams.pop()
        self.case.functions[project], self.case.functions[fold] = Project(project), Fold(fold)
        right = some.stream.map(project, self.case.functions[project], returns=RIGHT).key_by(self.name("key"), "rid")
        both = left.stream.key_by(self.name("key"), "id").join(
            self.name("join"),
            right,
            within="0 seconds",
            left_time="at",
            right_time="rat",
            unique=some.expansions == 0 and self.rng.random() < 0.7,
        )
        # Not steady: of another source's rows some may still wait for theirs.
        made = both.map(fold, self.case.functions[fold], returns=DDL)
        self.add(_Some(made, False, some.expansions + (some.expansions > 0)))

    def function(self, kind: str, of: type[Versioned], some: _Some, *, steady: bool = True) -> None:
        name = self.name(kind)
        self.case.functions[name] = function = of(name)
        if self.rng.random() < 0.6:
            made = getattr(some.stream, kind)(name, function)
        else:
            made = getattr(some.stream, f"{kind}_batches")(name, function.batches)  # type: ignore[attr-defined]
            self.case.batched.add(name)
        if some.steady:
            self.steady.add(name)
        self.add(replace(some, stream=made, steady=some.steady and steady))

    def ends(self) -> None:
        """A sink behind every stream that nothing reads, with an aggregate of the same rows now and then."""
        read = {port for op in self.case.flow._operators.values() for port in op.inputs}
        for some in self.streams:
            if some.stream._port not in read or self.rng.random() < 0.1:
                self.sink(some)

    def sink(self, some: _Some) -> None:
        name, sink = self.name("sink"), MemorySink()
        some.stream.sink(name, sink)
        self.case.sinks[name] = sink
        if self.rng.random() < 0.25:
            total, totals = self.name("totals"), MemorySink()
            added = self.keyed(some).aggregate(self.name("aggregate"), rows=agg.count(), w=agg.sum("w"))
            added.sink(total, totals)
            self.case.sinks[total] = totals
            self.case.totals[total] = name

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def change(self, epoch: int) -> Planned:
        rng, case = self.rng, self.case
        version = len(case.changes) + 1
        names = list(case.functions)
        if len(self.chain) > 1:
            chosen = rng.sample(self.chain, 2)
            chosen += rng.sample([name for name in names if name not in chosen], rng.randint(0, min(2, len(names) - 2)))
        else:
            chosen = rng.sample(names, rng.randint(1, min(4, len(names))))
        newest = {name: self.latest(name) for name in chosen}
        moves = frozenset(
            name for name, function in newest.items() if isinstance(function, Remember) and rng.random() < 0.6
        )
        change = Planned(
            epoch,
            rng.choice(self.schedulers),
            {
                name: replace(function, version=version, **({"layout": function.layout + 1} if name in moves else {}))
                for name, function in newest.items()
            },
            moves,
        )
        return self.spoiled(change) if self.broken and rng.random() < 0.4 else change

    def spoiled(self, change: Planned) -> Planned:
        """A change that cannot but be rolled back: one of its operators fails on rows that come in every epoch."""
        fit = [
            name
            for name in self.steady
            if name not in self.case.batched and isinstance(self.case.functions[name], Mark | Remember)
        ]
        if not fit:
            return change
        name = self.rng.choice(sorted(fit))
        # Without a migration: there would be no way back once it is committed.
        functions = {
            each: replace(self.latest(each), version=len(self.case.changes) + 1)
            for each in {**change.functions, name: 0}
        }
        hows = ["always", "sometimes", "schema"]
        if getattr(self.case.flow._operators[name].spec, "one_to_one", False):
            hows.append("twice")
        how = self.rng.choice(hows)
        kind = BrokenProcess if hasattr(functions[name], "on_timer") else Broken
        functions[name] = kind(functions[name], how)
        return replace(change, functions=functions, moves=frozenset(), how=how)

    def widen(self) -> None:
        """Let the last change give rows of another schema from one map to the next, updated in the same change."""
        flow, last = self.case.flow, self.case.changes[-1]
        operators = flow._operators
        readers = [(port.operator, op.name) for op in operators.values() for port in op.inputs]
        for tail, head in readers:
            alone = sum(each == tail for each, _ in readers) == 1
            plain = {tail, head}.isdisjoint(self.case.batched)
            both = isinstance(self.latest(tail), Mark) and isinstance(self.latest(head), Mark)
            if last.how is None and alone and plain and both:
                version = len(self.case.changes)
                last.functions[tail] = Mark(tail, version, gives=True)
                last.functions[head] = Mark(head, version, takes=True)
                last.returns[tail] = f"{DDL}, extra int"
                return

    def latest(self, name: str) -> Any:
        """The function that an operator has after the changes so far, those that are broken left out."""
        function = self.case.functions.get(name)
        for change in self.case.changes:
            if change.how is None:
                function = change.functions.get(name, function)
        return function

    # ── what they share ───────────────────────────────────────────────────────────────────────────────────────────

    def keyed(self, some: _Some) -> KeyedStream:
        return some.stream.key_by(self.name("key"), "k")

    def add(self, some: _Some) -> None:
        self.streams.append(some)

    def pick(self) -> _Some:
        """Some stream; the newest more often, so that graphs grow deep as well as wide."""
        is_in_chain = self.is_deep and not self.chain
        return self.streams[-1] if is_in_chain or self.rng.random() < 0.5 else self.rng.choice(self.streams)

    def name(self, kind: str) -> str:
        self.added += 1
        return f"{kind}{self.added}"


def changing_case_of(
    seed: int,
    folder: Path,
    *,
    schedulers: Sequence[str] = CONSISTENT,
    faults: bool = True,
    broken: bool = True,
    plans: bool = False,
) -> ChangingCase:
    """The case that a seed stands for; with ``plans`` its changes change the flow's plan as well."""
    rng = random.Random(seed)
    case = _Builder(rng, str(folder / "checkpoint"), schedulers, broken).build()
    keep_ledger(case, random.Random(f"ledger {seed}"), broken)
    if plans:
        change_plans(case, random.Random(f"plans {seed}"))
    if faults and rng.random() < 0.7:
        case.faults = changing_faults(rng)
        set_limits(case, random.Random(f"limits {seed}"))
    return case


def set_limits(case: ChangingCase, rng: random.Random) -> None:
    """Let some changes be tried before, and some have a time limit; and let runs be lost.

    What migrates state has neither limits nor losses: the oracle counts migrations, and takes them to stay.
    """
    for change in case.changes:
        change.preflight = rng.random() < 0.4
        change.time_limit = "1 minute" if rng.random() < 0.4 and not change.moves else None
    case.faults = replace(case.faults, overdue=rng.choice((0.0, 0.01)))
    if not any(change.moves for change in case.changes):
        case.faults = replace(case.faults, lose_run=rng.choice((0.0, 0.002, 0.01)))


@dataclass(frozen=True)
class Pass(Versioned):
    """A process that comes with a change of the plan: it counts the rows of each key, and passes them on."""

    def __call__(self, key: Any, row: Row, state: State) -> Row:
        state.set(state.get(0) + 1)
        return self.marked(row)


def inserted_function(kind: str, name: str, version: int) -> Any:
    return {"map": Mark, "filter": Keep, "process": Pass}[kind](name, version)


TUNED = 0.15
"""How many changes of the plan also tune knobs, and so wait for the next epoch."""


def change_plans(case: ChangingCase, rng: random.Random) -> None:
    """Let every change change the plan, most together with functions, some alone."""
    graph = case.flow.graph
    fixed = {name for change in case.changes for name in (*change.functions, *change.returns)}
    apart = {op.inputs[0] for op in graph if op.name in case.totals.values()}
    planner = Planner(rng, graph, fixed, apart)
    for number, change in enumerate(case.changes, 1):
        change.plan = planner.change(inserted_function, number)
        if change.plan and change.how is None and rng.random() < 0.4 and not change.moves and not change.returns:
            change.functions.clear()
        if rng.random() < TUNED:
            change.knobs = {"frame": 4096 + number, "key_sample": rng.randrange(3), "slice": 100 + number}


def keep_ledger(case: ChangingCase, rng: random.Random, broken: bool) -> None:
    """Add a ledger of a source's rows. Most changes change what it adds; some so that a sink behind it fails."""
    source = next(iter(case.epochs))
    stream = Stream(case.flow, Port(source), case.flow._operators[source].schema)
    case.ledger.keep(stream.key_by("by ledger", "k"), "n")
    name = case.ledger.operator
    case.functions[name] = Add("n")
    for number, change in enumerate(case.changes, 1):
        if rng.random() < 0.7:
            change.functions[name] = Add("n", number)
            # Without a migration: there would be no way back once it is committed.
            if broken and change.how is None and not change.moves and not change.returns and rng.random() < 0.3:
                change.functions[name] = Add("n", number, is_refused=True)
                change.how = "refused"


def changing_faults(rng: random.Random) -> Faults:
    """Each fault more or less often. An epoch has a few dozen steps, and must get through now and then."""
    return Faults(
        crash=rng.choice((0.0, 0.02, 0.05)),
        speculate=rng.choice((0.0, 0.02, 0.08)),
        repeat=rng.choice((0.0, 0.3)),
        give_up=rng.choice((0.0, 0.002, 0.005)),
        crash_driver=rng.choice((0.0, 0.0, 0.002, 0.005)),
        lose=rng.choice((0.0, 0.3)),
        lose_output=rng.choice((0.0, 0.02, 0.1)),
    )
