"""Workloads match their descriptions, and their flows give the same results as computations without midstream.

Flows run over recorded streams, whose epochs and times are the same on every runtime; ``tests/spark/test_workloads.py``
runs the same cases on Spark.
"""

from __future__ import annotations

import ast
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import duckdb
import numpy as np
import pyarrow as pa
import pytest

import benchmarks.workloads
from benchmarks.workloads import (
    fries_w1,
    fries_w2,
    fries_w3,
    fries_w4,
    fries_w5,
    impressions,
    nexmark,
    tpcds,
    word_count,
    ysb,
)
from benchmarks.workloads.costs import CostlyModel
from benchmarks.workloads.nexmark.generator import ROUND, Share
from benchmarks.workloads.nexmark.queries import QUERIES as FIRST_QUERIES
from examples.fraud.models import train
from examples.fraud.payments import Bank
from midstream import Constant, Flow, GeneratorSource, ListSource, MemorySink, SquareWave
from midstream.data.schema import to_ddl
from midstream.testing import Faults, run_local
from tests.oracle import multiset

pytestmark = pytest.mark.long

Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BANK = Bank(users=40, merchants_per_city=3)
ROUGH = Faults(crash=0.02, speculate=0.05, repeat=0.05, give_up=0.005)


@dataclass(frozen=True)
class Case:
    """A workload, ready to run: its flow, its sink, and the expected result."""

    flow: Flow
    out: MemorySink
    expected: Sequence[Row]
    update_of: tuple[str, ...] = ()
    """If there are some, the result is updates: of rows that agree in these columns, the last one counts."""

    def check(self) -> None:
        """Compare the result with the expected one, as bags of rows."""
        found = nexmark.latest(self.out.rows, *self.update_of) if self.update_of else self.out.rows
        assert multiset(found) == multiset(self.expected)


def rows_of(source: GeneratorSource) -> list[Row]:
    """All rows of a bounded generator, from 1970 on."""
    assert source.total is not None
    return [row for batch in source.rows(0, source.total, start_us=0) for row in batch.to_pylist()]


