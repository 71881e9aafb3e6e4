"""Random flows with state under random faults, against the serial oracle.

Thousands more: ``python -m tests.simulation.run --only keyed``.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from midstream import Flow, ListSource, MemorySink, agg, sessions, tumbling
from midstream.engine.aggregation import running
from midstream.runtime.edge import DriverCrashed
from midstream.runtime.local import runtime as local
from midstream.state import keeper, task
from midstream.state.spill import Spill
from midstream.testing import Faults, ManualClock, run_local
from tests.keyed_oracle import KeyedOracle
from tests.oracle import Row
from tests.simulation.flows import small_frames
from tests.simulation.keyed_flows import (
    KINDS,
    SCHEMA,
    KeyedCase,
    Life,
    Remember,
    at,
    check_keyed,
    keyed_case_of,
)

BAD_LUCK = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.01, crash_driver=0.01)
SEEDS = 8
SEEDS_OF = {
    "process": range(8),
    "process_batches": range(2),
    "aggregate": range(3),
    "windowed": range(6),
    "distinct": range(3),
    # Among them: a left row meets its partner in the epoch in which it would have got nulls instead.
    "join": range(33, 38),
}


SPOILED = {
    "any": (11,),
    "process": (6, 13),
    "process_batches": (8,),
    "windowed": (10,),
    "join": (10,),
    "distinct": (10,),
}
"""Cases with bad rows; in the first, a source is idle."""


# ── seeds ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_rows_counts_and_state_equal_the_oracles(tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(SEEDS):
        case = keyed_case_of(seed, tmp_path / str(seed))
        check_keyed(case)
        seen.update(op.kind for op in case.flow.graph if op.spec.is_stateful)
        seen["several lives"] += len(case.lives) > 1
        for kind in ("delta", "merged", "snapshot"):
            seen[kind] += len(list((case.folder / "checkpoint" / "state").glob(f"*/*-{kind}-*")))
    everything = {"process", "aggregate", "distinct", "join", "several lives", "delta", "merged", "snapshot"}
    assert everything <= {name for name, count in seen.items() if count}, seen


@pytest.mark.long
def test_bad_rows_idle_sources_and_the_end_of_runs_equal_the_oracles(tmp_path: Path) -> None:
    """Functions that fail after they changed state, missing keys and times, times in the far future."""
    seen = Counter[str]()
    for kind, seeds in SPOILED.items():
        for seed in seeds:
            case = keyed_case_of(seed, tmp_path / f"{kind} {seed}", None if kind == "any" else kind)
            runs = check_keyed(case)
            for stats in (each for run in runs for progress in run.progress for each in progress.operators):
                seen[f"errors of {case.flow.graph[stats.operator].kind}"] += stats.errors
                seen["rows ahead"] += stats.rows_ahead
            seen["closed"] += case.closes
            seen["idle"] += any(source.idle_us is not None for source in case.flow.graph.sources.values())
    wanted = {f"errors of {kind}" for kind in ("source", "map", "key_by", "process", "aggregate", "join", "distinct")}
    assert {*wanted, "rows ahead", "closed", "idle"} <= {name for name, count in seen.items() if count}, seen


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_does_not_fit_in_memory_equals_the_oracles(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles are forgotten after each slice, and changes put on the disk again and again."""
    spills = Counter[str]()
    put = Spill.put

    def counted(spill: Spill, changes: Any) -> None:
        spills["all"] += 1
        put(spill, changes)

    monkeypatch.setattr(task, "HELD_BYTES", 500)
    monkeypatch.setattr(keeper, "HELD_BYTES", 0)
    monkeypatch.setattr(running, "KEYS_AT_ONCE", 2)
    monkeypatch.setattr(Spill, "put", counted)
    seeds = [*SEEDS_OF[kind][:2], *SPOILED.get(kind, ())[:1]]
    for seed in seeds:
        check_keyed(keyed_case_of(seed, tmp_path / str(seed), kind))
    assert spills["all"] > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_operator_with_state_equals_the_oracle(kind: str, tmp_path: Path) -> None:
    given = late = 0
    for seed in SEEDS_OF[kind]:
        case = keyed_case_of(seed, tmp_path / str(seed), kind)
        for progress in (each for run in check_keyed(case) for each in run.progress):
            stateful = [each for each in progress.operators if case.flow.graph[each.operator].spec.is_stateful]
            given += sum(each.rows_out for each in stateful)
            late += sum(each.rows_late for each in stateful)
    assert given > 20
    assert (late > 5) == (kind in ("windowed", "join"))


@pytest.mark.long
def test_a_seed_replays_exactly(tmp_path: Path) -> None:
    first, second = (keyed_case_of(7, tmp_path / name, "process") for name in ("one", "two"))
    first.faults = second.faults = BAD_LUCK
    one, other = first.run(), second.run()
    assert [run.story for run in one] == [run.story for run in other]
    assert [run.progress for run in one] == [run.progress for run in other]
    assert {name: rows() for name, rows in first.outputs.items()} == {
        name: rows() for name, rows in second.outputs.items()
    }


