"""Operators behave alike on the local runtime and on Spark: the same tests, compared with plain Python."""

from __future__ import annotations

import datetime as dt
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from midstream import Flow, ListSource, MemorySink, NoopSink, agg, tumbling
from midstream.metrics import JobMetrics

Run = Callable[..., JobMetrics]
Row = dict[str, Any]

UTC = dt.UTC
USERS = ("ann", "bob", "cem", None)


def rows_of(count: int, first: int = 0) -> list[Row]:
    return [{"n": n, "user": USERS[n % 4]} for n in range(first, first + count)]


NUMBERS = rows_of(40)


def numbers(partitions: int = 2) -> ListSource:
    """40 rows in three epochs, the second of which is empty."""
    return ListSource([NUMBERS[:25], [], NUMBERS[25:]], "n bigint, user string", partitions=partitions)


def same(found: Iterable[Row], expected: Iterable[Row]) -> bool:
    """Equal as bags: the order between partitions is not guaranteed."""
    found, expected = sorted(found, key=repr), sorted(expected, key=repr)
    assert found == expected
    return True


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_row_functions(run: Run) -> None:
    flow, sinks = Flow("rows"), {name: MemorySink() for name in ("map", "filter", "flat_map", "odd", "even")}
    stream = flow.source("numbers", numbers())
    stream.map("square", lambda row: {"n2": row["n"] ** 2}, returns="n2 bigint").sink("map", sinks["map"])
    stream.filter("named", lambda row: row["user"]).sink("filter", sinks["filter"])
    stream.flat_map("repeat", lambda row: (row for _ in range(row["n"] % 3))).sink("flat_map", sinks["flat_map"])
    routed = stream.route("parity", lambda row: "odd" if row["n"] % 2 else "even", branches=("odd", "even"))
    for branch in routed:
        routed[branch].sink(branch, sinks[branch])

    run(flow)

    assert same(sinks["map"].rows, [{"n2": row["n"] ** 2} for row in NUMBERS])
    assert same(sinks["filter"].rows, [row for row in NUMBERS if row["user"]])
    assert same(sinks["flat_map"].rows, [row for row in NUMBERS for _ in range(row["n"] % 3)])
    assert same(sinks["odd"].rows, [row for row in NUMBERS if row["n"] % 2])
    assert same(sinks["even"].rows, [row for row in NUMBERS if not row["n"] % 2])


