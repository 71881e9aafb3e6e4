"""Random flows over random rows, and the one check they are all put to: what comes out is what the oracle says.

Everything is drawn from one ``random.Random``. Hypothesis brings its own, which it can shrink; the simulation seeds
one, so that a seed is all there is to a case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream import Flow, ListSource, MemorySink, Stream
from midstream.engine.collector import FRAME_BYTES
from midstream.flow.knobs import KNOBS
from midstream.flow.model import Sink, Source, Transform
from midstream.testing import ControlAt, Faults, LocalRun, ManualClock, run_local
from tests.oracle import Answer, Row, SchemaError, interpret, multiset

STRINGS = ("", "a", "b", "ab", "é", "日本", "🙂", "a\0", "x" * 40)
MAX_STEPS = 10
"""Operators between sources and sinks."""
MAX_EXPANSIONS = 2
"""Operators that multiply rows, on any path: more of them would only make more of the same."""
MAX_COLUMNS = 7
NUMBER = pa.int32()
TEXT = pa.string()


# ── the functions: each one said twice, for rows and for batches ──────────────────────────────────────────────────


@dataclass(frozen=True)
class Add:
    """Adds to a number; null stays null."""

    column: str
    amount: int

    def __call__(self, row: Row) -> Row:
        if row[self.column] is not None:
            row[self.column] += self.amount  # in place, as users do
        return row

    def batches(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        index = batch.schema.get_field_index(self.column)
        changed = pc.add(batch.column(index), pa.scalar(self.amount, NUMBER))
        return batch.set_column(index, batch.schema.field(index), changed)


@dataclass(frozen=True)
class Describe:
    """Another schema: the row's id, and the rest of it as text."""

    column: str

    def __call__(self, row: Row) -> Row:
        return {"text": f"{self.column}={row[self.column]!r}", "id": row["id"]}

    def batches(self, batch: pa.RecordBatch) -> pa.Table:
        text = [f"{self.column}={value!r}" for value in batch.column(self.column).to_pylist()]
        return pa.table({"text": pa.array(text, pa.large_string()), "id": batch.column("id")})


