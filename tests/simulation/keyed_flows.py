"""Random flows with state over random rows and times, and the check they are all put to.

A case is run in several lives of a job, each with a number of partitions of its own, on one checkpoint. What every sink
holds of every epoch, what every operator has counted and what is left in the checkpoint must be what
:mod:`tests.keyed_oracle` says. Everything is drawn from one ``random.Random``: a seed is all there is to a case.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as papq

from midstream import FileSink, Flow, KeyedStream, ListSource, MemorySink, Stream, agg, sessions, sliding, tumbling
from midstream.checkpoint import sink_files
from midstream.checkpoint import sweeper as sweeping
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.sink_files import committed_files
from midstream.control.coordinator import Coordinator
from midstream.control.messages import EpochOpened, Event, Instruction
from midstream.engine.collector import FRAME_BYTES
from midstream.flow.model import Graph, Port, Sink, port_schema
from midstream.metrics import EpochProgress
from midstream.operators import join_step, process_step
from midstream.runtime.local import control as local_control
from midstream.runtime.local import runtime as local
from midstream.runtime.local.runtime import run_graph
from midstream.state import lineage, mapped
from midstream.testing import ControlAt, Faults, LocalRun, ManualClock, MigrateAt
from tests.assignments import uneven
from tests.epochs import small_blocks
from tests.keyed_oracle import KeyedOracle, us
from tests.ledger import Ledger
from tests.oracle import Answer, Row, multiset
from tests.simulation.flows import Add, Odd, Pick, Repeat, random_faults, small_frames
from tests.simulation.keyed_state import compare_state

SCHEMA = "id bigint, k string, g int, n int, s string, t timestamp"
START = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = (("k",), ("g",), ("k", "g"), ("g", "k"))


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def shown(value: Any) -> str:
    """Like repr, but the same for all kinds of UTC."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(each)}" for name, each in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value) if isinstance(value, datetime) else repr(value)


def spoiled(row: Row) -> bool:
    """Whether functions that trip fail on a row."""
    return bool(row["id"] % 6 == 3)


def trip(row: Row) -> None:
    """Fail on some of these rows; the others are to fail in another way."""
    if row["id"] % 4 == 3:
        raise ValueError(f"row {row['id']} with {row['n']}")


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Remember:
    """Uses all that state has. Its results hang on the order of a key's rows only if ``ordered``."""

    keys: tuple[str, ...]
    ordered: bool
    lag_s: int
    trips: bool = False
    """Whether it fails on some rows and timers, when it has changed much of its state already."""

    def __call__(self, key: Any, row: Row, state: Any) -> Any:
        n, when = row["n"], row["t"] + timedelta(seconds=self.lag_s)
        state.set(state.get(0) + (n or 0) + 1)
        largest = state.list("largest")
        kept = sorted([*largest, row["id"]])[-4:]
        largest.clear()
        largest.extend(kept)
        counts = state.map("by g")
        group = str(row["g"])  # None cannot be a key of a map
        counts[group] = counts.get(group, 0) + 1
        if n is not None and n % 2:
            state.event_timer(when)
        if n == 2:
            state.clock_timer(state.now + timedelta(seconds=10))
        if self.trips and spoiled(row):
            state.map("by g").clear()
            state.list("largest").append(None)
            state.cancel_event_timer(when)
            state.event_timer(when + timedelta(seconds=1))
            trip(row)
            return {**row, "n": "wrong"}
        return self._in_order(row, state, when) if self.ordered else row

    def _in_order(self, row: Row, state: Any, when: datetime) -> Any:
        state.list("recent").append(row["id"], keep=3)
        match row["n"]:
            case 0:
                state.delete()
            case 3:
                state.clear()
            case 4:
                for seconds in range(-6, 7):
                    state.cancel_event_timer(when + timedelta(seconds=seconds))
                state.cancel_clock_timer(state.now + timedelta(seconds=10))
            case 5:
                state.map("by g").pop(str(row["g"]), None)
            case 6:
                state.map("by g").clear()
                state.list("largest").clear()
            case 8:  # what the other rows do not look at
                state.map("seldom")[row["id"]] = row["s"]
                state.list("seldom").append(row["g"])
            case None:
                return None
        told = {**row, "s": self._told(state)}
        return [told, {**told, "n": None}] if row["n"] == 7 else told

    def on_timer(self, key: Any, time: datetime, state: Any) -> Any:
        state.list("fired").append(time, keep=2)
        if self.trips and time.second % 4 == 0:
            state.clear()
            state.event_timer(time + timedelta(seconds=1))
            raise ValueError(f"no timer at {time.second} seconds")
        if time.second % 3 == 0:
            state.event_timer(time + timedelta(seconds=4))
        values = dict(zip(self.keys, key if len(self.keys) > 1 else (key,), strict=True))
        row = {"id": -1, "k": "", "g": 0, "n": 1, "s": self._told(state), "t": time}
        return {**row, **values} if time.second % 2 else iter([{**row, **values}])

    def _told(self, state: Any) -> str:
        lists = [list(state.list(name)) for name in ("largest", "recent", "fired")]
        return shown([state.get("nothing"), *lists, dict(state.map("by g")), state.now, state.watermark])


