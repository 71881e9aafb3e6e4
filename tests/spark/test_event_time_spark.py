"""Windows and joins by event time give what Spark SQL gives, which sees all rows at once."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, agg, sessions, sliding, tumbling
from midstream.data.schema import parse_ddl
from midstream.testing import run_local

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
Row = dict[str, Any]


def answer(spark: Any, query: str, zone: str = "UTC", **tables: tuple[list[Row], str]) -> list[Row]:
    """What Spark SQL gives for a query over tables of rows."""
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        for name, (rows, ddl) in tables.items():
            spark.createDataFrame(pa.Table.from_pylist(rows, parse_ddl(ddl))).createOrReplaceTempView(name)
        found: list[Row] = spark.sql(query).toArrow().to_pylist()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        for name in tables:
            spark.catalog.dropTempView(name)
    return found


def counted(rows: list[Row]) -> Counter[tuple[Any, ...]]:
    """The rows, whatever their order and the order of their columns."""
    return Counter(tuple(row[name] for name in sorted(row)) for row in rows)


def moments(seed: int) -> list[Row]:
    """Two days around a change of clocks, and times before 1970, some of them where windows begin."""
    rng = random.Random(seed)
    some = [START.replace(month=month, day=28) + rng.random() * 48 * HOUR for month in (3, 10) for _ in range(40)]
    sharp = [START + rng.randrange(48) * HOUR for _ in range(20)]
    early = [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), datetime(1901, 12, 13, 6, tzinfo=UTC)]
    return [{"k": rng.choice("ab"), "t": t, "n": n} for n, t in enumerate(rng.sample(some + sharp + early, 102))]


@pytest.mark.parametrize(
    ("window", "theirs"),
    [
        (tumbling("1 hour"), "window(t, '1 hour')"),
        (tumbling("1 day", offset="6 hours"), "window(t, '1 day', '1 day', '6 hours')"),
        (tumbling("7 days"), "window(t, '7 days')"),
        (sliding("2 hours", every="30 minutes"), "window(t, '2 hours', '30 minutes')"),
        (
            sliding("2 hours", every="30 minutes", offset="7 minutes"),
            "window(t, '2 hours', '30 minutes', '7 minutes')",
        ),
        # Two rows that are exactly the gap apart are in one session of Spark's; none of these are.
        (sessions("3607 seconds"), "session_window(t, '3607 seconds')"),
    ],
    ids=repr,
)
def test_windows_equal_those_of_spark(spark: Any, window: Any, theirs: str) -> None:
    rows, ddl = moments(1), "k string, t timestamp, n int"
    flow, out = Flow("windows"), MemorySink()
    by_k = flow.source("in", ListSource([rows], ddl, event_time="t")).key_by("by k", "k")
    by_k.aggregate("totals", window=window, total=agg.sum("n")).sink("out", out)
    run_local(flow, close_windows=True)
    query = f"select k, {theirs} as w, sum(n) as total from events group by k, w"
    query = f"select k, w.start as window_start, w.end as window_end, total from ({query})"
    assert counted(out.rows) == counted(answer(spark, query, events=(rows, ddl)))


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Santiago", "Asia/Kathmandu", "Asia/Beirut"])
def test_days_of_a_zone_equal_those_of_spark(spark: Any, zone: str) -> None:
    rows, ddl = moments(2), "k string, t timestamp, n int"
    rows = [row for row in rows if row["t"].year > 1969]  # before, zones had other rules, by the second
    flow, out = Flow("days"), MemorySink()
    by_k = flow.source("in", ListSource([rows], ddl, event_time="t")).key_by("by k", "k")
    days = by_k.aggregate("totals", window=tumbling("1 day", zone=zone), total=agg.sum("n"))
    days.select("shown", "k", "window_start AS day", "total").sink("out", out)
    run_local(flow, close_windows=True)
    query = "select k, date_trunc('DAY', t) as day, sum(n) as total from events group by 1, 2"
    assert counted(out.rows) == counted(answer(spark, query, zone, events=(rows, ddl)))


WITHIN: dict[str, tuple[dict[str, Any], str]] = {
    "within": ({"within": "3 seconds"}, "rt between t - interval 3 seconds and t + interval 3 seconds"),
    "before and after": (
        {"within": ("1 second", "7 seconds")},
        "rt between t - interval 1 second and t + interval 7 seconds",
    ),
    "after": ({"within": ("0 seconds", "5 seconds")}, "rt between t and t + interval 5 seconds"),
    "window": (
        {"window": tumbling("10 seconds", offset="3 seconds")},
        "floor((unix_seconds(t) - 3) / 10) = floor((unix_seconds(rt) - 3) / 10)",
    ),
}


@pytest.mark.parametrize("near", WITHIN)
def test_joins_equal_those_of_spark(spark: Any, near: str) -> None:
    """Inner, left, right and full ones; rows come in several epochs, and none of them is late."""
    options, condition = WITHIN[near]
    rng = random.Random(near)

    def rows(time: str, number: str) -> list[Row]:
        return [
            {"k": rng.randrange(5), time: START + timedelta(seconds=rng.randrange(60)), number: n} for n in range(30)
        ]

    left, right = rows("t", "n"), rows("rt", "m")
    left_ddl, right_ddl = "k int, t timestamp, n int", "k int, rt timestamp, m int"
    flow, outs = Flow("joins"), {how: MemorySink() for how in ("inner", "left", "right", "full")}
    one = flow.source("l", ListSource([left[:9], left[9:20], left[20:]], left_ddl, event_time="t"), delay="1 minute")
    other = flow.source("r", ListSource([right[:14], right[14:]], right_ddl, event_time="rt"), delay="1 minute")
    by_k, also_by_k = one.key_by("by k", "k"), other.key_by("also by k", "k")
    for how, out in outs.items():
        by_k.join(how, also_by_k, how=how, right_time="rt", **options).sink(f"{how} out", out)
    run_local(flow, close_windows=True)
    for how, out in outs.items():
        query = f"select coalesce(l.k, r.k) as k, t, n, rt, m from l {how} join r on l.k = r.k and {condition}"
        expected = answer(spark, query, l=(left, left_ddl), r=(right, right_ddl))
        assert counted(out.rows) == counted(expected), how
