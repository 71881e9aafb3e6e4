"""Hot keys of joins that several partitions share: every pair comes out once, whatever happens when, and after that
state is where it would be without.

Pairs are compared with a plain loop over all rows; late rows, and rows without a partner, with a run that divides
nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Divide, Flow, ListSource, MemorySink, Move, Outcome, Rescale, tumbling
from midstream.checkpoint.inspection import read_state
from midstream.data.hashing import bins_of, hash_columns
from midstream.ids import BINS
from midstream.testing import Faults, LocalRun, MigrateAt, run_local
from tests.simulation.moving import random_migrations

pytestmark = pytest.mark.long

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOT, EPOCHS = 7, 14
WITHIN_S = 6
DIVIDE, UNITE = 3, 9
ROUGH = Faults(crash=0.02, speculate=0.04, repeat=0.04, give_up=0.004, lose_output=0.01)
DEADLY = Faults(crash=0.01, crash_driver=0.004, lose_executor=0.004, lose_run=0.002)
BIN = int(bins_of(hash_columns(pa.record_batch({"k": pa.array([HOT], pa.int32())}), ["k"]), BINS)[0])

Row = dict[str, Any]


@dataclass(frozen=True)
class Streams:
    """Rows of both sides, by epoch. Most have the hot key."""

    left: Sequence[Sequence[Row]]
    right: Sequence[Sequence[Row]]

    @classmethod
    def random(cls, seed: int) -> Streams:
        rng = random.Random(seed)

        def side(name: str, time: str, count: int) -> list[list[Row]]:
            return [
                [
                    {
                        "k": HOT if rng.random() < 0.7 else rng.randrange(20),
                        name: 1000 * epoch + number,
                        time: NOON + timedelta(seconds=3 * epoch + rng.uniform(-9, 9)),
                    }
                    for number in range(count)
                ]
                for epoch in range(EPOCHS)
            ]

        return cls(side("l", "at", 12), side("r", "paid", 5))

    def with_gap(self) -> Streams:
        """No row of the right side is near the middle of this gap, so rows of the left side there stay alone."""
        begins, length = NOON + timedelta(seconds=8), timedelta(seconds=18)

        def shifted(row: Row) -> Row:
            return {**row, "paid": row["paid"] + length} if begins <= row["paid"] < begins + length else row

        return Streams(self.left, [list(map(shifted, rows)) for rows in self.right])

    def pairs(self) -> Counter[Any]:
        """All pairs of rows, none of which is late."""
        near = timedelta(seconds=WITHIN_S)
        return Counter(
            (one["k"], one["l"], other["r"])
            for one in chain(*self.left)
            for other in chain(*self.right)
            if one["k"] == other["k"] and abs(one["at"] - other["paid"]) <= near
        )


@dataclass(frozen=True)
class Seen:
    """What came out of a run."""

    pairs: Counter[Any]
    late: Counter[Any]
    run: LocalRun


def joined(
    streams: Streams,
    changes: Sequence[Any] = (),
    *,
    how: str = "inner",
    delay: str = "5 seconds",
    seed: int = 0,
    faults: Faults | None = None,
    folder: Path | None = None,
) -> Seen:
    flow, out = Flow("shop"), MemorySink()
    late = {side: MemorySink() for side in ("left", "right")}
    left = flow.source("ls", ListSource(streams.left, "k int, l int, at timestamp", event_time="at"), delay=delay)
    right = flow.source("rs", ListSource(streams.right, "k int, r int, paid timestamp", event_time="paid"), delay=delay)
    both = left.key_by("by l", "k").join("both", right.key_by("by r", "k"), how=how, within=f"{WITHIN_S} seconds")
    both.sink("out", out)
    for side, sink in late.items():
        both.late(side).sink(f"late {side}", sink)
    run = run_local(
        flow,
        changes=changes,
        partitions=4,
        seed=seed,
        faults=faults,
        checkpoint=None if folder is None else str(folder),
        executors=2 if faults is DEADLY else 1,
    )
    rows = [row for sink in late.values() for row in sink.rows]
    return Seen(Counter(map(named, out.rows)), Counter(map(named, rows)), run)


def named(row: Row) -> tuple[Any, ...]:
    return row.get("k"), row.get("l"), row.get("r")


def division(spread: str = "left", into: int = 3, unite_at: int = UNITE) -> list[MigrateAt]:
    divide, unite = (Divide("both", {"k": HOT}, into=count, spread=spread) for count in (into, 1))
    return [
        MigrateAt.of(DIVIDE, divide, strategy="sudden", queue=True, prewarm=False),
        MigrateAt.of(unite_at, unite, strategy="sudden", queue=True, prewarm=False),
    ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spread", ["left", "right"])
@pytest.mark.parametrize("faults", [ROUGH, DEADLY], ids=["rough", "deadly"])
def test_every_pair_comes_out_once(spread: str, faults: Faults, seed: int) -> None:
    streams = Streams.random(seed)
    seen = joined(streams, division(spread), delay="1 hour", seed=seed, faults=faults)
    assert seen.pairs == streams.pairs()
    assert [record.outcome for record in seen.run.history] == [Outcome.APPLIED] * 2


@pytest.mark.parametrize("how", ["inner", "left", "right"])
def test_late_rows_and_rows_without_a_partner_leave_once_as_without_a_division(how: str) -> None:
    streams = Streams.random(5).with_gap()
    if how == "right":
        streams = Streams.random(5)
    plain = joined(streams, how=how)
    for unite_at in (6, UNITE):
        seen = joined(streams, division("right" if how == "right" else "left", 3, unite_at), how=how, faults=ROUGH)
        assert (seen.pairs, seen.late) == (plain.pairs, plain.late)
    assert sum(plain.late.values()) > 50
    assert how != "left" or len([each for each in plain.pairs if each[0] == HOT and each[2] is None]) > 5
    assert how != "right" or any(each[1] is None for each in plain.pairs)


def test_shares_are_moved_rescaled_and_found_again_by_another_driver() -> None:
    streams = Streams.random(3)
    moves = [
        MigrateAt.of(5, Rescale(2), strategy="sudden", queue=True, prewarm=False),
        MigrateAt.of(6, Move(dict.fromkeys(range(0, BINS, 3), 1)), strategy="sudden", queue=True, prewarm=False),
        MigrateAt.of(7, Rescale(5), strategy="sudden", queue=True, prewarm=False),
    ]
    first, last = division()
    seen = joined(streams, [first, *moves, last], delay="1 hour", faults=DEADLY, seed=4)
    assert seen.pairs == streams.pairs()
    assert {record.outcome for record in seen.run.history} == {Outcome.APPLIED}


def test_what_is_left_in_state_is_what_an_undivided_run_leaves(tmp_path: Path) -> None:
    streams = Streams.random(1)
    joined(streams, delay="1 hour", folder=tmp_path / "plain")
    joined(streams, division(), delay="1 hour", folder=tmp_path / "united")
    joined(streams, division()[:1], delay="1 hour", folder=tmp_path / "divided")
    left = {name: read_state(str(tmp_path / name), "both").to_pylist() for name in ("plain", "united", "divided")}

    def total(name: str, side: str) -> int:
        return sum(row["bytes"] for row in left[name] if row["side"] == side)

    assert {side: total("united", side) for side in ("left", "right")} == {
        side: total("plain", side) for side in ("left", "right")
    }
    assert total("divided", "left") == total("plain", "left"), "spread rows are in one place each"
    assert total("divided", "right") > 2 * total("plain", "right"), "copied rows in three"


def test_a_key_is_divided_united_and_divided_again_in_other_ways() -> None:
    streams = Streams.random(2)
    ways = [
        Divide("both", {"k": HOT}, into=3),
        Divide("both", bin=BIN, into=1),
        Divide("both", bin=BIN, into=2, spread="right"),
        Divide("both", bin=BIN, into=1),
        Divide("both", bin=BIN, into=4),
    ]
    changes = [MigrateAt.of(1 + 2 * n, way, strategy="sudden", queue=True) for n, way in enumerate(ways)]
    seen = joined(streams, changes, delay="1 hour", faults=ROUGH, seed=2)
    assert seen.pairs == streams.pairs()
    assert [record.outcome for record in seen.run.history] == [Outcome.APPLIED] * 5


def test_a_division_outlasts_the_driver(tmp_path: Path) -> None:
    streams, cut = Streams.random(6), 7
    first = joined(Streams(streams.left[:cut], streams.right[:cut]), division()[:1], delay="1 hour", folder=tmp_path)
    unite = MigrateAt.of(10, Divide("both", {"k": HOT}, into=1), strategy="sudden")
    rest = joined(Streams(streams.left[cut:], streams.right[cut:]), [unite], delay="1 hour", folder=tmp_path)
    assert first.pairs + rest.pairs == streams.pairs()
    assert [record.outcome for record in rest.run.history] == [Outcome.APPLIED] * 2


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_divisions_and_moves_gives_what_none_gives(seed: int) -> None:
    """With windows, unequal distances, null keys, other numbers of bins, and bins that are divided at any time."""
    rng = random.Random(seed)
    how, bins = rng.choice(["inner", "left", "right"]), (32, 256, 1024)[seed % 3]
    spread = how if how != "inner" else rng.choice(["left", "right"])
    nulls = pa.record_batch({"k": pa.array([None if seed % 2 else HOT], pa.int32())})
    number = int(bins_of(hash_columns(nulls, ["k"]), bins)[0])
    changes = [
        MigrateAt.of(
            epoch, Divide("both", bin=number, into=into, spread=spread), strategy="sudden", queue=True, if_possible=True
        )
        for epoch, into in zip(sorted(rng.sample(range(1, 12), 3)), (rng.randint(2, 4), 1, 2), strict=True)
    ]
    moves = [each for each in random_migrations(rng, EPOCHS) if bins == BINS or not isinstance(each.edits[0], Move)]
    streams = Streams.random(seed)
    faults = rng.choice([ROUGH, DEADLY])
    plain = mixed(streams, [], how, bins, None, seed)
    assert mixed(streams, [*changes, *moves], how, bins, faults, seed) == plain
    assert all(sum(each.values()) for each in plain), "there are pairs, late rows and rows without a key"


def mixed(
    streams: Streams, changes: Sequence[Any], how: str, bins: int, faults: Faults | None, seed: int
) -> list[Counter[Any]]:
    """All that comes out: pairs, late rows and rows without a key."""
    rng, flow, out = random.Random(seed), Flow("shop"), MemorySink()
    rows = [
        [[{**row, "k": None} if rng.random() < 0.05 else row for row in epoch] for epoch in side]
        for side in (streams.left, streams.right)
    ]
    left = ListSource(rows[0], "k int, l int, at timestamp", event_time="at")
    right = ListSource(rows[1], "k int, r int, paid timestamp", event_time="paid")
    one, other = (flow.source(name, each, delay="5 seconds") for name, each in (("ls", left), ("rs", right)))
    near: dict[str, Any] = {"window": tumbling("7 seconds")} if seed % 2 else {"within": ("2 seconds", "10 seconds")}
    both = one.key_by("by l", "k").join("both", other.key_by("by r", "k"), how=how, on_error="branch", **near)
    both.sink("out", out)
    late, wrong = ([MemorySink(), MemorySink()] for _ in range(2))
    for number, side in enumerate(("left", "right")):
        both.late(side).sink(f"late {side}", late[number])
        both.errors(side).sink(f"errors {side}", wrong[number])
    run_local(flow, changes=changes, partitions=4, bins=bins, seed=seed, faults=faults, executors=2 if faults else 1)
    return [Counter(map(named, chain(*(sink.rows for sink in sinks)))) for sinks in ([out], late, wrong)]
