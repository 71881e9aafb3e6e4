"""Random flows on the local runtime against the oracle. Thousands more: ``python -m tests.simulation.run``."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, MemorySink
from midstream.control.coordinator import Coordinator
from midstream.control.messages import (
    EpochAbandoned,
    Event,
    Instruction,
    Received,
    Refused,
    Send,
    TaskFinished,
    TaskStarted,
)
from midstream.engine.collector import FRAME_BYTES
from midstream.runtime.local import control as local_control
from midstream.testing import Faults, ManualClock, run_local
from tests.examples import examples
from tests.oracle import Row
from tests.simulation.flows import check, random_case, random_faults, small_frames
from tests.simulation.run import case_of

rngs = st.randoms(use_true_random=False)
BAD_LUCK = Faults(crash=0.1, speculate=0.1, repeat=0.5, give_up=0.02)


@given(rngs)
@examples(20)
def test_output_equals_the_oracles(rng: random.Random):
    run = check(random_case(rng))
    assert run.metrics.epochs == len(run.progress)


@pytest.mark.long
@given(rngs)
@examples(20)
def test_output_under_faults_equals_the_oracles(rng: random.Random):
    case = random_case(rng)
    case.faults = random_faults(rng)
    run = check(case)
    assert run.metrics.epochs == len(run.progress)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5])
def test_a_seed_replays_exactly(seed):
    first, second = case_of(seed), case_of(seed)
    first.faults = second.faults = BAD_LUCK
    one, other = first.run(), second.run()
    assert one.story == other.story
    assert one.progress == other.progress
    assert first.found() == second.found()


def test_another_seed_gives_another_run():
    first, second = case_of(4), case_of(4)
    first.faults = second.faults = BAD_LUCK
    second.seed += 1
    assert first.run().story != second.run().story


# ── the faults themselves: a simulation in which nothing goes wrong proves nothing ────────────────────────────────


class Watched(Coordinator):
    """Records its events and instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Event] = []
        self.refused: list[Event] = []
        watched.append(self)

    def handle(self, event: Event) -> list[Instruction]:
        answers = super().handle(event)
        self.told.append(event)
        if any(isinstance(answer, Send) and isinstance(answer.message, Refused) for answer in answers):
            self.refused.append(event)
        return answers


watched: list[Watched] = []


def watched_run(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> Watched:
    monkeypatch.setattr(local_control, "Coordinator", Watched)
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("in", ListSource([[{"n": i} for i in range(300)]] * 3, "n bigint", partitions=2))
    rows.map("m", lambda row: row).sink("out", out)
    run_local(flow, seed=1, faults=faults)
    assert len(out.rows) == 900
    return watched.pop()


def started(coordinator: Watched) -> Counter[tuple[int, int, int, int]]:
    """The number of starts of each partition of each run."""
    tasks = [e.message.task for e in coordinator.told if isinstance(e, Received) and isinstance(e.message, TaskStarted)]
    return Counter((task.epoch, task.run, task.stage, task.partition) for task in tasks)


def test_without_faults_every_task_runs_once(monkeypatch):
    quiet = watched_run(monkeypatch, Faults())
    assert started(quiet) == {(epoch, epoch, 0, partition): 1 for epoch in range(3) for partition in range(2)}
    assert not quiet.refused


@pytest.mark.parametrize("faults", [Faults(crash=0.05), Faults(speculate=0.05)])
def test_tasks_crash_and_have_other_attempts(monkeypatch, faults):
    counts = started(watched_run(monkeypatch, faults))
    assert set(counts) == {(epoch, epoch, 0, partition) for epoch in range(3) for partition in range(2)}
    assert max(counts.values()) > 1


def test_messages_are_repeated_even_when_their_epoch_is_over(monkeypatch):
    echoes = [e for e in watched_run(monkeypatch, Faults(repeat=0.9)).refused if isinstance(e, Received)]
    assert echoes
    assert {e.peer for e in echoes} == {b"echo"}


def test_runs_are_given_up_and_their_tasks_continue_until_they_are_refused(monkeypatch):
    unlucky = watched_run(monkeypatch, Faults(give_up=0.05))
    given_up = {event.run for event in unlucky.told if isinstance(event, EpochAbandoned)}
    late = [e.message for e in unlucky.refused if isinstance(e, Received) and e.peer == b"task"]
    assert given_up
    assert late
    assert {message.task.run for message in late if isinstance(message, TaskStarted | TaskFinished)} <= given_up


# ── order ─────────────────────────────────────────────────────────────────────────────────────────────────────────

keys = st.lists(st.sampled_from(["", "a", "b", "é", None]), max_size=120)
faults = st.sampled_from([Faults(), BAD_LUCK])
frame_bytes = st.sampled_from([60, FRAME_BYTES])


@dataclass(frozen=True)
class Tag:
    column: str

    def __call__(self, row: Row) -> Row:
        return {**row, self.column: row["id"]}


def by_key(rows: list[Row], key: str) -> dict[Any, list[int]]:
    found = defaultdict(list)
    for row in rows:
        found[row[key]].append(row["id"])
    return dict(found)


@given(keys, st.integers(1, 4), st.integers(0, 1 << 30), faults, frame_bytes)
@examples(20)
def test_rows_of_one_key_stay_in_order_through_exchanges_and_detours(keys, partitions, seed, faults, frame_bytes):
    rows = [{"id": i, "k": key, "a": None} for i, key in enumerate(keys)]
    flow, straight, joined = Flow("order"), MemorySink(), MemorySink()
    source = flow.source("in", ListSource([rows], "id bigint, k string, a bigint"))
    once = source.key_by("once", "k").map("first", Tag("a"))
    twice = once.key_by("twice", "k").filter("second", lambda row: row["id"] % 7 != 0)
    twice.sink("straight", straight)
    # The odd rows take a longer way, and meet the even ones again behind the next exchange.
    split = source.key_by("thrice", "k").route(
        "split", lambda row: ("even", "odd")[row["id"] % 2], branches=("even", "odd")
    )
    split["odd"].key_by("again", "k").union("meet", split["even"]).sink("joined", joined)

    with small_frames(frame_bytes):
        run_local(flow, partitions=partitions, seed=seed, faults=faults, clock=ManualClock())

    def wanted(keep) -> dict[Any, list[int]]:
        return by_key([row for row in rows if keep(row["id"])], "k")

    assert by_key(straight.rows, "k") == wanted(lambda i: i % 7 != 0)
    for parity in (0, 1):
        kept = [row for row in joined.rows if row["id"] % 2 == parity]
        assert by_key(kept, "k") == wanted(lambda i, parity=parity: i % 2 == parity)


@given(st.lists(st.integers(0, 1 << 20), max_size=120), st.integers(1, 4), st.integers(0, 1 << 30), faults, frame_bytes)
@examples(20)
def test_without_a_key_rows_stay_in_order_within_their_partition(numbers, partitions, seed, faults, frame_bytes):
    rows = [{"id": i, "n": n} for i, n in enumerate(numbers)]
    flow, out = Flow("order"), MemorySink()
    source = flow.source("in", ListSource([rows], "id bigint, n bigint"))
    # `late` runs one stage later only because of the other side of the union; its own rows carry no key.
    source.key_by("key", "n").filter("none", lambda row: False).union("late", source).sink("out", out)
    with small_frames(frame_bytes):
        run_local(flow, partitions=partitions, seed=seed, faults=faults, clock=ManualClock())
    assert out.rows == rows