@dataclass(frozen=True)
class BatchTotals:
    """A sum per key, for batches of rows; ``rows`` is what it means."""

    ordered: bool
    trips: bool = False

    def __call__(self, keys: Any, batch: pa.RecordBatch, state: Any) -> pa.RecordBatch:
        totals = state.get(0)
        results = []
        for group, n in zip(keys.group_of_row.tolist(), batch.column("n").to_pylist(), strict=True):
            totals[group] += n or 0
            results.append(str(totals[group]))
        state.set(totals)
        if self.trips:
            for row in batch.to_pylist():
                if spoiled(row):
                    trip(row)
                    raise ValueError("wrong")
        if not self.ordered:
            return batch
        index = batch.schema.get_field_index("s")
        return batch.set_column(index, batch.schema.field(index), pa.array(results))

    def rows(self, key: Any, row: Row, state: Any) -> Row:
        state.set(state.get(0) + (row["n"] or 0))
        if self.trips and spoiled(row):
            trip(row)
            raise ValueError("wrong")
        return {**row, "s": str(state.get())} if self.ordered else row


@dataclass(frozen=True)
class Trip:
    """A function for rows or batches that fails on some rows, or gives what does not fit."""

    function: Any

    def __call__(self, row: Row) -> Any:
        if spoiled(row):
            trip(row)
            wrong = {**row, "n": "wrong"}
            answer = self.function(row)
            if isinstance(answer, dict):
                return wrong
            if not isinstance(answer, bool):
                return iter([*answer, wrong])
            raise ValueError("wrong")
        return self.function(row)

    def batches(self, batch: pa.RecordBatch) -> Any:
        for row in batch.to_pylist():
            if spoiled(row):
                trip(row)
                raise ValueError("wrong")
        return self.function.batches(batch)


@dataclass(frozen=True)
class Flatten:
    """Rows of any schema in ours. All columns tell in all others, so that no mistake is lost on the way."""

    def __call__(self, row: Row) -> Row:
        text = shown(row)
        code = zlib.crc32(text.encode())
        time = row.get("window_start") or row.get("latest") or row["t"]
        return {"id": code, "k": "ab"[code & 1], "g": code % 3, "n": code % 9 - 1, "s": text, "t": time}


@dataclass(frozen=True)
class Rename:
    """The right side of a join, whose columns must have names of their own."""

    def __call__(self, row: Row) -> Row:
        return {f"r_{name}": value for name, value in row.items()}


@dataclass(frozen=True)
class Shift:
    """Rows happen at other times than their source says."""

    seconds: int

    def __call__(self, row: Row) -> Row:
        return {**row, "t": row["t"] + timedelta(seconds=self.seconds)}


# ── a case ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Life:
    """One life of a job: how many epochs it runs, and with how many partitions."""

    epochs: int
    partitions: int
    is_uneven: bool = False
    """Whether stages have numbers of partitions of their own, some of which own nothing."""


@dataclass(frozen=True)
class HasKey:
    """Keeps rows that can be grouped by ``k``: neither null nor too long."""

    def __call__(self, row: Row) -> bool:
        return row["k"] is not None and len(str(row["k"])) < 100