# ── one flow, and each fault at each place ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Numbered:
    """Numbers the rows of a key."""

    def __call__(self, key: Any, row: Row, state: Any) -> Row:
        state.list().append(row["id"])
        return {**row, "n": len(state.list())}


def small_case(folder: Path, *, length: int = 3, partitions: int = 1, quick: bool = False) -> KeyedCase:
    """Everything that an epoch can do, in few rows: state of several kinds, timers, windows, late rows.

    ``quick`` leaves out operators with event time, because searching all bins for them costs most of the time.
    """
    rng = random.Random(5)
    case = KeyedCase(folder, lives=[Life(length, partitions)], small=1, pauses=[3])
    case.epochs["rows"] = [
        [
            {"id": 10 * n + i, "k": rng.choice("ab"), "g": i % 2, "n": rng.choice((1, 2, 3, 5)), "s": "x", "t": time}
            for i, time in enumerate(at(8 * n + rng.randint(-12, 6)) for _ in range(5))
        ]
        for n in range(length)
    ]
    case.source_partitions["rows"] = 1
    source = case.flow.source("rows", ListSource(case.epochs["rows"], SCHEMA, event_time="t"), delay="2 seconds")
    case.keep_ledger(source)
    keyed = source.key_by("by_k", "k")
    remembered = keyed.process("remember", Numbered() if quick else Remember(("k",), True, 4))
    window = None if quick else tumbling("5 seconds")
    totals = keyed.aggregate("totals", window=window, n=agg.sum("n"), c=agg.count())
    for name, stream in {"told": remembered, "counted": totals, **({} if quick else {"late": totals.late()})}.items():
        memory = MemorySink()
        stream.sink(name, memory)
        case.outputs[name] = partial(rows_of, memory)
    return case


def rows_of(memory: MemorySink) -> dict[int, list[Row]]:
    return {epoch: rows.to_pylist() for epoch, rows in memory.tables.items()}


def test_the_small_case_covers_everything(tmp_path: Path) -> None:
    case = small_case(tmp_path)
    check_keyed(case)
    for name, rows in case.outputs.items():
        assert sum(map(len, rows().values())) > 1, name
    assert any(row["id"] == -1 for rows in case.outputs["told"]().values() for row in rows), "no timer has fired"


class Nth:
    """True once, at the n-th call."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == self.n


@contextmanager
def driver_crashes(now: Nth) -> Iterator[None]:
    def maybe(self: Any) -> None:
        if now():
            raise DriverCrashed

    with patch.object(local._Runtime, "_maybe_crash_driver", maybe):
        yield


def opportunities(folder: Path, **options: Any) -> int:
    """The number of steps at which the driver could crash, in a run without crashes."""
    never = Nth(0)
    with driver_crashes(never):
        check_keyed(small_case(folder / "calm", **options))
    return never.asked


@pytest.mark.long
def test_the_driver_and_its_hosts_may_die_at_every_single_step(tmp_path: Path) -> None:
    count = opportunities(tmp_path, quick=True)
    assert count > 30
    for n in range(1, count + 1):
        case, now = small_case(tmp_path / str(n), quick=True), Nth(n)
        case.hosts_die = True
        with driver_crashes(now):
            check_keyed(case)
        assert now.asked > n, f"crash {n} did not happen"


@pytest.mark.long
def test_the_driver_that_takes_over_may_crash_as_well(tmp_path: Path) -> None:
    count, apart = opportunities(tmp_path), 3
    # The last two steps come after the last manifest: nothing is left to run again, or to crash in.
    for n in range(1, count - 1, 9):
        case, asked = small_case(tmp_path / str(n)), iter(range(1, 10_000))

        def maybe(self: Any, asked: Iterator[int] = asked, crashes: tuple[int, ...] = (n, n + apart)) -> None:
            if next(asked) in crashes:
                raise DriverCrashed

        with patch.object(local._Runtime, "_maybe_crash_driver", maybe):
            check_keyed(case)
        assert next(asked) > n, "the first crash did not happen"


@pytest.mark.long
def test_after_two_crashes_around_a_commit_the_database_agrees_with_state(tmp_path: Path) -> None:
    """The first crash comes when the epoch's manifest is written; the second one anywhere after it."""
    count = opportunities(tmp_path, length=1, quick=True)
    for first, later in itertools.product((count, count - 1), range(1, count + 1)):
        case, asked = small_case(tmp_path / f"{first}+{later}", length=1, quick=True), itertools.count(1)

        def maybe(self: Any, asked: Iterator[int] = asked, crashes: Any = (first, first + later)) -> None:
            if next(asked) in crashes:
                raise DriverCrashed

        with patch.object(local._Runtime, "_maybe_crash_driver", maybe):
            check_keyed(case)


