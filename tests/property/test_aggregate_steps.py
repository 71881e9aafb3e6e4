"""aggregate and distinct over epochs of random rows, against plain Python over the same rows.

Each case cuts the rows into random slices and partitions, restarts between some epochs, and moves the watermark by
random steps.
"""

from __future__ import annotations

import datetime as dt
import math
import statistics
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.times import EpochTimes
from midstream.flow import aggregations as agg
from midstream.flow.aggregations import result_type
from midstream.flow.model import Operator
from midstream.flow.spec import LATE
from midstream.flow.windows import Session, Sliding, Tumbling, Window
from midstream.operators.aggregate import Aggregate, instantiate_aggregate
from midstream.operators.distinct import Distinct, instantiate_distinct
from midstream.state.keys import Namespace, encode_key, timer_key
from tests.epochs import Epochs, cut, epochs, small_blocks
from tests.examples import examples

pytestmark = pytest.mark.long

KEYS = pa.schema([pa.field("user", pa.string(), nullable=False), pa.field("n", pa.int32(), nullable=False)])
TAKES = pa.schema(
    [
        *KEYS,
        pa.field("t", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("x", pa.int64()),
        pa.field("f", pa.float64()),
        pa.field("s", pa.string()),
        pa.field("d", pa.decimal128(20, 2)),
        pa.field("number", pa.int64()),
    ]
)


class Pairs:
    """Counts the rows in which both columns are there, and adds up the first of them."""

    def zero(self):
        return [0, 0]

    def add(self, total, rows):
        found = [x for x, f in zip(rows["x"].to_pylist(), rows["f"].to_pylist(), strict=True) if None not in (x, f)]
        return [total[0] + len(found), total[1] + sum(found)]

    def merge(self, one, other):
        return [one[0] + other[0], one[1] + other[1]]

    def result(self, total):
        return {"both": total[0], "sum": total[1]}


COLUMNS = (
    ("rows", agg.count()),
    ("xs", agg.count("x")),
    ("sum_x", agg.sum("x")),
    ("min_x", agg.min("x")),
    ("max_x", agg.max("x")),
    ("mean_x", agg.mean("x")),
    ("sum_f", agg.sum("f")),
    ("min_f", agg.min("f")),
    ("max_s", agg.max("s")),
    ("min_s", agg.min("s")),
    ("sum_d", agg.sum("d")),
    ("max_d", agg.max("d")),
    ("max_t", agg.max("t")),
    ("about", agg.approx_distinct("x")),
    ("last_x", agg.last("x", 3)),
    ("last_t", agg.last("t", 1)),
    ("var_x", agg.variance("x")),
    ("sd_x", agg.stddev_pop("x")),
    ("all_x", agg.collect("x", limit=4)),
    ("set_s", agg.collect_set("s", limit=2)),
    ("set_t", agg.collect_set("t", limit=3)),
    ("early_s", agg.first_by("s", "t")),
    ("late_t", agg.last_by("t", "t")),
    ("late_d", agg.last_by("d", "t")),
    ("half_x", agg.approx_quantile("x", 0.5)),
    ("some_x", agg.approx_quantile("x", [0, 0.9, 1])),
    ("pairs", agg.custom(Pairs(), "x", "f", returns="struct<both: bigint, sum: bigint>")),
)
PLAIN = tuple((name, one) for name, one in COLUMNS if name in ("rows", "xs", "sum_x", "min_x", "max_x", "mean_x"))
EPOCH0 = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

rows = st.fixed_dictionaries(
    {
        "user": st.sampled_from(["ann", "ann", "bob", ""]),
        "n": st.sampled_from([0, 0, 1]),
        "t": st.integers(-6, 14),
        "x": st.none() | st.integers(-3, 3),
        "f": st.none() | st.integers(-5, 5).map(float),
        "s": st.none() | st.sampled_from(["", "a", "ab", "ä"]),
        "d": st.none() | st.decimals(-100, 100, places=2, allow_nan=False),
    }
)


@st.composite
def histories(draw):
    """Epochs of (rows, sizes of slices, watermark, restart before it?)."""
    watermark, number, made = None, 0, []
    for _ in range(draw(st.integers(2, 4))):
        found = draw(st.lists(rows, max_size=12))
        for row in found:
            row["number"] = number = number + 1
        if watermark is not None or draw(st.booleans()):
            watermark = (-8 if watermark is None else watermark) + draw(st.integers(0, 8))
        made.append((found, draw(st.lists(st.integers(0, 5), max_size=6)), watermark, draw(st.booleans())))
    return made


def stored_key(row):
    return encode_key((row["user"], row["n"]), KEYS, "test")


def moment(time: int) -> dt.datetime:
    return EPOCH0 + dt.timedelta(microseconds=time)


def batch_of(found):
    shown = [row | {"t": moment(row["t"])} for row in found]
    return pa.RecordBatch.from_pylist(shown, TAKES)


def operator_of(window: Window | None, columns=COLUMNS) -> Operator:
    bounds = [] if window is None else [pa.field("window_start", TAKES.field("t").type)] * 2
    if bounds:
        bounds[1] = bounds[1].with_name("window_end")
    results = [pa.field(name, result_type(one, TAKES, "test")) for name, one in columns]
    spec = Aggregate(("user", "n"), columns, window, None if window is None else "t")
    return Operator("totals", spec, (), pa.schema([*KEYS, *bounds, *results]))


def runs(world: Epochs, make, history):
    """Per epoch: its rows, the watermark before and after it, and the output of each partition."""
    before = None
    for found, sizes, watermark, restart in history:
        if restart:
            world.restart()
        mine: dict[int, list[Any]] = {partition: [] for partition in range(world.partitions)}
        for row in found:
            mine[world.partition_of(stored_key(row)[0])].append(row)
        slices = {partition: cut(batch_of(some), sizes) for partition, some in mine.items()}
        times = EpochTimes(clock=0, late_before=before, watermark=watermark)
        yield found, before, watermark, world.run(make, slices, times)
        before = watermark


def near(value, relative=1e-9):
    return pytest.approx(value, rel=relative, abs=1e-12)


def timed(found, name):
    """The times and values of a column, in order of arrival."""
    return [(row["t"], row[name]) for row in found if row[name] is not None]


def quantile(values, q):
    """The smallest value that has a share of q of all values at or below it."""
    return sorted(values)[max(math.ceil(q * len(values)), 1) - 1]


def pairs_of(found):
    both = [row["x"] for row in found if None not in (row["x"], row["f"])]
    return {"both": len(both), "sum": sum(both)}


def totals(found, columns=COLUMNS):
    """The results over rows in order of arrival."""
    xs = [row["x"] for row in found if row["x"] is not None]
    fs = [row["f"] for row in found if row["f"] is not None]
    ss = [row["s"] for row in found if row["s"] is not None]
    ds = [row["d"] for row in found if row["d"] is not None]
    times = [moment(row["t"]) for row in found]
    whole = {
        "rows": len(found),
        "xs": len(xs),
        "sum_x": sum(xs) if xs else None,
        "min_x": min(xs, default=None),
        "max_x": max(xs, default=None),
        "mean_x": sum(xs) / len(xs) if xs else None,
        "sum_f": sum(fs) if fs else None,
        "min_f": min(fs, default=None),
        "max_s": max(ss, default=None),
        "min_s": min(ss, default=None),
        "sum_d": sum(ds, Decimal(0)) if ds else None,
        "max_d": max(ds, default=None),
        "max_t": max(times, default=None),
        "about": len(set(xs)),
        "last_x": xs[-3:],
        "last_t": times[-1:],
        "var_x": near(statistics.variance(xs)) if len(xs) > 1 else None,
        "sd_x": near(statistics.pstdev(xs)) if xs else None,
        "all_x": xs[:4],
        "set_s": list(dict.fromkeys(ss))[:2],
        "set_t": list(dict.fromkeys(times))[:3],
        "early_s": min(timed(found, "s"), key=lambda one: one[0], default=(None, None))[1],
        "late_t": max(times, default=None),
        "late_d": max(reversed(timed(found, "d")), key=lambda one: one[0], default=(None, None))[1],
        "half_x": near(quantile(xs, 0.5), 0.01) if xs else None,
        "some_x": [near(quantile(xs, q), 0.01) for q in (0, 0.9, 1)] if xs else None,
        "pairs": pairs_of(found),
    }
    return {name: whole[name] for name, _ in columns}


def result(key, found, start=None, end=None, columns=COLUMNS):
    bounds = {} if start is None else {"window_start": moment(start), "window_end": moment(end)}
    return {"user": key[0], "n": key[1]} | bounds | totals(found, columns)


def key_of(row):
    return row["user"], row["n"]


def by_partition(world, ordered):
    """(sort key, result) pairs, as each partition should emit them."""
    split: list[list[Any]] = [[] for _ in range(world.partitions)]
    for place, one in sorted(ordered, key=lambda pair: pair[0]):
        split[world.partition_of(place[0])].append(one)
    return split


def emitted_by(emitted, branch=""):
    return [of_one.get(branch, []) for of_one in emitted]


def late_of(emitted):
    return Counter(row["number"] for of_one in emitted for row in of_one.get(LATE, []))


def maker(operator):
    return lambda state, times: instantiate_aggregate(operator, operator.spec, TAKES, state, times)


partition_counts = st.integers(1, 3)
column_sets = st.sampled_from([COLUMNS, PLAIN])


@examples(25)
@given(histories(), partition_counts, column_sets)
def test_running_totals_cover_all_epochs(history, partitions, columns):
    operator = operator_of(None, columns)
    seen: dict[tuple[str, int], list[Any]] = {}
    with epochs(partitions) as world, small_blocks():
        for found, _, _, emitted in runs(world, maker(operator), history):
            for row in found:
                seen.setdefault(key_of(row), []).append(row)
            touched = {key_of(row): stored_key(row) for row in found}
            expected = [(place, result(key, seen[key], columns=columns)) for key, place in touched.items()]
            assert emitted_by(emitted) == by_partition(world, expected)
        assert len(world.stored()) == len(seen)


windows = st.sampled_from([Tumbling(5), Tumbling(5, 3), Sliding(6, 2), Sliding(6, 2, 1), Sliding(4, 1)])


def ends_of(window, time):
    every = window.size_us if isinstance(window, Tumbling) else window.every_us
    start = (time - window.offset_us) // every * every + window.offset_us
    return [start - back + window.size_us for back in range(0, window.size_us, every)]


@examples(25)
@given(histories(), windows, partition_counts, column_sets)
def test_windows_are_emitted_once_when_they_close(history, window, partitions, columns):
    operator = operator_of(window, columns)
    opened: dict[tuple[bytes, int], list[Any]] = {}
    with epochs(partitions) as world, small_blocks():
        for found, before, watermark, emitted in runs(world, maker(operator), history):
            late: Counter[int] = Counter()
            for row in found:
                ends = [end for end in ends_of(window, row["t"]) if before is None or end > before]
                for end in ends:
                    opened.setdefault((stored_key(row), end), []).append(row)
                if not ends:
                    late[row["number"]] += 1
            expected = []
            for place, end in [place for place in opened if watermark is not None and place[1] <= watermark]:
                of_window = opened.pop((place, end))
                one = result(key_of(of_window[0]), of_window, end - window.size_us, end, columns)
                expected.append((timer_key(place, Namespace.WINDOW, end - window.offset_us), one))
            assert emitted_by(emitted) == by_partition(world, expected)
            assert late_of(emitted) == late
            aligned = {timer_key(key, Namespace.WINDOW, end - window.offset_us) for key, end in opened}
            assert world.stored().keys() == aligned


def linked(sessions, gap):
    """Groups of sessions (first, last, …) that are linked by a chain, found pair by pair."""
    groups: list[list[Any]] = []
    for one in sessions:
        near = [group for group in groups if any(_near(one, other, gap) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([one, *(other for group in near for other in group)])
    return groups


def _near(a, b, gap):
    return max(a[0], b[0]) - min(a[1], b[1]) < gap


@examples(25)
@given(histories(), st.sampled_from([2, 3, 5]), partition_counts, column_sets)
def test_sessions_are_chains_of_rows(history, gap, partitions, columns):
    operator = operator_of(Session(gap), columns)
    opened: dict[bytes, list[Any]] = {}  # per key: (first, last, rows in order)
    with epochs(partitions) as world, small_blocks():
        for found, before, watermark, emitted in runs(world, maker(operator), history):
            late: Counter[int] = Counter()
            expected = []
            for place in {stored_key(row) for row in found} | set(opened):
                single = [(row["t"], row["t"], [row]) for row in found if stored_key(row) == place]
                groups = linked([*opened.pop(place, []), *single], gap)
                for group in groups:
                    members = sorted(
                        group, key=lambda one: (one in single, one[2][0]["number"] if one in single else one[0])
                    )
                    first, last = min(one[0] for one in group), max(one[1] for one in group)
                    whole = [row for one in members for row in one[2]]
                    if before is not None and last + gap <= before:
                        late.update(row["number"] for row in whole)
                    elif watermark is not None and last + gap <= watermark:
                        one = result(key_of(whole[0]), whole, first, last + gap, columns)
                        expected.append((timer_key(place, Namespace.SESSION_END, last + gap), one))
                    else:
                        opened.setdefault(place, []).append((first, last, whole))
            assert emitted_by(emitted) == by_partition(world, expected)
            assert late_of(emitted) == late
            marks = {timer_key(key, Namespace.SESSION_END, s[1] + gap) for key, each in opened.items() for s in each}
            assert world.stored().keys() == marks | opened.keys()


@examples(25)
@given(histories(), st.none() | st.integers(1, 6), partition_counts)
def test_distinct_passes_the_first_row_of_each_key(history, within, partitions):
    spec = Distinct(("user", "n"), None if within is None else "t", within)
    operator = Operator("once", spec, (), TAKES)
    remembered: dict[bytes, int] = {}

    def make(state, times):
        return instantiate_distinct(operator, spec, TAKES, state, times)

    with epochs(partitions) as world:
        for found, _, watermark, emitted in runs(world, make, history):
            expected: list[list[int]] = [[] for _ in range(partitions)]
            for row in found:
                key = stored_key(row)
                if key not in remembered:
                    remembered[key] = row["t"] + (within or 0)
                    expected[world.partition_of(key[0])].append(row["number"])
            assert [[row["number"] for row in of_one] for of_one in emitted_by(emitted)] == expected
            if within is not None and watermark is not None:
                remembered = {key: time for key, time in remembered.items() if time > watermark}
            marks = {timer_key(key, Namespace.EXPIRY, time) for key, time in remembered.items()}
            assert world.stored().keys() == remembered.keys() | (marks if within is not None else set())