@dataclass
class KeyedCase:
    """A flow with everything that is needed to run it and to know what it must give."""

    folder: Path
    flow: Flow = field(default_factory=lambda: Flow("keyed"))
    epochs: dict[str, list[list[Row]]] = field(default_factory=dict)
    """The rows of every source; all have as many epochs."""
    source_partitions: dict[str, int] = field(default_factory=dict)
    meanings: dict[str, Callable[..., Any]] = field(default_factory=dict)
    outputs: dict[str, Callable[[], dict[int, list[Row]]]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    frame_bytes: int = FRAME_BYTES
    small: int = 1000
    """Thresholds of state and of operators are about this."""
    pauses: Sequence[int] = (0,)
    """Seconds by which the clock moves on after an epoch was begun, over and over."""
    hosts_die: bool = False
    """Whether tasks and local copies of state are gone, too, when the driver crashes."""
    closes: bool = False
    """Whether the last life closes all windows at its end, in an epoch of its own."""
    clocks: dict[int, int] = field(default_factory=dict)
    """What the clock said when the last run of each epoch began."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Where file sinks write."""
    seen: dict[str, dict[int, list[Row]]] = field(default_factory=dict)
    """What plain readers saw in these folders when a driver had last started."""
    ledger: Ledger | None = None
    migrations: list[MigrateAt] = field(default_factory=list)
    controls: list[ControlAt] = field(default_factory=list)
    executors: int = 1
    drivers: int = 0
    """How many there were: one in each life, and one after each crash."""
    disagreements: list[str] = field(default_factory=list)
    """What the ledger said when a driver had crashed."""

    def keep_ledger(self, stream: Stream) -> None:
        """Let the flow keep a ledger of a source's rows."""
        self.ledger = Ledger(self.folder / "ledger.db")
        self.ledger.keep(stream.filter("with a key", HasKey()).key_by("by ledger", "k"), "n")
        self.outputs[self.ledger.rows_sink] = self.ledger.by_epoch

    @property
    def checkpoint(self) -> str:
        return str(self.folder / "checkpoint")

    @property
    def bins(self) -> int:
        """Usual, few and many; as many as the largest number of partitions at least."""
        return (256, 16, 4096)[self.seed % 3]

    @property
    def length(self) -> int:
        return len(next(iter(self.epochs.values()))) + self.closes

    def graph_of(self, start: int, end: int) -> Graph:
        """The flow over some of its epochs."""
        graph = self.flow.graph
        sources = {
            name: ListSource(epochs[start:end], SCHEMA, event_time="t", partitions=self.source_partitions[name])
            for name, epochs in self.epochs.items()
        }
        return replace(graph, payloads={**graph.payloads, **sources})

    def run(self) -> list[LocalRun]:
        """Live all lives."""
        clock = ManualClock(start_us=us(START))
        runs, start = [], 0
        if self.ledger is not None:
            self.ledger.create()
        with self.watched(clock):
            for number, life in enumerate(self.lives):
                graph = self.graph_of(start, start + life.epochs)
                runs.append(
                    run_graph(
                        graph,
                        partitions=life.partitions,
                        assignments=uneven(graph, self.seed + number, bins=self.bins) if life.is_uneven else None,
                        bins=self.bins,
                        seed=self.seed + number,
                        faults=self.faults,
                        clock=clock,
                        checkpoint=self.checkpoint,
                        close_windows=self.closes and number == len(self.lives) - 1,
                        changes=[
                            *(each for each in self.migrations if start <= each.epoch < start + life.epochs),
                            *(each for each in self.controls if start <= each.epoch < start + life.epochs),
                        ],
                        executors=self.executors,
                    )
                )
                start += life.epochs
        return runs

    def unlike_committed(self, checkpoint: Checkpoint) -> list[str]:
        """What plain readers of file sinks see that is not committed, now that a driver has started."""
        newest = checkpoint.newest_manifest()
        wanted = -1 if newest is None else newest.epoch
        problems = []
        for sink, folder in self.folders.items():
            seen, listed = files_of(folder), rows_by_epoch(map(Path, committed_files(str(folder))))
            if seen != listed:
                problems.append(f"{sink}: plain readers see other rows than those of committed_files")
            if max(seen, default=-1) > wanted:
                problems.append(f"{sink}: epoch {max(seen)} is visible, committed is {wanted}")
            for epoch, rows in self.seen.setdefault(sink, {}).items():
                if epoch < wanted and multiset(seen.get(epoch, [])) != multiset(rows):
                    problems.append(f"{sink}: epoch {epoch} is not what it was")
            self.seen[sink] = seen
        return problems

    @contextmanager
    def watched(self, clock: ManualClock) -> Iterator[None]:
        """Small thresholds, and a clock that moves on with every run of an epoch."""
        case, pauses = self, itertools.cycle(self.pauses)

        def restarted(runtime: Any) -> None:
            case.drivers += 1
            if case.ledger is not None:
                case.disagreements += case.ledger.problems(case.checkpoint)
            if case.hosts_die:
                _end_hosts(runtime)
            _start_driver(runtime)
            case.disagreements += case.unlike_committed(runtime.checkpoint)

        class Watched(Coordinator):
            def handle(self, event: Event) -> list[Instruction]:
                if isinstance(event, EpochOpened):
                    case.clocks[event.epoch] = event.clock
                    clock.advance(seconds=next(pauses))
                return super().handle(event)

        with ExitStack() as stack:
            stack.enter_context(small_frames(self.frame_bytes))
            stack.enter_context(small_thresholds(self.small))
            stack.enter_context(patch.object(sink_files, "MERGE_FILES", 3))
            stack.enter_context(patch.object(local_control, "Coordinator", Watched))
            stack.enter_context(patch.object(local._Runtime, "_start_driver", restarted))
            yield

    def expected(self) -> tuple[list[Answer], KeyedOracle]:
        """The oracle's answer for every epoch, and the oracle. Only after a run, which says what the clock said."""
        oracle = KeyedOracle(self.flow.graph, self.meanings)
        answers = [
            oracle.epoch({name: epochs[n] for name, epochs in self.epochs.items()}, self.clocks[n])
            for n in range(self.length - self.closes)
        ]
        if self.closes:
            nothing: dict[str, list[Row]] = {name: [] for name in self.epochs}
            answers.append(oracle.epoch(nothing, self.clocks[self.length - 1], closing=True))
        return answers, oracle

    def __str__(self) -> str:
        lines = [
            f"{self.lives} seed={self.seed} frame_bytes={self.frame_bytes} small={self.small} pauses={self.pauses} "
            f"hosts_die={self.hosts_die} {self.faults}"
        ]
        for op in self.flow._operators.values():
            payload = "rows below" if op.name in self.epochs else self.flow._payloads.get(op.name)
            lines.append(f"  {op.name} = {op.spec} of {', '.join(map(str, op.inputs)) or '—'}: {payload!r:.200}")
        for name, epochs in self.epochs.items():
            lines += [f"  {name}, epoch {n}: {shown(rows):.3000}" for n, rows in enumerate(epochs)]
        return "\n".join(lines)


_start_driver = local._Runtime._start_driver


def _end_hosts(runtime: Any) -> None:
    """Leave nothing of this world but the checkpoint and the sinks."""
    for attempt in runtime._zombies:
        attempt.close()
    runtime._zombies.clear()
    for executor in runtime.executors.all:
        executor.wipe()


@contextmanager
def small_thresholds(size: int) -> Iterator[None]:
    """With few rows and epochs, snapshots, mergers, sweeps and portions would hardly ever happen."""
    with ExitStack() as stack:
        for module, name, value in (
            (lineage, "MIN_ROWS", 4 * size),
            (lineage, "MERGED_AT_ONCE", 1 + size),
            (lineage, "MAX_ENTRIES", 2 * size),
            (lineage, "SMALL_REWRITE", 5 * size),
            (mapped, "FIRST_SIZE", 1 << 20),
            (sweeping, "FULL_SWEEP_EVERY", 1 + size),
            (join_step, "MAX_PAIRS", 4 * size),
            (process_step, "TIMERS_AT_ONCE", 2 * size),
        ):
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(small_blocks(1 + size))
        yield


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Made:
    """A stream, and whether rows of one key (of any, or of these columns) come in the order of their source."""

    stream: Stream
    ordered: bool | tuple[str, ...]

    def is_ordered_by(self, keys: tuple[str, ...]) -> bool:
        return self.ordered is True or self.ordered == keys


class _Builder:
    def __init__(self, rng: random.Random, folder: Path, only: str | None) -> None:
        self.rng = rng
        self.only = only
        self.values = random.Random(rng.randrange(1 << 32))
        # Draws of its own, so that other cases stay as they are: what is bad in a case.
        self.spoils = random.Random(self.values.getstate()[1][1])
        self.on_error = "branch" if self.spoils.random() < 0.5 else "fail"
        self.sources = 1
        self.case = KeyedCase(folder)
        self.ids = iter(range(1 << 30))
        self.added = 0

    def build(self) -> KeyedCase:
        rng, case = self.rng, self.case
        length = 6 if self.only else rng.choice((3, 3, 3, 4, 4, 8))
        self.sources = rng.choice((1, 1, 2))
        sources = [self.source(length) for _ in range(self.sources)]
        made = [self.prepared(source, sources) for source in sources]
        results = self.keyed(made)
        if not self.only and rng.random() < 0.35:
            chosen = rng.sample(results, min(len(results), rng.choice((1, 1, 2))))
            results = [one for one in results if one not in chosen]
            results += self.keyed([self.flattened(one) for one in chosen])
        for one in results:
            self.sink(one.stream)
        read = {port for op in case.flow._operators.values() for port in op.inputs}
        for op in list(case.flow._operators.values()):
            if not isinstance(op.spec, Sink) and Port(op.name) in op.ports and Port(op.name) not in read:
                self.sink(Stream(case.flow, Port(op.name), op.schema))
        for op in list(case.flow._operators.values()):
            for branch in op.error_branches:
                self.sink_of_errors(Port(op.name, branch))
        case.closes = self.spoils.random() < 0.3
        cut = rng.randint(1, length - 1)
        lives = [length] if rng.random() < 0.5 else [cut, length - cut]
        counts = [rng.choice((1, 1, 2, 2, 3, 4)) for _ in lives]
        case.lives = [Life(epochs, count, is_uneven=count == 3) for epochs, count in zip(lives, counts, strict=True)]
        case.seed = rng.randrange(1 << 32)
        case.frame_bytes = rng.choice((60, 500, FRAME_BYTES))
        case.small = rng.choice((1, 2, 3, 1000))
        case.hosts_die = rng.random() < 0.5
        case.pauses = [rng.choice((0, 1, 5, 10, 30)) for _ in range(7)]
        return case

    def source(self, length: int) -> Made:
        name, rng = self.name("source"), self.rng
        partitions = rng.choice((1, 1, 1, 2, 3))
        quiet = rng.choice((0, 0, 0, 2))
        epochs = [
            self.rows(n, 0 if n < quiet else rng.choice((4, 8, 14) if self.only else (0, 1, 3, 6, 14)))
            for n in range(length)
        ]
        if self.spoils_rows:
            epochs = [[self.spoiled(row) for row in rows] for rows in epochs]
        self.case.epochs[name], self.case.source_partitions[name] = epochs, partitions
        stream = self.case.flow.source(
            name,
            ListSource(epochs, SCHEMA, event_time="t", partitions=partitions),
            delay=f"{rng.choice((0, 0, 3, 10))} seconds",
            idle=self.spoils.choice((None, None, "6 seconds", "20 seconds")) if self.sources > 1 else None,
            on_error=self.spoils.choice((self.on_error, "fail")),
        )
        return Made(stream, partitions == 1)

    def rows(self, epoch: int, count: int) -> list[Row]:
        """Event times go on by about eight seconds an epoch; whole seconds, so that limits are hit exactly."""
        values = self.values
        return [
            {
                "id": next(self.ids),
                "k": values.choice(("", "a", "b", "日本")),
                "g": values.choice((-1, 0, 1)),
                "n": None if values.random() < 0.1 else values.randint(-1, 8),
                "s": None if values.random() < 0.2 else values.choice(("", "x", "xy", "🙂")),
                "t": at(8 * epoch + values.randint(-12, 7) + values.choice((0, 0, 0, 0.5))),
            }
            for _ in range(count)
        ]

    @property
    def spoils_rows(self) -> bool:
        return self.on_error == "branch"

    def spoiled(self, row: Row) -> Row:
        """Now and then without a key or a time, with a key that is too long, or from the far future."""
        match self.spoils.randrange(40):
            case 0:
                return {**row, "k": None}
            case 1:
                return {**row, "g": None}
            case 2:
                return {**row, "k": "x" * 490}
            case 3:
                return {**row, "t": None}
            case 4:
                return {**row, "t": row["t"] + timedelta(days=400)}
        return row

    def sink_of_errors(self, port: Port) -> None:
        name, memory = f"{port.branch} of {port.operator}", MemorySink()
        Stream(self.case.flow, port, port_schema(self.case.flow._operators, port)).sink(name, memory)
        self.case.outputs[name] = lambda: {epoch: table.to_pylist() for epoch, table in memory.tables.items()}

    def tripping(self, function: Any) -> Any:
        return Trip(function) if self.spoils_rows else function

    def prepared(self, made: Made, sources: list[Made]) -> Made:
        rng, stream, ordered = self.rng, made.stream, made.ordered
        for _ in range(rng.choice((0, 0, 1, 2))):
            match rng.randrange(6):
                case 0:
                    add = self.tripping(Add("n", rng.randint(-2, 2)))
                    stream = stream.map(self.name("map"), add, on_error=self.on_error)
                case 1:
                    odd = self.tripping(Odd("n", rng.randint(0, 1)))
                    name = self.named("filter", odd)
                    stream = stream.filter_batches(name, odd.batches, on_error=self.on_error)
                case 2:
                    repeat = self.tripping(Repeat("n"))
                    stream = stream.flat_map(self.name("repeat"), repeat, on_error=self.on_error)
                case 3:
                    shift = Shift(rng.choice((-5, 3)))
                    stream = stream.map(self.name("shift"), shift, on_error=self.on_error)
                case 4 if len(sources) > 1:
                    stream, ordered = (
                        stream.union(self.name("union"), *(s.stream for s in sources if s is not made)),
                        False,
                    )
                case 5:
                    routed = stream.route(self.name("route"), Pick("s", ("low", "high")), branches=("low", "high"))
                    stream, ordered = routed["low"].union(self.name("union"), routed["high"]), False
        return Made(stream, ordered)

    def flattened(self, made: Made) -> Made:
        if made.stream.schema.names == ["id", "k", "g", "n", "s", "t"]:
            return made
        return Made(made.stream.map(self.name("flatten"), Flatten(), returns=SCHEMA), False)

    # ── operators with state ──────────────────────────────────────────────────────────────────────────────────────

    def keyed(self, streams: list[Made]) -> list[Made]:
        """One or two operators behind one or two key_bys; what they give, late rows included."""
        rng = self.rng
        keys = rng.choice(KEYS)
        made = [
            Made(
                one.stream.key_by(self.name("by"), *keys, on_error=self.spoils.choice((self.on_error, "fail"))),
                one.is_ordered_by(keys),
            )
            for one in streams
        ]
        results: list[Made] = []
        for _ in range(1 if self.only else rng.choice((1, 1, 1, 2))):
            if self.only:
                results += getattr(self, self.only)(rng.choice(made), made, keys)
                continue
            results += rng.choice(
                (
                    self.process,
                    self.process,
                    self.process_batches,
                    self.aggregate,
                    self.windowed,
                    self.distinct,
                    self.join,
                )
            )(rng.choice(made), made, keys)
        return results

    def process(self, one: Made, others: list[Made], keys: tuple[str, ...]) -> list[Made]:
        rng = self.rng
        function = Remember(keys, one.is_ordered_by(keys), rng.choice((0, 4, 11)), self.spoils_rows)
        ttl = rng.choice((None, None, "5 seconds", "20 seconds"))
        stream = _keyed(one).process(self.name("process"), function, ttl=ttl, on_error=self.on_error)
        return [Made(stream, keys if function.ordered else False)]

    def process_batches(self, one: Made, others: list[Made], keys: tuple[str, ...]) -> list[Made]:
        function = BatchTotals(one.is_ordered_by(keys), self.spoils_rows)
        ttl = self.rng.choice((None, None, "10 seconds"))
        name = self.named("batches", function.rows)
        stream = _keyed(one).process_batches(
            name, function, one_to_one=self.rng.random() < 0.5, ttl=ttl, on_error=self.on_error
        )
        return [Made(stream, keys if function.ordered else False)]

    def aggregate(self, one: Made, others: list[Made], keys: tuple[str, ...]) -> list[Made]:
        stream = _keyed(one).aggregate(
            self.name("running"), latest=agg.max("t"), on_error=self.on_error, **self.columns(one, keys)
        )
        return [Made(stream, False)]

    def windowed(self, one: Made, others: list[Made], keys: tuple[str, ...]) -> list[Made]:
        window = self.rng.choice(
            (
                tumbling("5 seconds"),
                tumbling("10 seconds", offset="3 seconds"),
                sliding("10 seconds", every="5 seconds", offset="1 second"),
                sliding("12 seconds", every="3 seconds"),
                sessions("2 seconds"),
                sessions("4 seconds"),
            )
        )
        time = None if _keyed(one).event_time else "t"
        made = _keyed(one).aggregate(
            self.name("windows"), window=window, time=time, on_error=self.on_error, **self.columns(one, keys)
        )
        return [Made(made, False), Made(made.late(), False)]

    def columns(self, one: Made, keys: tuple[str, ...]) -> dict[str, Any]:
        known = {
            "c": agg.count(),
            "c_n": agg.count("n"),
            "sum_n": agg.sum("n"),
            "min_n": agg.min("n"),
            "max_s": agg.max("s"),
            "mean_n": agg.mean("n"),
            "min_t": agg.min("t"),
            "about": agg.approx_distinct("n"),
        }
        if one.is_ordered_by(keys):
            known["last_id"] = agg.last("id", self.rng.randint(1, 3))
        names = self.rng.sample(sorted(known), self.rng.randint(1, 4))
        return {name: known[name] for name in names}

    def distinct(self, one: Made, others: list[Made], keys: tuple[str, ...]) -> list[Made]:
        within = self.rng.choice((None, "4 seconds", "10 seconds"))
        if one.is_ordered_by(keys):
            keyed = _keyed(one)
        else:  # which row is the first cannot be said, so they are all alike
            alike = one.stream.map(self.name("alike"), self.rng.choice((_without_null, _without_id)))
            keyed = alike.key_by(self.name("by"), *alike.schema.names)
        time = None if within is None else "t"
        return [Made(keyed.distinct(self.name("distinct"), within=within, time=time, on_error=self.on_error), False)]

    def join(self, one: Made, others: list[Made], keys: tuple[str, ...]) -> list[Made]:
        """With another stream, or with itself."""
        rng, other = self.rng, self.rng.choice(others)
        renamed = ", ".join(f"r_{column}" for column in SCHEMA.split(", "))
        right = other.stream.map(self.name("rename"), Rename(), returns=renamed)
        near: dict[str, Any] = rng.choice(
            (
                {"within": "0 seconds"},
                {"within": "3 seconds"},
                {"within": "9 seconds"},
                {"within": ("0 seconds", "6 seconds")},
                {"within": ("8 seconds", "2 seconds")},
                {"window": tumbling("6 seconds")},
                {"window": tumbling("6 seconds", offset="2 seconds")},
            )
        )
        keyed = right.key_by(self.name("by"), *(f"r_{key}" for key in keys))
        made = _keyed(one).join(
            self.name("join"),
            keyed,
            how=(how := rng.choice(("inner", "left", "right", "full"))),
            right_time="r_t",
            left_time="t",
            on_error=self.on_error,
            **near,
        )
        back = made.late("right").map(self.name("back"), _back, returns=SCHEMA)
        rows = made.map(self.name("fill"), _filled) if how in ("right", "full") else made
        return [Made(rows, False), Made(made.late(), False), Made(back, False)]

    # ── sinks and names ───────────────────────────────────────────────────────────────────────────────────────────

    def sink(self, stream: Stream) -> None:
        name = self.name("sink")
        if self.rng.random() < 0.75:
            memory = MemorySink()
            stream.sink(name, memory)
            self.case.outputs[name] = lambda: {epoch: table.to_pylist() for epoch, table in memory.tables.items()}
        else:
            folder = self.case.folder / name
            stream.sink(name, FileSink(str(folder), "parquet"))
            self.case.folders[name] = folder
            self.case.outputs[name] = lambda: files_of(folder)

    def named(self, kind: str, meaning: Callable[..., Any]) -> str:
        name = self.name(kind)
        self.case.meanings[name] = meaning
        return name

    def name(self, kind: str) -> str:
        self.added += 1
        return f"{kind}{self.added}"


def _keyed(made: Made) -> KeyedStream:
    assert isinstance(made.stream, KeyedStream)
    return made.stream


def _without_null(row: Row) -> Row:
    return {**row, "n": row["n"] or 0, "s": (row["s"] or "")[:40]}


def _without_id(row: Row) -> Row:
    return {**row, "id": 0, "n": 0, "s": ""}


def _back(row: Row) -> Row:
    return {name.removeprefix("r_"): value for name, value in row.items()}


def _filled(row: Row) -> Row:
    """A row of an outer join with times and keys that other operators can take."""
    if row["t"] is not None:
        return row
    return {name: row.get(f"r_{name}") if value is None else value for name, value in row.items()}


def files_of(folder: Path) -> dict[int, list[Row]]:
    """What a plain reader sees in the folder of a file sink, by epoch. Epochs without rows leave nothing there."""
    return rows_by_epoch(sorted(folder.rglob("epoch-*.parquet")))


def rows_by_epoch(files: Iterable[Path]) -> dict[int, list[Row]]:
    """The rows of a file sink's files."""
    found: dict[int, list[Row]] = defaultdict(list)
    for file in files:
        for row in papq.ParquetFile(file).read().to_pylist():
            found[row.pop("epoch")].append(row)
    return found


KINDS = ("process", "process_batches", "aggregate", "windowed", "distinct", "join")


def keyed_case_of(seed: int, folder: Path, only: str | None = None) -> KeyedCase:
    """The case that a seed stands for; with ``only`` (one of :data:`KINDS`) more rows for one operator of a kind."""
    rng = random.Random(seed)
    case = _Builder(rng, folder, only).build()
    case.faults = rare_faults(rng)
    if case.faults.crash_driver:
        source = next(iter(case.epochs))
        case.keep_ledger(Stream(case.flow, Port(source), case.flow._operators[source].schema))
    return case


def rare_faults(rng: random.Random) -> Faults:
    """Epochs with state have many steps, and must get through now and then."""
    faults = random_faults(rng)
    return replace(faults, give_up=faults.give_up / 4, crash_driver=faults.crash_driver / 2)


# ── the check ─────────────────────────────────────────────────────────────────────────────────────────────────────


def check_keyed(case: KeyedCase) -> list[LocalRun]:
    """Run the case and compare rows, counts and what is left of state with the oracle's."""
    runs = case.run()
    assert not case.disagreements, f"{case.disagreements[:3]}\n{case}"
    answers, oracle = case.expected()
    check_answers(case, answers)
    progress = [each for run in runs for each in run.progress]
    assert_counted([each.epoch for each in progress], case.length, case.drivers - len(runs), str(case))
    _check_counts(case, progress, answers)
    compare_state(case.checkpoint, case.flow.graph, oracle, str(case))
    return runs


def assert_counted(epochs: Sequence[int], length: int, crashes: int, story: str) -> None:
    """Every epoch was counted once, but for such as were committed by a driver that did not live to count them."""
    assert list(epochs) == sorted(set(epochs)), story
    assert set(epochs) <= set(range(length)), story
    assert length - len(epochs) <= crashes, story


def check_answers(case: KeyedCase, answers: Sequence[Answer]) -> None:
    """What sinks hold, epoch by epoch."""
    for sink, rows in case.outputs.items():
        found = rows()
        assert set(found) <= set(range(len(answers))), f"{sink}\n{case}"
        for epoch, answer in enumerate(answers):
            wanted, got = multiset(answer.sinks[sink]), multiset(found.get(epoch, []))
            missing, extra = list((wanted - got).elements()), list((got - wanted).elements())
            assert wanted == got, f"epoch {epoch}, {sink}: missing {missing[:3]}, not wanted {extra[:3]}\n{case}"


def _check_counts(case: KeyedCase, progress: Sequence[EpochProgress], answers: Sequence[Answer]) -> None:
    for each in progress:
        answer = answers[each.epoch]
        for stats in each.operators:
            name = stats.operator
            got = stats.rows_in, stats.rows_out, stats.rows_late, stats.errors
            wanted = answer.taken[name], answer.given[name], answer.late[name], answer.errors[name]
            assert got == wanted, f"epoch {each.epoch}, {name}: counted {got}, not {wanted}\n{case}"