@contextmanager
def tasks_crash(now: Nth) -> Iterator[None]:
    """Make only the chance of a crash non-zero."""
    with patch.object(local._Runtime, "_chance", lambda self, chance: chance > 0 and now()):
        yield


@pytest.mark.long
def test_a_task_may_crash_at_every_single_step(tmp_path: Path) -> None:
    def case(name: str) -> KeyedCase:
        made = small_case(tmp_path / name, length=2, partitions=2, quick=True)
        made.faults = Faults(crash=0.5)
        return made

    never = Nth(0)
    with tasks_crash(never):
        check_keyed(case("calm"))
    assert never.asked >= 30
    for n in range(1, never.asked + 1):
        now = Nth(n)
        with tasks_crash(now):
            check_keyed(case(str(n)))
        assert now.asked > n, f"crash {n} did not happen"


# Without a change there is no message to lose, and no time limit.
@pytest.mark.parametrize("fault", [each.name for each in fields(Faults) if each.name not in ("lose", "overdue")])
def test_every_fault_happens_and_changes_nothing(fault: str, tmp_path: Path) -> None:
    happened = Counter[bool]()
    chance = local._Runtime._chance

    def counted(self: Any, probability: float) -> bool:
        found = chance(self, probability)
        happened[found] += 1
        return found

    case = small_case(tmp_path, length=4, partitions=3)
    case.faults = Faults(**{fault: 0.15 if fault == "repeat" else 0.04})
    with patch.object(local._Runtime, "_chance", counted):
        check_keyed(case)
    assert happened[True] >= 2, happened


# ── guarantees ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_one_key_and_source_partition_are_processed_in_order(seed: int) -> None:
    rng = random.Random(seed)
    epochs = [
        [{"id": 100 * n + i, "k": rng.choice("abc"), "n": 0} for i in range(rng.randint(0, 60))] for n in range(4)
    ]
    source, out = ListSource(epochs, "id bigint, k string, n int", partitions=3), MemorySink()
    flow = Flow("order")
    once = flow.source("rows", source).key_by("once", "k").process("first", Numbered())
    once.key_by("twice", "k").process("second", Numbered()).sink("out", out)
    with small_frames(60):
        run_local(flow, partitions=rng.randint(1, 4), seed=seed, faults=BAD_LUCK, clock=ManualClock())
    home = {
        row["id"]: (row["k"], epoch, partition)
        for epoch in range(4)
        for partition in range(3)
        for row in source.batches(epoch, partition).to_pylist()
    }
    order = defaultdict(list)
    for row in sorted(out.rows, key=lambda row: row["n"]):
        order[home[row["id"]]].append(row["id"])
    assert len(home) == len(out.rows) == sum(map(len, epochs))
    assert all(ids == sorted(ids) for ids in order.values())
    numbers = Counter((row["k"], row["n"]) for row in out.rows)
    assert set(numbers.values()) == {1}  # each number of a key was given once, over all epochs and faults


def test_the_oracle_by_hand() -> None:
    flow = Flow("by hand")
    epochs = [
        [{"k": "a", "t": at(1)}, {"k": "a", "t": at(4)}, {"k": "b", "t": at(2)}],
        [{"k": "a", "t": at(12)}, {"k": "b", "t": at(3.5)}],
        [{"k": "b", "t": at(3)}, {"k": "a", "t": at(30)}],
    ]
    source = flow.source("rows", ListSource(epochs, "k string, t timestamp", event_time="t"), delay="1 second")
    keyed = source.key_by("by_k", "k")
    keyed.aggregate("tumbling", window=tumbling("10 seconds"), n=agg.count()).sink("windows", MemorySink())
    linked = keyed.aggregate("linked", window=sessions("4 seconds"), n=agg.count())
    linked.sink("sessions", MemorySink())
    linked.late().sink("late", MemorySink())
    keyed.distinct("once", within="10 seconds").sink("firsts", MemorySink())
    oracle = KeyedOracle(flow.graph)
    answers = [oracle.epoch({"rows": rows}).sinks for rows in epochs]

    def of(sink: str, *columns: str) -> list[list[tuple[Any, ...]]]:
        return [sorted(tuple(row[column] for column in columns) for row in answer[sink]) for answer in answers]

    # The watermarks are 3, 11 and 29 seconds.
    assert of("windows", "k", "window_start", "n") == [[], [("a", at(0), 2), ("b", at(0), 2)], [("a", at(10), 1)]]
    assert of("sessions", "k", "window_end", "n") == [[], [("a", at(8), 2), ("b", at(7.5), 2)], [("a", at(16), 1)]]
    assert of("late", "k", "t") == [[], [], [("b", at(3))]]
    # At 11 seconds the first row of a (at 1 second) is forgotten, that of b (at 2 seconds) only in the last epoch.
    assert of("firsts", "k", "t") == [[("a", at(1)), ("b", at(2))], [], [("a", at(30))]]