@dataclass(frozen=True)
class Measure:
    """One more column: how long a text is."""

    column: str
    added: str

    def __call__(self, row: Row) -> Row:
        text = row[self.column]
        return {**row, self.added: None if text is None else len(text)}

    def batches(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column(self.added, pc.utf8_length(batch.column(self.column)))


@dataclass(frozen=True)
class Odd:
    """Keeps odd numbers, or those that are not odd; null is neither."""

    column: str
    wanted: int

    def __call__(self, row: Row) -> bool:
        return row[self.column] is not None and row[self.column] & 1 == self.wanted

    def batches(self, batch: pa.RecordBatch) -> pa.Array:
        return pc.equal(pc.bit_wise_and(batch.column(self.column), pa.scalar(1, NUMBER)), self.wanted)


@dataclass(frozen=True)
class Repeat:
    """As many copies as the number says, none for null; a generator for rows."""

    column: str

    def times(self, value: int | None) -> int:
        return 0 if value is None else value & 3

    def __call__(self, row: Row) -> Iterator[Row]:
        for _ in range(self.times(row[self.column])):
            yield row

    def batches(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        times = [self.times(value) for value in batch.column(self.column).to_pylist()]
        return batch.take(pa.array(np.repeat(np.arange(batch.num_rows), times)))


@dataclass(frozen=True)
class Pick:
    """Chooses a branch by the length of a text, or by whether there is one."""

    column: str
    branches: tuple[str, ...]

    def of(self, value: str | None) -> str:
        return self.branches[0 if value is None else len(value) % len(self.branches)]

    def __call__(self, row: Row) -> str:
        return self.of(row[self.column])

    def batches(self, batch: pa.RecordBatch) -> Any:
        return np.array([self.of(value) for value in batch.column(self.column).to_pylist()], dtype=object)


@dataclass(frozen=True)
class Trip:
    """A function that fails on rows of some numbers, or gives one of them what does not fit."""

    function: Any
    of: int

    def __call__(self, row: Row) -> Any:
        if row["id"] % 5 == self.of:
            raise ValueError(f"row {row['id']}")
        answer = self.function(row)
        if isinstance(answer, dict) and row["id"] % 7 == self.of:
            return {**answer, "id": "wrong"}
        return answer

    def batches(self, batch: pa.RecordBatch) -> Any:
        result = self.function.batches(batch)
        for row in batch.column("id").to_pylist():
            if row % 5 == self.of:
                raise ValueError(f"row {row}")
            if isinstance(self.function, Add | Describe | Measure) and row % 7 == self.of:
                # As from_rows says it of the row's function, which is what the oracle calls.
                raise SchemaError("column 'id': expected bigint, found str 'wrong'")
        return result


def even_only(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(pc.bit_wise_and(table.column("id"), 1), 0))


def backwards(table: pa.Table) -> pa.Table:
    return table.sort_by([("id", "descending")]).select(table.column_names[::-1])


def counted(table: pa.Table) -> pa.Table:
    """One row per epoch, also for an empty one: shows that a transform sees an epoch as a whole."""
    return pa.table({"text": [f"{table.num_rows} rows"], "id": pa.array([-table.num_rows])})


def on_spark_only(df: Any) -> Any:
    raise AssertionError("the local runtime must not call what is meant for Spark")


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────


def small_frames(nbytes: int) -> AbstractContextManager[Any]:
    """Within this block frames hold about so many bytes: with the usual megabyte, few rows would ever need two."""
    return patch.dict(KNOBS, {"frame": replace(KNOBS["frame"], default=nbytes)})


@dataclass
class Case:
    """A flow with everything that is needed to run it and to know what it must give."""

    flow: Flow = field(default_factory=lambda: Flow("random"))
    epochs: dict[str, list[list[Row]]] = field(default_factory=dict)
    meanings: dict[str, Callable[[Row], Any]] = field(default_factory=dict)
    outputs: dict[str, Callable[[], dict[int, list[Row]]]] = field(default_factory=dict)
    partitions: int = 1
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    frame_bytes: int = FRAME_BYTES
    controls: list[ControlAt] = field(default_factory=list)

    def expected(self) -> list[Answer]:
        """The oracle's answer for every epoch."""
        graph = self.flow.graph
        return [
            interpret(
                graph,
                {name: epochs[n] if n < len(epochs) else [] for name, epochs in self.epochs.items()},
                self.meanings,
            )
            for n in range(max(map(len, self.epochs.values())))
        ]

    def run(self) -> LocalRun:
        """Run the flow, with a clock that stands still, so that runs can be compared to the last bit."""
        with small_frames(self.frame_bytes):
            return run_local(
                self.flow,
                partitions=self.partitions,
                seed=self.seed,
                faults=self.faults,
                clock=ManualClock(),
                changes=self.controls,
            )

    def found(self) -> dict[str, dict[int, list[Row]]]:
        """The rows of every sink by epoch, in the order in which they were written."""
        return {name: rows() for name, rows in self.outputs.items()}

    def __str__(self) -> str:
        lines = [f"partitions={self.partitions} seed={self.seed} frame_bytes={self.frame_bytes} {self.faults}"]
        for op in self.flow._operators.values():
            payload = self.epochs.get(op.name) or self.flow._payloads.get(op.name)
            lines.append(f"  {op.name} = {op.spec} of {', '.join(map(str, op.inputs)) or '—'}: {payload!r:.300}")
        return "\n".join(lines)


class _Builder:
    """Adds random operators. A stream is known with the number of multiplying operators above it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # Values come from a generator of their own: what is worth shrinking is the graph and the number of rows.
        self.values = random.Random(rng.randrange(1 << 32))
        self.case = Case()
        self.streams: list[tuple[Stream, int]] = []
        self.added = 0

    def build(self) -> Case:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            self.source()
        for _ in range(rng.randint(1, MAX_STEPS)):
            kinds: dict[Callable[[], None], int] = {
                self.map: 3,
                self.filter: 2,
                self.flat_map: 2,
                self.key_by: 5,
                self.union: 4,
                self.route: 2,
                self.lookup: 2,
                self.columns: 2,
                self.transform: 2,
                self.bypass: 1,
            }
            rng.choices(list(kinds), weights=list(kinds.values()))[0]()
        self.sinks()
        self.case.partitions = rng.randint(1, 4)
        self.case.seed = rng.randrange(1 << 32)
        self.case.frame_bytes = rng.choice((60, 500, FRAME_BYTES))
        return self.case

    # ── one method per operator ───────────────────────────────────────────────────────────────────────────────────

    def source(self) -> None:
        name, rng = self.name("source"), self.rng
        epochs = [self.rows(rng.choice((0, 1, 3, 12, 40))) for _ in range(rng.randint(1, 3))]
        ddl = rng.choice(("id bigint, n int, s string, k string", "id bigint NOT NULL, n int, s string, k string"))
        partitions = rng.randint(1, 4)
        self.case.epochs[name] = epochs
        self.add(self.case.flow.source(name, ListSource(epochs, ddl, partitions=partitions)), 0)

    def rows(self, count: int) -> list[Row]:
        values = self.values
        return [
            {
                "id": values.choice((0, 1, -1, 7, 2**62, -(2**63), values.randrange(1000))),
                "n": None if values.random() < 0.15 else values.randint(-4, 8),
                "s": None if values.random() < 0.15 else values.choice(STRINGS),
                "k": values.choice(STRINGS[:4]),
            }
            for _ in range(count)
        ]

    def map(self) -> None:
        stream, expansions = self.pick()
        if (column := self.column(stream, NUMBER)) and self.rng.random() < 0.6:
            self.function("map", stream, Add(column, self.rng.randint(-3, 3)), expansions)
        elif (column := self.column(stream, TEXT)) and len(stream.schema) < MAX_COLUMNS and self.rng.random() < 0.5:
            added = self.name("length")
            self.function("map", stream, Measure(column, added), expansions, adds=f"{added} int")
        elif column:
            self.function("map", stream, Describe(column), expansions, returns="id bigint, text string")

    def filter(self) -> None:
        stream, expansions = self.pick()
        if column := self.column(stream, NUMBER):
            self.function("filter", stream, Odd(column, self.rng.randint(0, 1)), expansions)

    def flat_map(self) -> None:
        stream, expansions = self.pick()
        if (column := self.column(stream, NUMBER)) and expansions < MAX_EXPANSIONS:
            self.function("flat_map", stream, Repeat(column), expansions + 1)

    def key_by(self) -> None:
        stream, expansions = self.pick()
        columns = self.rng.sample(stream.schema.names, self.rng.randint(1, min(2, len(stream.schema.names))))
        keyed = stream.key_by(self.name("key"), *columns, on_error=self.on_error(stream))
        self.add(keyed, expansions)
        self.add_errors(keyed, expansions)

    def union(self) -> None:
        stream, expansions = self.pick()
        alike = [each for each in self.streams if each[0] is not stream and each[0].schema.equals(stream.schema)]
        if alike:
            others = self.rng.sample(alike, self.rng.randint(1, min(2, len(alike))))
            # A union of a stream with what was made of it multiplies rows too.
            deepest = max(expansions, *(e for _, e in others)) + 1
            if deepest <= MAX_EXPANSIONS + 2:
                self.add(stream.union(self.name("union"), *(other for other, _ in others)), deepest)

    def route(self) -> None:
        stream, expansions = self.pick()
        if not (column := self.column(stream, TEXT)):
            return
        name, branches = self.name("route"), ("low", "mid", "high")[: self.rng.randint(1, 3)]
        on_error = self.on_error(stream)
        pick = self.tripping(Pick(column, branches), on_error)
        if self.rng.random() < 0.5:
            routed = stream.route(name, pick, branches=branches, on_error=on_error)
        else:
            routed = stream.route_batches(name, pick.batches, branches=branches, on_error=on_error)
            self.case.meanings[name] = pick
        for branch in branches:
            self.add(routed[branch], expansions)
        self.add_errors(routed[branches[0]], expansions)

    def columns(self) -> None:
        """An operator with expressions, beside what its text means."""
        stream, expansions = self.pick()
        kind = self.rng.choice(("select", "with_columns", "where", "rename", "drop"))
        column = self.column(stream, NUMBER)
        texts = [each.name for each in stream.schema if each.type.equals(TEXT)]
        if not column or len(texts) < 2:
            return
        name, text, new = self.name(kind), self.rng.choice(texts[1:]), self.name("column")
        meaning: Callable[[Row], Row | None]
        if kind == "select":
            made: Stream = stream.select(name, "*", f"upper({text}) AS {new}")
            meaning = lambda row: {**row, new: row[text] and row[text].upper()}  # noqa: E731
        elif kind == "with_columns":
            made = stream.with_columns(name, {column: f"CASE WHEN {column} > 3 THEN NULL ELSE {column} END"})
            meaning = lambda row: {**row, column: None if (row[column] or 0) > 3 else row[column]}  # noqa: E731
        elif kind == "where":
            made = stream.where(name, f"{column} > 0 OR {text} IS NULL")
            meaning = lambda row: row if (row[column] or 0) > 0 or row[text] is None else None  # noqa: E731
        elif kind == "rename":
            made = stream.rename(name, {text: new})
            meaning = lambda row: {new if each == text else each: value for each, value in row.items()}  # noqa: E731
        else:
            made = stream.drop(name, text)
            meaning = lambda row: {each: value for each, value in row.items() if each != text}  # noqa: E731
        self.case.meanings[name] = meaning
        self.add(made, expansions)

    def lookup(self) -> None:
        stream, expansions = self.pick()
        column = self.column(stream, self.rng.choice((NUMBER, TEXT)))
        if not column or len(stream.schema) >= MAX_COLUMNS or expansions >= MAX_EXPANSIONS:
            return
        name, values, unique = self.name("lookup"), self.values, self.rng.random() < 0.5
        numbers = pa.types.is_integer(stream.schema.field(column).type)
        keys: list[Any] = [*range(-2, 6), None] if numbers else [*STRINGS[:5], None]
        keys = values.sample(keys, values.randint(0, len(keys)))
        if not unique:
            keys += values.choices([*keys, None], k=4)
        table = pa.table(
            {
                f"{name}_n": pa.array([values.randint(0, 9) for _ in keys], pa.int32()),
                f"{name}_k": pa.array(keys, pa.int64() if numbers else pa.string()),
                f"{name}_s": pa.array([values.choice((*STRINGS, None)) for _ in keys], pa.string()),
            }
        )
        how = self.rng.choice(("inner", "left"))
        on_error = self.on_error(stream)
        joined = stream.lookup(name, table, on={column: f"{name}_k"}, how=how, unique=unique, on_error=on_error)
        self.add(joined, expansions + (not unique))
        self.add_errors(joined, expansions)

    def transform(self) -> None:
        stream, expansions = self.pick()
        if self.rng.random() < 0.3:
            made = stream.transform(self.name("sql"), on_spark_only, returns="id bigint, text string", local=counted)
        else:
            local = self.rng.choice((even_only, backwards))
            made = stream.transform(self.name("sql"), on_spark_only, local=local)
        self.add(made, expansions)

    def bypass(self) -> None:
        """Keyed rows and those of a transform, in one union: two ways of a stream through different segments."""
        stream, expansions = self.pick()
        if expansions < MAX_EXPANSIONS:
            keyed = stream.key_by(self.name("key"), self.rng.choice(stream.schema.names))
            made = stream.transform(self.name("sql"), on_spark_only, local=even_only)
            self.add(keyed.union(self.name("union"), made), expansions + 1)

    def sinks(self) -> None:
        """One behind every stream that nothing reads and some behind others, or one for all that is left."""
        read = {port for op in self.case.flow._operators.values() for port in op.inputs}
        loose = [stream for stream, _ in self.streams if stream._port not in read]
        if self.rng.random() < 0.4:
            self.sink(self.gathered(loose))
            return
        for stream, _ in self.streams:
            if stream in loose or self.rng.random() < 0.15:
                self.sink(stream)

    def gathered(self, streams: Sequence[Stream]) -> Stream:
        """All in one stream, whatever their schemas and depths were."""
        alike = []
        for stream in streams:
            column = self.column(stream, TEXT)
            assert column, "every schema here has a text"
            alike.append(stream.map(self.name("map"), Describe(column), returns="id bigint, text string"))
        first, *others = alike
        return first.union(self.name("union"), *others) if others else first

    def sink(self, stream: Stream) -> None:
        name = self.name("sink")
        if self.rng.random() < 0.7:
            memory = MemorySink()
            stream.sink(name, memory)
            self.case.outputs[name] = lambda: {epoch: table.to_pylist() for epoch, table in memory.tables.items()}
        else:  # of the kind that may read its rows more than once
            called: dict[int, list[Row]] = {}
            stream.sink(name, lambda table, epoch: called.__setitem__(epoch, table.to_pylist()))
            self.case.outputs[name] = lambda: dict(called)

    # ── what they share ───────────────────────────────────────────────────────────────────────────────────────────

    def function(self, kind: str, stream: Stream, function: Any, expansions: int, **schema: str) -> None:
        name, on_error = self.name(kind), self.on_error(stream)
        function = self.tripping(function, on_error)
        if self.rng.random() < 0.5:
            made = getattr(stream, kind)(name, function, on_error=on_error, **schema)
        else:
            made = getattr(stream, f"{kind}_batches")(name, function.batches, on_error=on_error, **schema)
            self.case.meanings[name] = function
        self.add(made, expansions)
        self.add_errors(made, expansions)

    def on_error(self, stream: Stream) -> str:
        """What is done with bad rows; a stream of such rows has the column of their reasons already."""
        wanted = (
            self.values.random() < 0.3 and {"id"} <= set(stream.schema.names) and "error" not in stream.schema.names
        )
        return "branch" if wanted else "fail"

    def tripping(self, function: Any, on_error: str) -> Any:
        return Trip(function, self.values.randrange(2)) if on_error == "branch" else function

    def add_errors(self, made: Stream, expansions: int) -> None:
        if self.case.flow._operators[made._port.operator].error_branches:
            self.add(made.errors(), expansions)

    def add(self, stream: Stream, expansions: int) -> None:
        self.streams.append((stream, expansions))

    def pick(self) -> tuple[Stream, int]:
        """Some stream; the newest more often, so that graphs grow deep as well as wide."""
        return self.streams[-1] if self.rng.random() < 0.5 else self.rng.choice(self.streams)

    def column(self, stream: Stream, kind: pa.DataType) -> str | None:
        columns = [column.name for column in stream.schema if column.type.equals(kind)]
        return self.rng.choice(columns) if columns else None

    def name(self, kind: str) -> str:
        self.added += 1
        return f"{kind}{self.added}"


def random_case(rng: random.Random) -> Case:
    """A random flow over random rows, on a runtime where nothing goes wrong."""
    return _Builder(rng).build()


def random_faults(rng: random.Random) -> Faults:
    """Each fault more or less often. Rare enough that a task of a dozen slices gets through now and then."""
    chances = (0.0, 0.02, 0.08)
    return Faults(
        crash=rng.choice(chances),
        speculate=rng.choice(chances),
        repeat=rng.choice((0.0, 0.3)),
        give_up=rng.choice((0.0, 0.005, 0.02)),
        crash_driver=rng.choice((0.0, 0.002, 0.01)),
    )


# ── the check ─────────────────────────────────────────────────────────────────────────────────────────────────────


def check(case: Case) -> LocalRun:
    """Run the case and compare rows and counts with the oracle's; an error shows the whole case."""
    answers = case.expected()
    run = case.run()
    found = case.found()
    for epoch, answer in enumerate(answers):
        for sink, rows in answer.sinks.items():
            wanted, got = multiset(rows), multiset(found[sink][epoch])
            missing, extra = list((wanted - got).elements()), list((got - wanted).elements())
            assert wanted == got, f"epoch {epoch}, {sink}: missing {missing[:3]}, not wanted {extra[:3]}\n{case}"
    # An epoch that was committed just before the driver crashed is final; the next driver does not count it.
    epochs = [progress.epoch for progress in run.progress]
    assert epochs == sorted(set(epochs)), case
    assert set(epochs) <= set(range(len(answers))), case
    assert len(epochs) == len(answers) or case.faults.crash_driver, case
    _check_counts(case, run, answers)
    return run


def _check_counts(case: Case, run: LocalRun, answers: Sequence[Answer]) -> None:
    graph = case.flow.graph
    for progress in run.progress:
        answer = answers[progress.epoch]
        for stats in progress.operators:
            name = stats.operator
            got = stats.rows_in, stats.rows_out, stats.errors
            wanted = answer.taken[name], answer.given[name], answer.errors[name]
            assert got == wanted, f"epoch {progress.epoch}, {stats.operator}: counted {got}, not {wanted}\n{case}"
        assert progress.rows_in == sum(answer.taken[op.name] for op in graph.of(Source)), case
        # Rows that a transform hands straight to a sink leave without passing a stage, and are not counted.
        counted = [op for op in graph.of(Sink) if not isinstance(graph[op.inputs[0].operator].spec, Transform)]
        assert progress.rows_out == sum(len(answer.sinks[op.name]) for op in counted), case
    in_stages = {op.name for op in graph if not isinstance(op.spec, Sink | Transform)}
    for progress in run.progress:
        assert in_stages <= {stats.operator for stats in progress.operators}, case
    assert run.metrics.rows_in == sum(progress.rows_in for progress in run.progress), case
