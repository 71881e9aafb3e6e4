"""All that is in a bin moves with it, byte for byte: whatever operators keep is the same in a job whose bins move in
every epoch, in the checkpoint and in every executor's copy, as in one whose bins stay where they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.compute as pc
import pytest

from midstream import Flow, ListSource, MemorySink, Move, Rescale, Update, agg, sessions
from midstream.change.trial import Request
from midstream.ids import BinId, Epoch
from midstream.planner.change_plan import Scheduler
from midstream.planner.migration import StepStrategy
from midstream.runtime.local.data import source_epochs
from midstream.runtime.local.runtime import runtime_of
from midstream.state.contents import dump
from midstream.state.lineage import Lineage
from midstream.testing import ChangeAt, ManualClock, MigrateAt
from tests.fixtures import shop
from tests.fixtures.shop import ALL_EPOCHS, START, STATEFUL, Shop

BINS = 16
EPOCHS, ROWS, KEYS = 8, 30, 12

Contents = dict[str, dict[BinId, dict[bytes, bytes]]]
"""By operator and bin: keys and values as they are stored."""


# ── a flow with the kinds of state that the shop lacks ────────────────────────────────────────────────────────────


class Product:
    """An aggregator of a user's own."""

    def zero(self) -> int:
        return 1

    def add(self, total: int, rows: Any) -> int:
        return total * (pc.product(rows.column("n")).as_py() or 1) % 10_007

    def merge(self, one: int, other: int) -> int:
        return one * other % 10_007

    def result(self, total: int) -> int:
        return total


class Reminded:
    """A value, a list, a map, and timers of both kinds."""

    def __call__(self, key: Any, row: Any, state: Any) -> Any:
        state.set(state.get(0) + row["n"])
        state.list("recent").append(row["id"], keep=3)
        state.map("by n")[row["n"]] = row["id"]
        state.event_timer(row["t"] + timedelta(seconds=25))
        state.clock_timer(state.now + timedelta(seconds=row["n"]))
        return {"k": row["k"], "total": state.get()}

    def on_timer(self, key: Any, time: datetime, state: Any) -> Any:
        state.map("fired")[time.second] = len(state.list("recent"))


class RemindedAnew(Reminded):
    """The same with another layout of its map, which is migrated key by key."""

    def __call__(self, key: Any, row: Any, state: Any) -> Any:
        state.map("by n")[str(row["n"])] = row["id"]
        return super().__call__(key, row, state)


def with_texts(key: Any, state: Any) -> None:
    state.map("by n").update({str(n): number for n, number in state.map("by n").items()})


ANEW = (ChangeAt.of(2, Update("remind", RemindedAnew(), migrate=with_texts)),)


def rest(epochs: int = EPOCHS, quiet: int = 0) -> Flow:
    """Operators and aggregations that the shop lacks. The last epochs are quiet: they have no rows."""
    flow = Flow("rest")
    data = [
        [
            {
                "id": ROWS * epoch + i,
                "k": f"k{i * 7 % KEYS}",
                "n": 1 + i % 5,
                "x": (i * 37 + epoch) % 100 / 8,
                "t": START + timedelta(seconds=10 * epoch + i % 9),
            }
            for i in range(ROWS)
        ]
        for epoch in range(epochs)
    ]
    data += [[]] * quiet
    source = ListSource(data, "id bigint, k string, n bigint, x double, t timestamp", event_time="t", partitions=2)
    rows = flow.source("rows", source)
    odd = rows.filter("odd", lambda row: row["id"] % 2 == 1).select("right", rk="k", rid="id", rt="t")
    keyed, other = rows.key_by("by k", "k"), odd.key_by("by rk", "rk")
    results = {
        "reminded": keyed.process("remind", Reminded(), returns="k string, total bigint", ttl="20 seconds"),
        "statistics": keyed.aggregate(
            "statistics",
            deviation=agg.stddev("n"),
            variance=agg.variance_pop("n"),
            all=agg.collect("id"),
            kinds=agg.collect_set("n"),
            first=agg.first_by("id", "t"),
            last=agg.last_by("id", "t"),
            median=agg.approx_quantile("x", 0.5),
            product=agg.custom(Product(), "n", returns="bigint"),
        ),
        "visits": keyed.aggregate("visits", window=sessions(gap="4 seconds"), ids=agg.collect("id")),
        "everything": rows.aggregate_all("everything", n=agg.count(), most=agg.max("x")),
        "right": keyed.join("right joined", other, within=("3 seconds", "8 seconds"), how="right", right_time="rt"),
        "full": keyed.join("full joined", other, within="2 seconds", how="full", right_time="rt"),
    }
    for name, stream in results.items():
        stream.sink(f"{name} out", MemorySink())
    return flow


# ── what is compared ──────────────────────────────────────────────────────────────────────────────────────────────