def recorded(source: GeneratorSource, epochs: int) -> ListSource:
    """A bounded generator's rows, divided into epochs."""
    rows = rows_of(source)
    cuts = [len(rows) * epoch // epochs for epoch in range(epochs + 1)]
    parts = [rows[start:end] for start, end in pairwise(cuts)]
    return ListSource(parts, to_ddl(source.schema), event_time=source.event_time, partitions=source.partitions)


def word_count_case(keys: int, skew: float) -> Case:
    out = MemorySink()
    source = recorded(word_count.words(1000, keys=keys, skew=skew, limit=2000), epochs=4)
    expected = [row for epoch in word_count.oracle(map(table_of, source.epochs)) for row in epoch]
    return Case(word_count.flow(source, out), out, expected)


def ysb_case() -> Case:
    out, events = MemorySink(), ysb.SMALL.events(40, limit=2000)
    expected = ysb.oracle(pa.Table.from_pylist(rows_of(events), events.schema), ysb.SMALL)
    return Case(ysb.flow(recorded(events, epochs=5), out, ysb.SMALL), out, expected)


def impressions_case() -> Case:
    """Streams that are not in step: the fewer acts come in other epochs than what was shown."""
    out, streams = MemorySink(), impressions.SMALL.streams(60, limit=2000)
    tables = [pa.Table.from_pylist(rows_of(stream), stream.schema) for stream in streams]
    totals = impressions.oracle(*tables)
    expected = [
        {
            "team": team,
            "window_start": EPOCH + timedelta(seconds=start),
            "window_end": EPOCH + timedelta(seconds=start + impressions.TOTAL_S),
            **{name: totals[team, start, name] for name in ("windows", "shown", "acted")},
        }
        for team, start in dict.fromkeys((team, start) for team, start, _ in totals)
    ]
    source = impressions.Streams(*(recorded(stream, epochs) for stream, epochs in zip(streams, (7, 5), strict=True)))
    return Case(impressions.flow(source, out), out, expected)


def nexmark_case(query: str) -> Case:
    out, streams = MemorySink(), nexmark.SMALL.streams(100, limit=4500)
    expected = nexmark.oracle(query, *map(rows_of, streams))
    # Streams need not be in step: rows of one stream may come an epoch earlier than those of another.
    source = nexmark.Streams(*(recorded(stream, epochs) for stream, epochs in zip(streams, (5, 6, 4), strict=True)))
    return Case(nexmark.flow(query, source, out), out, expected, nexmark.UPDATES.get(query, ()))


def fries_w1_case(model: fries_w1.Model | None = None, payments: int = 1000) -> Case:
    out, source = MemorySink(), BANK.payments(1000, fraud_rate=0.05, limit=payments)
    return Case(
        fries_w1.flow(recorded(source, epochs=3), out, model), out, fries_w1.oracle(rows_of(source), opened(model))
    )


def fries_w2_case(*revised: str) -> Case:
    out, source = MemorySink(), fries_w2.sales(1000, limit=600)
    known = fries_w2.tables(selective=False) | {name: fries_w2.revised(name, selective=False) for name in revised}
    return Case(fries_w2.flow(recorded(source, epochs=3), out, known), out, fries_w2.oracle(rows_of(source), known))


def fries_w3_case(*revised: str) -> Case:
    out, sources = MemorySink(), fries_w3.sales(1000, limit=200)
    known = fries_w3.tables(selective=False) | {name: fries_w3.revised(name, selective=False) for name in revised}
    expected = fries_w3.oracle([sale for source in sources for sale in rows_of(source)], known)
    streams = fries_w3.Sales(*(recorded(source, epochs) for source, epochs in zip(sources, (3, 2, 4), strict=True)))
    return Case(fries_w3.flow(streams, out, known), out, expected)


def fries_w5_case(model: fries_w1.Model | None = None) -> Case:
    out, source = MemorySink(), fries_w5.payments(BANK, 1000, fraud_rate=0.05, limit=600)
    other = fries_w1.LinearModel(excess=0.5, moved=0.1)
    expected = fries_w5.oracle(rows_of(source), model, other, recent=4, merchant_recent=6)
    flow = fries_w5.flow(recorded(source, epochs=3), out, model, other, recent=4, merchant_recent=6)
    return Case(flow, out, expected)


def fries_w4_case() -> Case:
    out, source = MemorySink(), fries_w4.groups(BANK, 1000, limit=500)
    return Case(fries_w4.flow(recorded(source, epochs=3), out), out, fries_w4.oracle(rows_of(source)))


def opened(model: fries_w1.Model | None) -> fries_w1.Model | None:
    """A separate model for the oracle, ready for use."""
    if not isinstance(model, fries_w1.TrainedModel):
        return model
    copy: fries_w1.TrainedModel = pickle.loads(pickle.dumps(model))
    copy.open()
    return copy


def table_of(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


CASES: dict[str, Callable[[], Case]] = {
    "word_count": lambda: word_count_case(keys=200, skew=0.0),
    "word_count of skewed keys": lambda: word_count_case(keys=200, skew=1.1),
    "ysb": ysb_case,
    "impressions": impressions_case,
    **{query: partial(nexmark_case, query) for query in FIRST_QUERIES},
    "fries_w1": fries_w1_case,
    "fries_w1, trained": lambda: fries_w1_case(fries_w1.TrainedModel(train(payments=5000).customer), payments=200),
    "fries_w2": fries_w2_case,
    "fries_w2, revised": lambda: fries_w2_case("J1", "J4"),
    "fries_w3": fries_w3_case,
    "fries_w3, revised": lambda: fries_w3_case("J6", "J9"),
    "fries_w4": fries_w4_case,
    "fries_w5": fries_w5_case,
}


# ── flows ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("partitions", "seed", "faults"),
    [pytest.param(1, 0, None, id="calm"), pytest.param(3, 1, ROUGH, id="rough")],
)
@pytest.mark.parametrize("name", CASES)
def test_a_flow_produces_what_its_oracle_computes(name: str, partitions: int, seed: int, faults: Faults | None) -> None:
    case = CASES[name]()
    assert len(case.expected) >= 4  # an empty result would prove nothing
    run_local(case.flow, partitions=partitions, seed=seed, faults=faults)
    case.check()


@pytest.mark.parametrize("epochs", [1, 2, 40])
@pytest.mark.parametrize("query", ["q4", "q5", "q6", "q8"])
def test_results_do_not_depend_on_how_the_streams_are_cut_into_epochs(query: str, epochs: int) -> None:
    out, streams = MemorySink(), nexmark.SMALL.streams(100, limit=2500)
    flow = nexmark.flow(query, nexmark.Streams(*(recorded(stream, epochs) for stream in streams)), out)
    run_local(flow)
    Case(flow, out, nexmark.oracle(query, *map(rows_of, streams)), nexmark.UPDATES.get(query, ())).check()


def test_generators_feed_flows_directly() -> None:
    streams, out = nexmark.SMALL.streams(100, limit=2500, max_rows_per_epoch=500), MemorySink()
    run = run_local(nexmark.flow("q7", streams, out))
    assert run.metrics.epochs == 5
    assert multiset(out.rows) == multiset(nexmark.oracle("q7", *map(rows_of, streams)))


def test_megaphones_worked_example() -> None:
    epochs = [[{"key": "dog", "value": 10}, {"key": "cat", "value": 5}], [{"key": "dog", "value": 13}]]
    epochs[1].append({"key": "cat", "value": 23})
    out = MemorySink()
    run_local(word_count.flow(ListSource(epochs, "key string, value bigint"), out))
    totals = [{row["key"]: row["total"] for row in table.to_pylist()} for table in out.tables.values()]
    assert totals == [{"dog": 10, "cat": 5}, {"dog": 23, "cat": 28}]


# ── oracles, by hand ──────────────────────────────────────────────────────────────────────────────────────────────

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def auction(number: int, opens: float, lasts_s: float, *, seller: int = 1, category: int = 10, reserve: int = 0) -> Row:
    described = {"id": number, "item": "lamp", "description": "used", "initial_bid": 1, "reserve": reserve}
    terms_of_sale = {"lasts_us": round(lasts_s * 1e6), "seller": seller, "category": category}
    return {**described, **terms_of_sale, "event_time": at(opens)}


def bid(number: int, when: float, price: int, bidder: int = 7) -> Row:
    return {"auction": number, "bidder": bidder, "price": price, "channel": "web", "url": "u", "event_time": at(when)}


def person(number: int, when: float, state: str = "CA") -> Row:
    described = {"id": number, "name": f"p{number}", "email": "e", "credit_card": "c", "city": "Fresno"}
    return {**described, "state": state, "event_time": at(when)}


def test_only_valid_bids_win_and_only_closed_auctions_are_sold() -> None:
    auctions = [auction(1, 0, 10, reserve=50), auction(2, 0, 10, category=11), auction(3, 0, 100), auction(4, 40, 1)]
    bids = [
        bid(1, 1, 40),  # below the reserve
        bid(1, 2, 60),
        bid(1, 10, 900),  # at the end
        bid(2, 3, 80),
        bid(2, 4, 70),
        bid(3, 5, 999),  # still open when the stream ends
        bid(4, 39, 10),  # before the opening
        bid(9, 50, 10),  # no such auction
    ]
    expected = [{"category": 10, "sold": 1, "average": 60.0}, {"category": 11, "sold": 1, "average": 80.0}]
    assert nexmark.oracle("q4", [], auctions, bids) == expected
    found = result_of("q4", [], auctions, bids)
    assert multiset(nexmark.latest(found, "category")) == multiset(expected)


def test_a_bid_that_comes_before_its_auction_waits_for_it() -> None:
    auctions = [auction(8, 0, 1), auction(9, 8, 1), auction(1, 10, 10), auction(2, 50, 1)]
    # When the watermark passes the first bid, which was made too early, the second one must stay.
    bids = [bid(1, 5, 900), bid(1, 12, 60), bid(2, 49, 1), bid(2, 50, 1)]
    expected = [{"category": 10, "sold": 1, "average": 60.0}]
    assert nexmark.oracle("q4", [], auctions, bids) == expected
    assert result_of("q4", [], auctions, bids) == expected


def test_a_sellers_average_is_of_the_last_ten_to_close() -> None:
    auctions = [auction(n, 0, 40 - n) for n in range(1, 31)]  # the last to open are the first to close
    auctions.append(auction(99, 60, 1))
    # All of them close in one epoch, in several tasks, so that sales come in no order.
    bids = [bid(n, 1, 100 * n) for n in range(1, 31)] + [bid(1, 60, 1)]
    [row] = nexmark.oracle("q6", [], auctions, bids)
    assert row == {"seller": 1, "average": sum(100 * n for n in range(1, 11)) / 10}
    assert nexmark.latest(result_of("q6", [], auctions, bids), "seller") == [row]


def test_all_hottest_items_are_output() -> None:
    bids = [bid(1, 1, 5), bid(2, 1.5, 5), bid(3, 1, 5), bid(1, 3, 5), bid(2, 3, 5), bid(1, 30, 1)]
    expected = nexmark.oracle("q5", [], [], bids)
    window = {row["auction"] for row in expected if row["window_start"] == at(0)}
    assert window == {1, 2}
    assert multiset(result_of("q5", [], [], bids)) == multiset(expected)


def test_a_new_user_is_one_who_joined_in_the_same_window_and_a_neighbour_one_of_the_right_state() -> None:
    persons = [person(1, 1), person(2, 9), person(3, 11, state="WY"), person(4, 60)]
    auctions = [auction(1, 9, 1, seller=1), auction(2, 10, 1, seller=2), auction(3, 12, 1, seller=3), auction(4, 69, 1)]
    assert [(row["id"], row["auction"]) for row in nexmark.oracle("q8", persons, auctions, [])] == [(1, 1), (3, 3)]
    suggested = {(row["id"], row["seller"]) for row in nexmark.oracle("q3", persons, auctions, [])}
    assert suggested == {(1, 1), (2, 2)}  # 68 s apart is too far for the last one
    for query in ("q3", "q8"):
        expected = nexmark.oracle(query, persons, auctions, [])
        assert multiset(result_of(query, persons, auctions, [])) == multiset(expected)


def result_of(query: str, persons: list[Row], auctions: list[Row], bids: list[Row]) -> list[Row]:
    """The result of the flow for these rows, two per epoch."""
    out, schemas = MemorySink(), [stream.schema for stream in nexmark.SMALL.streams(1)]
    sources = [
        ListSource.of(rows, schema=to_ddl(schema), epoch_rows=2, event_time="event_time")
        for rows, schema in zip((persons, auctions, bids), schemas, strict=True)
    ]
    run_local(nexmark.flow(query, nexmark.Streams(*sources), out))
    return out.rows


def test_views_are_counted_per_campaign_and_ten_seconds() -> None:
    first, second = ysb.SMALL.ads().to_pylist()[0], ysb.SMALL.ads().to_pylist()[-1]
    events = [("view", first, 1), ("view", first, 9.9), ("click", first, 2), ("view", second, 5), ("view", first, 10)]
    events.append(("click", second, 21))
    table = pa.Table.from_pylist(
        [{"event_type": kind, "ad_id": ad["ad_id"], "event_time": at(when)} for kind, ad, when in events]
    )
    found = {(row["campaign_id"], row["window_start"]): row["views"] for row in ysb.oracle(table, ysb.SMALL)}
    assert found == {
        (first["campaign_id"], at(0)): 2,
        (second["campaign_id"], at(0)): 1,
        (first["campaign_id"], at(10)): 1,
    }


@pytest.mark.parametrize(
    ("workload", "name", "shows"),
    [
        (fries_w2, "J1", "w_state"),
        (fries_w2, "J2", "i_item_id"),
        (fries_w2, "J3", "d_date"),
        (fries_w2, "J4", "cr_refunded_cash"),
        (fries_w3, "J5", "d_date"),
        (fries_w3, "J6", "d_date"),
        (fries_w3, "J7", "d_date"),
        (fries_w3, "J8", "i_brand"),
        (fries_w3, "J9", "t_hour"),
    ],
)
def test_a_revised_table_lets_the_same_rows_through_and_shows_in_them(workload: Any, name: str, shows: str) -> None:
    tables, revised = workload.tables(selective=False), workload.revised(name, selective=False)
    assert revised.schema.equals(tables[name].schema)
    rows = [row for stream in sales_of(workload, limit=300).values() for row in rows_of(stream)]
    before, after = (workload.oracle(rows, known) for known in (tables, {**tables, name: revised}))
    touched = [(old, new) for old, new in zip(before, after, strict=True) if meets(name, old)]
    assert len(touched) > 10
    assert all({**old, shows: new[shows]} == new for old, new in touched)  # nothing else differs
    assert {old[shows] for old, _ in touched}.isdisjoint({new[shows] for _, new in touched})
    assert [row for row in before if not meets(name, row)] == [row for row in after if not meets(name, row)]


def meets(name: str, row: Row) -> bool:
    """Whether a row of the result found a match in that join's table."""
    if name == "J4":
        return row["cr_refunded_cash"] is not None
    return name not in fries_w3.DAYS_OF.values() or fries_w3.DAYS_OF[row["channel"]] == name


def sales_of(workload: Any, **options: Any) -> dict[str, GeneratorSource]:
    """The streams of a workload on TPC-DS, by table."""
    if workload is fries_w2:
        return {"catalog_sales": fries_w2.sales(1000, **options)}
    return {f"{channel}_sales": stream for channel, stream in fries_w3.sales(1000, **options)._asdict().items()}


# The queries up to their GROUP BY, with the names of the result.
Q40 = """
    SELECT cs_order_number, cs_item_sk, w_state, i_item_id, d_date, cs_sales_price, cr_refunded_cash
    FROM catalog_sales LEFT JOIN catalog_returns ON cs_order_number = cr_order_number AND cs_item_sk = cr_item_sk,
         warehouse, item, date_dim
    WHERE i_current_price BETWEEN 0.99 AND 1.49 AND i_item_sk = cs_item_sk AND cs_warehouse_sk = w_warehouse_sk
      AND cs_sold_date_sk = d_date_sk AND d_date BETWEEN DATE '2000-02-10' AND DATE '2000-04-10'
"""
Q71_CHANNEL = """
    SELECT '{0}' AS channel, {1}_ext_sales_price AS ext_price, i_brand_id, i_brand, t_hour, t_minute
    FROM {0}_sales, date_dim, item, time_dim
    WHERE d_date_sk = {1}_sold_date_sk AND d_moy = 11 AND d_year = 1999 AND {1}_item_sk = i_item_sk
      AND i_manager_id = 1 AND {1}_sold_time_sk = t_time_sk AND t_meal_time IN ('breakfast', 'dinner')
"""
Q71 = " UNION ALL ".join(Q71_CHANNEL.format(*channel) for channel in fries_w3.CHANNELS.items())


@pytest.mark.parametrize(
    ("workload", "query", "count"),
    [pytest.param(fries_w2, Q40, 39, id="Q40"), pytest.param(fries_w3, Q71, 8, id="Q71")],
)
def test_all_sales_together_equal_a_databases_result_of_the_query(workload: Any, query: str, count: int) -> None:
    streams = sales_of(workload)
    with duckdb.connect() as database:
        for name in (*streams, "catalog_returns", "warehouse", "item", "date_dim", "time_dim"):
            database.register(name, tpcds.table(name))
        expected = database.execute(query).to_arrow_table().to_pylist()
    # One round of a stream is its whole table.
    rows = [
        row for name, stream in streams.items() for row in table(stream, end=tpcds.table(name).num_rows).to_pylist()
    ]
    assert len(expected) == count
    assert multiset({name: row[name] for name in expected[0]} for row in workload.oracle(rows)) == multiset(expected)


def test_w5_judges_a_payment_once_and_small_ones_never() -> None:
    """The model counts payments, so that scores show what each detector remembers."""

    def share(payments: Sequence[Row]) -> float:
        return len(payments) / 4

    made = [(7, 100.0), (7, 5.0), (8, 30.0), (7, 40.0)]  # all at one merchant
    payments = rows_of(fries_w5.payments(BANK, 1000, limit=len(made)))
    for payment, (user, amount) in zip(payments, made, strict=True):
        payment |= {"user": user, "merchant": 3, "amount": amount}
    expected = fries_w5.oracle(payments, share)
    shown = [(row["payment"], row["p_user"], row["p_merchant"], row["alert"]) for row in expected]
    assert shown == [(0, 0.3125, 0.25, False), (2, 0.3125, 0.5, False), (3, 0.9375, 0.75, True)]
    out, schema = MemorySink(), to_ddl(fries_w5.payments(BANK, 1000).schema)
    run_local(fries_w5.flow(ListSource.of(payments, schema=schema, epoch_rows=2, event_time="event_time"), out, share))
    assert multiset(out.rows) == multiset(expected)


def test_a_costly_model_scores_like_the_one_it_replaces() -> None:
    payments = rows_of(BANK.payments(1000, limit=5))
    before = time.thread_time_ns()
    scores = [CostlyModel(fries_w1.LinearModel(), cost_us=2000)(payments[: n + 1]) for n in range(5)]
    assert time.thread_time_ns() - before >= 5 * 2_000_000
    assert scores == [fries_w1.LinearModel()(payments[: n + 1]) for n in range(5)]


def test_oracles_know_nothing_of_the_engine() -> None:
    folder = Path(benchmarks.workloads.__file__).parent
    imported = {
        name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (name := node.module or "").startswith("midstream")
    }
    # The serial interpreter of transactions is an oracle itself: it shares nothing with the engine.
    oracles = {"midstream.txn", "midstream.txn.serial"}
    flows = {"midstream", "midstream.flow.schedules", "midstream.flow.sinks", "midstream.flow.sources"}
    assert imported <= flows | oracles


# ── generators ────────────────────────────────────────────────────────────────────────────────────────────────────

GENERATORS: dict[str, GeneratorSource] = {
    "words": word_count.words(1000, keys=50, skew=0.9),
    "events": ysb.SMALL.events(1000),
    "groups": fries_w4.groups(BANK, 1000),
    "payments": fries_w5.payments(BANK, 1000),
    "catalogue sales": fries_w2.sales(1000),
    **fries_w3.sales(1000)._asdict(),
    **nexmark.SMALL.streams(1000)._asdict(),
}


def table(source: GeneratorSource, start: int = 0, end: int = 10_000) -> pa.Table:
    return pa.Table.from_batches(list(source.rows(start, end, start_us=0)))


@pytest.mark.parametrize("name", GENERATORS)
def test_rows_do_not_depend_on_how_they_are_split_or_where_they_are_made(name: str) -> None:
    source, shipped = GENERATORS[name], cloudpickle.dumps(GENERATORS[name])
    assert len(shipped) < 4000
    there = pickle.loads(shipped)
    pieces = [table(there, start, end) for start, end in ((0, 1), (1, 5000), (5000, 9000))]
    assert pa.concat_tables(pieces).equals(table(source, end=9000))
    assert source.schema.names[-1] == "event_time"


def test_uniform_keys_are_equally_frequent_and_skewed_ones_follow_zipfs_law() -> None:
    uniform = np.bincount(table(word_count.words(1000, keys=100), end=200_000)["key"].to_numpy(), minlength=100)
    assert (len(uniform), uniform.max() < 1.2 * uniform.min()) == (100, True)
    for skew in (0.9, 1.0):
        keys = table(word_count.words(1000, keys=1000, skew=skew), end=400_000)["key"].to_numpy()
        counts, ranks = np.bincount(keys, minlength=1000), np.arange(1, 1001)
        assert len(counts) == 1000
        slope, _ = np.polyfit(np.log(ranks[20:300]), np.log(counts[20:300]), 1)
        assert slope == pytest.approx(-skew, abs=0.07)


def test_ten_million_keys_cost_no_more_than_a_few() -> None:
    keys = table(word_count.words(1000, keys=word_count.LARGE, skew=0.5))["key"].to_numpy()
    assert 0 <= keys.min() < keys.max() < word_count.LARGE
    assert keys.max() > word_count.LARGE // 2


def test_events_are_of_a_thousand_ads_and_a_third_of_them_are_views() -> None:
    events, ads = table(ysb.LARGE.events(1000), end=30_000), ysb.LARGE.ads().to_pylist()
    assert set(events["ad_id"].to_pylist()) == {ad["ad_id"] for ad in ads}
    assert Counter(Counter(ad["campaign_id"] for ad in ads).values()) == {10: 100}
    assert Counter(events["event_type"].to_pylist())["view"] / 30_000 == pytest.approx(1 / 3, rel=0.05)
    assert [str(kind) for kind in events.schema.types] == ["string"] * 6 + ["timestamp[us, tz=UTC]"]


@pytest.mark.parametrize("schedule", [Constant(1000), SquareWave(low=0, high=700, period_s=2)])
def test_one_event_in_fifty_is_a_person_three_are_auctions_and_the_others_bids(schedule: Any) -> None:
    shares = [Share(schedule, first, count) for first, count in ((0, 1), (1, 3), (4, 46))]
    times = [share.time_of(np.arange(7 * share.count)) for share in shares]
    every = schedule.time_of(np.arange(7 * ROUND))
    assert sorted(np.concatenate(times).tolist()) == every.tolist()
    for share, of_share in zip(shares, times, strict=True):
        for us in (0, 1, 20_000, 333_333, int(every[-1])):
            assert share.count_until(us) == (of_share < us).sum()


def test_people_bid_for_auctions_that_exist_and_sell_after_they_joined() -> None:
    persons, auctions, bids = (
        table(stream, end=end).to_pandas()
        for stream, end in zip(nexmark.LARGE.streams(1000), (400, 1200, 18_400), strict=True)
    )
    opened, joined = auctions.set_index("id").event_time, persons.set_index("id").event_time
    assert (bids.event_time.to_numpy() > opened.loc[bids.auction].to_numpy()).all()
    assert (bids.event_time.to_numpy() > joined.loc[bids.bidder].to_numpy()).all()
    assert (auctions.event_time.to_numpy() > joined.loc[auctions.seller].to_numpy()).all()


def test_half_of_the_bids_and_three_quarters_of_sellers_and_bidders_are_hot() -> None:
    _, auctions, bids = nexmark.LARGE.streams(1000)
    bid_for = table(bids, 460_000, 500_000)  # round 10,000 and later: no shortage of people
    hot_auction = (3 * (np.arange(460_000, 500_000) // 46) + 2) // 100 * 100 + 1000
    assert (bid_for["auction"].to_numpy() == hot_auction).mean() == pytest.approx(1 / 2, abs=0.02)
    hot_bidder = np.minimum(np.arange(460_000, 500_000) // 46 // 100 * 100 + 1, np.arange(460_000, 500_000) // 46)
    assert (bid_for["bidder"].to_numpy() == hot_bidder + 1000).mean() == pytest.approx(3 / 4, abs=0.02)
    sold = table(auctions, 30_000, 60_000)["seller"].to_numpy()
    assert (sold == np.arange(30_000, 60_000) // 3 // 100 * 100 + 1000).mean() == pytest.approx(3 / 4, abs=0.02)


def test_groups_hold_one_to_four_payments_which_are_numbered() -> None:
    groups = table(fries_w4.groups(BANK, 1000), end=2000)
    sizes = Counter(len(payments) for payments in groups["payments"].to_pylist())
    assert set(sizes) == {1, 2, 3, 4}
    numbers = [payment["payment"] for payments in groups["payments"].to_pylist() for payment in payments]
    assert numbers == sorted(set(numbers))