def test_batch_functions(run: Run) -> None:
    def square(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n2": pc.multiply(batch["n"], batch["n"])})

    def repeat(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.take(pa.array([i for i, n in enumerate(batch["n"].to_pylist()) for _ in range(n % 3)], pa.int64()))

    def parity(batch: pa.RecordBatch) -> pa.Array:
        return pc.if_else(pc.equal(pc.bit_wise_and(batch["n"], 1), 1), "odd", "even")

    flow, sinks = Flow("batches"), {name: MemorySink() for name in ("map", "filter", "flat_map", "odd", "even")}
    stream = flow.source("numbers", numbers())
    stream.map_batches("square", square, returns="n2 bigint").sink("map", sinks["map"])
    stream.filter_batches("named", lambda batch: pc.is_valid(batch["user"])).sink("filter", sinks["filter"])
    stream.flat_map_batches("repeat", repeat).sink("flat_map", sinks["flat_map"])
    routed = stream.route_batches("parity", parity, branches=("odd", "even"))
    for branch in routed:
        routed[branch].sink(branch, sinks[branch])

    run(flow)

    assert same(sinks["map"].rows, [{"n2": row["n"] ** 2} for row in NUMBERS])
    assert same(sinks["filter"].rows, [row for row in NUMBERS if row["user"]])
    assert same(sinks["flat_map"].rows, [row for row in NUMBERS for _ in range(row["n"] % 3)])
    assert same(sinks["odd"].rows, [row for row in NUMBERS if row["n"] % 2])
    assert same(sinks["even"].rows, [row for row in NUMBERS if not row["n"] % 2])


def test_rows_of_an_epoch_stay_in_it(run: Run) -> None:
    flow, out = Flow("epochs"), MemorySink()
    flow.source("numbers", numbers()).key_by("by_user", "user").map("same", lambda row: row).sink("out", out)

    metrics = run(flow)

    assert metrics.epochs == 3
    assert {epoch: table.num_rows for epoch, table in out.tables.items()} == {0: 25, 1: 0, 2: 15}
    assert same(out.tables[2].to_pylist(), NUMBERS[25:])


# ── graphs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_of_one_key_stay_in_order_across_exchanges(run: Run) -> None:
    flow, out = Flow("ordered"), MemorySink()
    stream = flow.source("numbers", numbers(partitions=1)).key_by("by_user", "user").map("one", lambda row: row)
    stream.key_by("by_user_again", "user").map("two", lambda row: row).sink("out", out)

    run(flow)

    for user in USERS:
        found = [row["n"] for row in out.rows if row["user"] == user]
        assert found == [row["n"] for row in NUMBERS if row["user"] == user]


def test_a_diamond_with_sinks_at_every_depth(run: Run) -> None:
    """Rows split, meet again behind an exchange, are joined, and leave at depths 0, 1, 2 and 3."""
    tags = "n bigint, tag string"
    flow, sinks = Flow("diamond"), {name: MemorySink() for name in ("raw", "small", "joined", "final", "all")}
    stream = flow.source("numbers", numbers())
    stream.sink("raw", sinks["raw"])
    routed = stream.route("size", lambda row: "small" if row["n"] < 20 else "large", branches=("small", "large"))
    small = routed["small"].key_by("small_by_user", "user").map("tag_small", tagged("s"), returns=tags)
    small.sink("small", sinks["small"])
    large = routed["large"].map("tag_large", tagged("l"), returns=tags)
    both = small.union("both", large)
    quarters = pa.table({"n": pa.array(range(0, 40, 4), pa.int64()), "quarter": [f"q{n}" for n in range(10)]})
    joined = both.key_by("by_n", "n").lookup("quarters", quarters, on="n")
    joined.sink("joined", sinks["joined"])
    final = joined.key_by("by_tag", "tag").map("plus", lambda row: {**row, "n": row["n"] + 1})
    final.sink("final", sinks["final"])
    both.union("everything", final.map("end", tagged("f"), returns=tags)).sink("all", sinks["all"])

    run(flow)

    tagged_rows: list[Row] = [{"n": n, "tag": "s" if n < 20 else "l"} for n in range(40)]
    found: list[Row] = [{**row, "quarter": f"q{row['n'] // 4}"} for row in tagged_rows if row["n"] % 4 == 0]
    assert same(sinks["raw"].rows, NUMBERS)
    assert same(sinks["small"].rows, tagged_rows[:20])
    assert same(sinks["joined"].rows, found)
    assert same(sinks["final"].rows, [{**row, "n": row["n"] + 1} for row in found])
    assert same(sinks["all"].rows, tagged_rows + [{"n": row["n"] + 1, "tag": "f"} for row in found])


def tagged(tag: str) -> Callable[[Row], Row]:
    return lambda row: {"n": row["n"], "tag": tag}


@pytest.mark.slow
def test_three_sources_of_different_schemas_and_lengths(run: Run) -> None:
    """Sources enter at depth 0, whether their rows are needed there or deeper; one ends while others continue."""
    flow, out, odd_out = Flow("three"), MemorySink(), MemorySink()
    ints = flow.source("ints", ListSource([[{"n": 1}, {"n": 2}]], "n bigint", partitions=2))
    texts = flow.source("texts", ListSource([[], [{"t e.xt": "7"}], [{"t e.xt": None}]], "`t e.xt` string"))
    pair_rows: list[Row] = [{"a": {"x y": 1}, "b": 3}, {"a": None, "b": 4}]
    pairs = flow.source("pairs", ListSource.of(pair_rows, schema="a struct<`x y`: int>, b bigint", epoch_rows=1))
    pairs.sink("pairs_out", odd_out)
    as_ints = texts.map("parse", lambda row: {"n": int(row["t e.xt"] or -1)}, returns="n bigint")
    bs = pairs.map("b", lambda row: {"n": row["b"]}, returns="n bigint")
    far = bs.key_by("far", "n").map("same", lambda row: row)
    ints.union("all", as_ints, far).key_by("by_n", "n").map("end", lambda row: row).sink("out", out)

    metrics = run(flow)

    assert metrics.epochs == 3
    assert [sorted(row["n"] for row in table.to_pylist()) for table in out.tables.values()] == [[1, 2, 3], [4, 7], [-1]]
    assert same(odd_out.rows, pair_rows)


def test_one_stream_read_by_several_operators_is_replicated(run: Run) -> None:
    flow, sinks = Flow("fan_out"), [MemorySink() for _ in range(3)]
    keyed = flow.source("numbers", numbers()).key_by("by_user", "user")
    for i, sink in enumerate(sinks):
        keyed.map(f"add_{i}", add(i)).sink(f"out_{i}", sink)
    keyed.sink("dropped", NoopSink())

    metrics = run(flow)

    for i, sink in enumerate(sinks):
        assert same(sink.rows, [{**row, "n": row["n"] + i} for row in NUMBERS])
    assert metrics.rows_in == 40
    assert metrics.rows_out == 160


def add(number: int) -> Callable[[Row], Row]:
    return lambda row: {**row, "n": row["n"] + number}


# ── lookup ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lookup(run: Run) -> None:
    """With pyarrow and pandas tables; keys unique or not, missing or null, with other names, of two columns."""
    ages = pa.table({"user": ["ann", "bob", "dee"], "age": pa.array([30, 40, 50], pa.int32())})
    pets = pd.DataFrame({"owner": ["ann", "ann", "bob", None], "pet": ["cat", "dog", "emu", "fly"]})
    seats = pa.table({"user": ["ann", "ann", "cem"], "n": pa.array([0, 4, 2], pa.int64()), "seat": ["1a", "1b", "1c"]})
    flow, sinks = Flow("lookups"), {name: MemorySink() for name in ("inner", "left", "many", "many_left", "two")}
    stream = flow.source("numbers", numbers())
    stream.lookup("ages", ages, on="user").sink("inner", sinks["inner"])
    stream.lookup("ages_left", ages, on="user", how="left").sink("left", sinks["left"])
    stream.lookup("pets", pets, on={"user": "owner"}, unique=False).sink("many", sinks["many"])
    pets_left = stream.lookup("pets_left", pets, on={"user": "owner"}, unique=False, how="left")
    pets_left.sink("many_left", sinks["many_left"])
    stream.key_by("by_user", "user").lookup("seats", seats, on=("user", "n")).sink("two", sinks["two"])

    run(flow)

    age = {"ann": 30, "bob": 40}
    pet = {"ann": ["cat", "dog"], "bob": ["emu"]}
    seat = {("ann", 0): "1a", ("ann", 4): "1b", ("cem", 2): "1c"}
    assert same(sinks["inner"].rows, [{**row, "age": age[row["user"]]} for row in NUMBERS if row["user"] in age])
    assert same(sinks["left"].rows, [{**row, "age": age.get(row["user"])} for row in NUMBERS])
    assert same(sinks["many"].rows, [{**row, "pet": p} for row in NUMBERS for p in pet.get(row["user"], [])])
    assert same(sinks["many_left"].rows, [{**row, "pet": p} for row in NUMBERS for p in pet.get(row["user"], [None])])
    assert same(
        sinks["two"].rows,
        [{**row, "seat": seat[row["user"], row["n"]]} for row in NUMBERS if (row["user"], row["n"]) in seat],
    )


# ── transform ─────────────────────────────────────────────────────────────────────────────────────────────────────


def count_users(table: pa.Table) -> pa.Table:
    counts = table.group_by("user").aggregate([("n", "count")])
    return pa.table({"user": counts["user"], "total": counts["n_count"]})


def test_a_transform_sees_one_epoch_after_an_exchange(run: Run) -> None:
    flow, out = Flow("totals"), MemorySink()
    keyed = flow.source("numbers", numbers()).key_by("by_user", "user").map("same", lambda row: row)
    keyed.transform(
        "totals",
        lambda df: df.groupBy("user").count().withColumnRenamed("count", "total"),
        returns="user string, total bigint",
        local=count_users,
    ).sink("out", out)

    run(flow)

    for epoch, rows in enumerate((NUMBERS[:25], [], NUMBERS[25:])):
        counts = Counter(row["user"] for row in rows)
        assert same(out.tables[epoch].to_pylist(), [{"user": u, "total": n} for u, n in counts.items()])


@pytest.mark.slow
def test_chained_transforms_beside_rows_that_bypass_them(run: Run) -> None:
    """A transform feeds another transform, an operator and a sink, while other rows bypass it."""
    flow, sinks = Flow("transforms"), {name: MemorySink() for name in ("evens", "thirds", "met", "raw")}
    stream = flow.source("numbers", numbers())
    stream.sink("raw", sinks["raw"])
    numbered = stream.key_by("by_user", "user").map("plus", add(100))
    evens = numbered.transform("evens", lambda df: df.where("n % 2 = 0"), local=where(2))
    evens.sink("evens_out", sinks["evens"])
    thirds = evens.transform("thirds", lambda df: df.where("n % 3 = 0"), local=where(3))
    thirds.sink("thirds_out", sinks["thirds"])
    after = evens.map("minus", add(-100)).key_by("by_n", "n").map("end", lambda row: row)
    passing = stream.map("negative", lambda row: {**row, "n": -1 - row["n"]})
    met = after.union("met", thirds, passing).key_by("last", "user").map("last_map", lambda row: row)
    met.sink("met_out", sinks["met"])

    run(flow)

    plus = [{**row, "n": row["n"] + 100} for row in NUMBERS]
    evens_expected = [row for row in plus if row["n"] % 2 == 0]
    thirds_expected = [row for row in evens_expected if row["n"] % 3 == 0]
    minus = [{**row, "n": row["n"] - 100} for row in evens_expected]
    assert same(sinks["raw"].rows, NUMBERS)
    assert same(sinks["evens"].rows, evens_expected)
    assert same(sinks["thirds"].rows, thirds_expected)
    assert same(sinks["met"].rows, minus + thirds_expected + [{**row, "n": -1 - row["n"]} for row in NUMBERS])


def where(divisor: int) -> Callable[[pa.Table], pa.Table]:
    def keep(table: pa.Table) -> pa.Table:
        return table.filter(pa.array([n % divisor == 0 for n in table["n"].to_pylist()], pa.bool_()))

    return keep


# ── types ─────────────────────────────────────────────────────────────────────────────────────────────────────────

ALL_TYPES = """
    yes boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f32 float, f64 double, money decimal(38,18),
    cents decimal(7,2), name string, raw binary, day date, moment timestamp, wall timestamp_ntz, words array<string>,
    moments array<timestamp>, by_name map<string, decimal(10,1)>, deep map<int, array<map<string, struct<x: binary>>>>,
    nested struct<a: int, `b c`: array<struct<d: date, e: timestamp>>>
"""
MOMENT = dt.datetime(2024, 11, 3, 5, 30, 0, 123456, UTC)  # the same hour of the day twice, in New York
TYPED_ROW: Row = {
    "yes": True,
    "i8": -128,
    "i16": 32767,
    "i32": -(2**31),
    "i64": 2**63 - 1,
    "f32": 0.5,
    "f64": -1e308,
    "money": Decimal("12345678901234567890.123456789012345678"),
    "cents": Decimal("-12345.67"),
    "name": "naïve \U0001f600\x00",
    "raw": b"\x00\xff",
    "day": dt.date(1, 1, 1),
    "moment": MOMENT,
    "wall": dt.datetime(2024, 3, 10, 2, 30),  # an hour that New York's clocks skip
    "words": ["a", None, ""],
    "moments": [MOMENT + dt.timedelta(hours=1), dt.datetime(1883, 11, 18, 12, tzinfo=UTC), None],
    "by_name": {"x": Decimal("1.5"), "y": None},
    "nested": {"a": 1, "b c": [{"d": dt.date(9999, 12, 31), "e": MOMENT}, None]},
    "deep": {1: [{"k": {"x": b"z"}}], 2: None},
}
TYPED_ROWS: list[Row] = [TYPED_ROW, dict.fromkeys(TYPED_ROW, None), {**TYPED_ROW, "i32": 0, "words": [], "by_name": {}}]


@pytest.fixture
def new_york(request: pytest.FixtureRequest) -> Any:
    """Spark's session time zone is not UTC; the local runtime has none."""
    if "spark" not in request.node.callspec.id:
        yield
        return
    session = request.getfixturevalue("spark")
    before = session.conf.get("spark.sql.session.timeZone")
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield
    session.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.usefixtures("new_york")
def test_every_type_survives_stages_exchanges_transforms_and_several_inlets(run: Run) -> None:
    flow, typed, framed, joined = Flow("types"), MemorySink(), MemorySink(), MemorySink()
    seen = flow.source("typed", ListSource([TYPED_ROWS], ALL_TYPES))
    seen.map("same", lambda row: row).sink("framed", framed)
    seen.key_by("by_moment", "moment", "day", "wall", "cents", "raw", "i8").map("again", refuse_naive).transform(
        "nothing", lambda df: df, local=lambda table: table
    ).map("after", lambda row: row).sink("typed_out", typed)
    other = flow.source("other", ListSource([[{"moment": MOMENT, "tag": "hit"}]], "moment timestamp, tag string"))
    table = pa.table({"moment": pa.array([MOMENT], pa.timestamp("us", "UTC")), "found": ["yes"]})
    other.lookup("by_time", table, on="moment").sink("joined", joined)

    run(flow)

    assert same(framed.rows, TYPED_ROWS)
    assert same(typed.rows, TYPED_ROWS)
    assert joined.rows == [{"moment": MOMENT, "tag": "hit", "found": "yes"}]


def refuse_naive(row: Row) -> Row:
    """Row functions get the declared Python types, timestamps in UTC."""
    if row["moment"] is not None and (row["moment"] != MOMENT or row["moment"].tzinfo is not UTC):
        raise ValueError(f"not the moment: {row['moment']!r}")
    if row["wall"] is not None and row["wall"].tzinfo is not None:
        raise ValueError(f"a zone from nowhere: {row['wall']!r}")
    return row


# ── measurements ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_metrics_count_rows_of_every_operator(run: Run) -> None:
    flow = Flow("counted")
    named = flow.source("numbers", numbers()).filter("named", lambda row: row["user"] is not None)
    doubled = named.key_by("by_user", "user").flat_map("twice", lambda row: [row, row])
    doubled.sink("out", NoopSink())
    named.sink("named_out", NoopSink())

    metrics = run(flow)

    counts = {stats.operator: (stats.rows_in, stats.rows_out) for stats in metrics.operators}
    assert counts == {"numbers": (40, 40), "named": (40, 30), "by_user": (30, 30), "twice": (30, 60)}
    assert (metrics.epochs, metrics.rows_in, metrics.rows_out) == (3, 40, 90)


# ── bad rows, and the end of a run ────────────────────────────────────────────────────────────────────────────────


class Checked:
    """Counts the rows of a key, and fails after it has counted an odd hundred; its timers fail for one key."""

    def __call__(self, key: str, row: Row, state: Any) -> Row:
        state.set(state.get(0) + 1)
        state.event_timer(row["at"])
        if row["n"] % 200 >= 100:
            raise ValueError(f"row {row['n']}")
        return {"user": key, "n": state.get(), "at": row["at"]}

    def on_timer(self, key: str, time: dt.datetime, state: Any) -> None:
        state.set(-1)
        if key == "bob":
            raise RuntimeError("bob")
        state.set(state.get() + 1000)
        state.delete()


def test_bad_rows_go_to_the_errors_branch_and_a_finite_run_closes_its_windows(run: Run) -> None:
    start = dt.datetime(2026, 1, 1, tzinfo=UTC)
    rows: list[Row] = [
        {
            "n": n,
            "user": USERS[n % 4],
            "text": str(n) if n % 7 else "seven",
            "at": None if n % 11 == 0 else start + dt.timedelta(seconds=n // 10),
        }
        for n in range(400)
    ]
    listed = ListSource([rows[:150], rows[150:]], "n int, user string, text string, at timestamp", partitions=2)
    flow = Flow("bad rows")
    names = ("numbers", "seven", "windows", "lacking", "counted", "refused", "nobody")
    sinks = {name: MemorySink() for name in names}
    stream = flow.source("rows", listed, event_time="at")
    parsed = stream.map("parse", lambda row: {"n": int(row["text"])}, returns="n int", on_error="branch")
    keyed = stream.key_by("by_user", "user")
    windows = keyed.aggregate("windows", window=tumbling("10 seconds"), n=agg.count(), on_error="branch")
    timed = stream.filter("timed", lambda row: row["at"] is not None)
    named = timed.key_by("by_name", "user", on_error="branch")
    counted = named.process("count", Checked(), returns="user string, n int, at timestamp", on_error="branch")
    streams = (parsed, parsed.errors(), windows, windows.errors(), counted, counted.errors(), named.errors())
    for name, made in zip(names, streams, strict=True):
        made.sink(f"{name} out", sinks[name])

    metrics = run(flow, close_windows=True)

    assert sorted(row["n"] for row in sinks["numbers"].rows) == [n for n in range(400) if n % 7]
    assert sorted(row["n"] for row in sinks["seven"].rows) == list(range(0, 400, 7))
    assert {row["error"] for row in sinks["seven"].rows} == {
        "ValueError: invalid literal for int() with base 10: 'seven'"
    }
    whole = [row for row in rows if row["user"] is not None and row["at"] is not None]
    wanted = Counter((row["user"], row["at"].replace(second=row["at"].second // 10 * 10)) for row in whole)
    assert {(row["user"], row["window_start"]): row["n"] for row in sinks["windows"].rows} == dict(wanted)
    assert sorted(row["n"] for row in sinks["lacking"].rows) == sorted(row["n"] for row in rows if row not in whole)
    good = [row for row in whole if row["n"] % 200 < 100]
    for user in ("ann", "bob", "cem"):
        found = sorted(row["n"] for row in sinks["counted"].rows if row["user"] == user)
        if user == "bob":  # the only one whose timers do not make it forget
            assert found == list(range(1, sum(row["user"] == user for row in good) + 1)), "failed rows were counted"
        assert len(found) == sum(row["user"] == user for row in good)
    failed = [row for row in sinks["refused"].rows if not row["error"].startswith("on_timer")]
    assert sorted(row["n"] for row in failed) == sorted(row["n"] for row in whole if row["n"] % 200 >= 100)
    assert {row["error"] for row in failed} == {f"ValueError: row {row['n']}" for row in failed}
    fired = [row for row in sinks["refused"].rows if row["error"].startswith("on_timer")]
    assert {(row["user"], row["n"], row["error"].partition(": ")[2]) for row in fired} == {
        ("bob", None, "RuntimeError: bob")
    }
    assert len(fired) == len({row["at"] for row in good if row["user"] == "bob"}), "each timer fires once"
    assert all(row["user"] is None for row in sinks["nobody"].rows)
    errors = {stats.operator: stats.errors for stats in metrics.operators if stats.errors}
    aside = {"parse": "seven", "windows": "lacking", "count": "refused", "by_name": "nobody"}
    assert errors == {operator: len(sinks[name].rows) for operator, name in aside.items()}


# ── expressions and what they keep ────────────────────────────────────────────────────────────────────────────────


class Span:
    """The distance between the smallest and the largest number."""

    def zero(self) -> Any:
        return None

    def add(self, total: Any, rows: pa.RecordBatch) -> Any:
        found = rows["n"].to_pylist()
        return self.merge(total, (min(found), max(found)) if found else None)

    def merge(self, one: Any, other: Any) -> Any:
        return one or other if None in (one, other) else (min(one[0], other[0]), max(one[1], other[1]))

    def result(self, total: Any) -> Any:
        return total[1] - total[0]


def test_expressions_between_a_key_and_its_totals(run: Run) -> None:
    flow, out, all_rows = Flow("expressions"), MemorySink(), MemorySink()
    keyed = flow.source("numbers", numbers()).where("named", "user IS NOT NULL").key_by("by_user", "user")
    rows = keyed.with_columns("more", square="n * n", parity="CASE WHEN n % 2 = 0 THEN 'even' ELSE 'odd' END")
    rows = rows.where("large", "square >= 100").rename("names", {"user": "who"}).drop("less", "parity")
    totals = rows.aggregate(
        "totals", n=agg.count(), span=agg.custom(Span(), "n", returns="bigint"), sd=agg.stddev_pop("n")
    )
    totals.select("shown", "upper(who) AS who", "n", "span", sd="round(sd, 3)").sink("out", out)
    rows.aggregate_all("whole", n=agg.count(), top=agg.approx_quantile("square", 1.0)).sink("all", all_rows)

    run(flow)

    large = [row for row in NUMBERS if row["user"] and row["n"] >= 10]
    last = [row["user"] for row in NUMBERS[25:] if row["user"]]
    by_user = {user: [row["n"] for row in large if row["user"] == user] for user in last}
    assert same(
        out.tables[2].to_pylist(),
        [
            {"who": user.upper(), "n": len(ns), "span": max(ns) - min(ns), "sd": round(statistics.pstdev(ns), 3)}
            for user, ns in by_user.items()
        ],
    )
    [found] = all_rows.tables[2].to_pylist()
    assert found == {"n": len(large), "top": pytest.approx(max(row["n"] for row in large) ** 2, rel=0.01)}