def lived(
    flow: Flow,
    migrations: Sequence[MigrateAt] = (),
    *,
    changes: Sequence[ChangeAt] = (),
    executors: int = 1,
    seed: int = 0,
) -> tuple[list[Contents], int]:
    """What a checkpoint holds after each epoch, and how many bins have moved.

    What executors have of it, also of bins that they no longer own, must be the same.
    """
    found, graph = list[Contents](), flow.graph
    clock = ManualClock(start_us=(START - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))
    with runtime_of(
        graph, partitions=2, bins=BINS, seed=seed, clock=clock, changes=migrations, executors=executors
    ) as runtime:
        for epoch, rows in enumerate(source_epochs(graph)):
            runtime.run_epoch(Epoch(epoch), rows)
            clock.advance(seconds=3)
            for change in changes:
                if change.epoch == epoch:  # between two epochs, so that it does not depend on the seed in which rows
                    runtime._driver.changing.request(Request(change.edits, Scheduler.EPOCH, "test", preflight=False))
            manifest = runtime.checkpoint.newest_manifest()
            assert manifest is not None
            lineages = {name: Lineage.decode(data) for name, data in manifest.lineages.items()}
            states = runtime.checkpoint.states
            found.append(
                {
                    name: {each: dump(states, lineage, each) for each in lineage.bins()}
                    for name, lineage in lineages.items()
                }
            )
            for executor in runtime.executors.all:
                for name, lineage in lineages.items():
                    _check_copy(executor.state, lineage, found[-1][name])
    moved = sum(step.bins for record in runtime.result.history if record.migration for step in record.migration.steps)
    return found, moved


def _check_copy(state: Any, lineage: Lineage, wanted: dict[BinId, dict[bytes, bytes]]) -> None:
    for number in state.has(lineage, wanted):
        with state.base(lineage).view(lineage, (number,)) as view:
            rows = view.table([number])
        held = dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
        assert held == wanted[number], (lineage.operator, number)


def restless(seed: int, epochs: int) -> list[MigrateAt]:
    """Migrations of every stage in every epoch, by any strategy."""
    rng = random.Random(seed)
    found = []
    for epoch in range(epochs - 1):
        edits: list[Move | Rescale] = [Rescale(rng.randint(1, 5))]
        if rng.random() < 0.5:
            edits.append(Move(dict.fromkeys(rng.sample(range(BINS), 5), 0)))
        strategy = rng.choice([*StepStrategy, "sudden"])
        found.append(
            MigrateAt.of(epoch, *edits, strategy=strategy, prewarm=rng.random() < 0.5, queue=True, if_possible=True)
        )
    return found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_shop_keeps_the_same_bytes_whether_or_not_its_bins_move(seed: int):
    """Totals, windows, sessions, first rows, panes of joins, tables."""
    changes, epochs = shop.changes(range(ALL_EPOCHS)), range(ALL_EPOCHS)
    still, none = lived(Shop(epochs).flow, changes=changes)
    restlessly, moved = lived(
        Shop(epochs).flow, restless(seed, ALL_EPOCHS), changes=changes, executors=1 + seed, seed=seed
    )
    assert none == 0 < moved
    _compare(still, restlessly)
    kept = {name for name, bins in still[-1].items() if any(bins.values())}
    assert kept == set(STATEFUL)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_all_other_kinds_of_state_are_the_same_bytes_wherever_they_are(seed: int):
    """Values, lists, maps, timers, times to live, levels of migrated state, every aggregation, totals of all rows, and
    joins that keep either side."""
    still, none = lived(rest(), changes=ANEW)
    restlessly, moved = lived(rest(), restless(seed, EPOCHS), changes=ANEW, executors=1 + seed, seed=seed)
    assert none == 0 < moved
    _compare(still, restlessly)
    kept = {name for name, bins in still[-1].items() if any(bins.values())}
    assert kept == {"remind", "statistics", "visits", "everything", "right joined", "full joined"}


@pytest.mark.long
def test_a_migration_without_rows_changes_no_state():
    """What is there before a bin moves is there after it has moved, although no row came meanwhile."""
    epochs = 3
    contents, moved = lived(
        rest(epochs, quiet=3), [MigrateAt.of(epochs - 1, Rescale(5), strategy="sudden")], executors=2
    )
    assert moved > BINS / 2
    before, after = contents[epochs - 1], contents[-1]
    for name in before:
        if name != "remind":  # its timers of the clock go off meanwhile
            assert before[name] == after[name], name


def _compare(still: list[Contents], moved: list[Contents]) -> None:
    assert len(still) == len(moved)
    for epoch, (one, other) in enumerate(zip(still, moved, strict=True)):
        assert one.keys() == other.keys()
        for name in one.keys() - {"remember"}:  # of two branches, whose order hangs on where slices end
            filled = [{number: rows for number, rows in each[name].items() if rows} for each in (one, other)]
            assert filled[0] == filled[1], (epoch, name)
