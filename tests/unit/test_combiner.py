"""Combining before the exchange: nothing is lost, it is done where it pays, and slices do not matter."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, agg
from midstream.data.key_space import KeySpace
from midstream.engine.aggregation import blocks, combiner
from midstream.engine.aggregation.combiner import PARTIAL_SCHEMA
from midstream.engine.parts import combiner_of
from midstream.errors import JobFailed
from midstream.flow.model import Operator
from midstream.operators.aggregate import Aggregate, totals_of
from midstream.testing import run_local

TAKES = pa.schema([("k", pa.int64()), ("x", pa.float64())])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 100)


def operator(**columns: Any) -> Operator:
    flow = Flow("f")
    keyed = flow.source("in", ListSource([[]], "k bigint, x double")).key_by("by", "k")
    keyed.aggregate("a", **columns)
    return flow._operators["a"]


SUMS = operator(n=agg.count(), total=agg.sum("x"))


def rows_of(keys: list[int]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(keys), pa.array([k / 4 for k in keys])], schema=TAKES)


def sent(rows: pa.RecordBatch, cuts: list[int]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """The output of a combiner that gets rows in these slices."""
    work, passing, partials = combiner_of(SUMS, TAKES, KeySpace()), [], []
    for start, stop in zip([0, *cuts], [*cuts, rows.num_rows], strict=True):
        work.add(rows.slice(start, stop - start))
        passing += list(work.rows())
        partials += list(work.partials())
    work.finish()
    return [*passing, *work.rows()], [*partials, *work.partials()]


def added_up(passing: list[pa.RecordBatch], partials: list[pa.RecordBatch]) -> Counter[int]:
    """The number of rows of each key, sent either way."""
    assert isinstance(SUMS.spec, Aggregate)
    totals = totals_of(SUMS, SUMS.spec, TAKES)
    found: Counter[int] = Counter(key for batch in passing for key in batch.column("k").to_pylist())
    for batch in partials:
        unpacked, _ = totals.unpack(batch.column("totals").to_pylist())
        counts = totals.results(unpacked)[0].to_pylist()
        for stored, count in zip(batch.column("key").to_pylist(), counts, strict=True):
            found[int.from_bytes(stored[2:], "big") - (1 << 63)] += count
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_counted_once_and_slices_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    # Stretches of few keys and of many, so that both ways occur.
    keys = [rng.randrange(5000 if (i // 1000) % 2 else 5) for i in range(4000)]
    rows = rows_of(keys)
    ways = [sent(rows, sorted(rng.sample(range(1, 4000), rng.randint(0, 60)))) for _ in range(3)]
    for passing, partials in ways:
        assert added_up(passing, partials) == Counter(keys)
        assert sum(batch.num_rows for batch in passing) > 0
        assert all(batch.schema.equals(PARTIAL_SCHEMA) for batch in partials)
    assert len({pa.Table.from_batches(partials).to_string() for _, partials in ways}) == 1
    assert len({pa.Table.from_batches(passing).combine_chunks().to_string() for passing, _ in ways}) == 1


def test_rows_with_rarely_repeated_keys_are_sent_uncombined() -> None:
    passing, partials = sent(rows_of(list(range(5000))), [])
    assert (sum(batch.num_rows for batch in passing), partials) == (5000, [])


def test_repeated_keys_are_sent_once_with_their_row_count() -> None:
    passing, [partials] = sent(rows_of([1, 2] * 1000), [])
    assert (passing, partials.num_rows, sum(partials.column("rows").to_pylist())) == ([], 2, 2000)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combiner, "MAX_HELD", 60)
    keys = [i // 2 for i in range(2000)]
    passing, partials = sent(rows_of(keys), [])
    assert (passing, len(partials) > 5) == ([], True)
    assert added_up(passing, partials) == Counter(keys)


@pytest.mark.parametrize(
    ("columns", "combined"),
    [({"n": agg.count()}, True), ({"n": agg.count(), "last": agg.last("x", 2)}, False)],
)
def test_only_order_independent_aggregates_are_combined(columns: dict[str, Any], combined: bool) -> None:
    spec = operator(**columns).spec
    assert isinstance(spec, Aggregate)
    assert spec.combinable is combined


def test_metrics_count_rows_not_partials() -> None:
    flow, out = Flow("f"), MemorySink()
    rows = [[{"k": i % 3, "x": 1.0} for i in range(300)]] * 2
    keyed = flow.source("in", ListSource(rows, "k bigint, x double", partitions=2)).key_by("by", "k")
    keyed.aggregate("a", n=agg.count(), total=agg.sum("x")).sink("out", out)
    metrics = run_local(flow).metrics
    assert {stats.operator: stats.rows_in for stats in metrics.operators} == {"in": 600, "by": 600, "a": 600}
    assert sorted((row["k"], row["n"]) for row in out.rows) == sorted((k, 100 * e) for k in range(3) for e in (1, 2))


def test_a_null_key_is_reported_with_its_row_by_the_sender() -> None:
    flow = Flow("f")
    keyed = flow.source("in", ListSource([[{"k": None, "x": 7.0}]], "k bigint, x double")).key_by("by", "k")
    keyed.aggregate("a", n=agg.count()).sink("out", MemorySink())
    with pytest.raises(JobFailed, match="null") as caught:
        run_local(flow)
    assert caught.value.operator == "a"
    assert "7.0" in caught.value.row
