"""Rows meet the owner of their key under any assignment: in every stage, with any number of partitions."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, MemorySink
from midstream.data.key_space import MAX_BINS
from midstream.errors import FlowError
from midstream.flow.model import Graph
from midstream.ids import BINS, PartitionId, StageIndex
from midstream.planner.assignment import Assignment, assign, spread
from midstream.planner.stages import compile_plan
from midstream.runtime.local.runtime import run_graph
from midstream.testing import Faults, ManualClock
from tests.assignments import uneven
from tests.examples import examples
from tests.simulation.flows import small_frames

Row = dict[str, Any]
DDL = "id bigint, k bigint, g bigint, at timestamp"
TWIN = "g bigint, seen timestamp, twin bigint"
POWERS = tuple(1 << power for power in range(17))


class Count:
    """Numbers the rows of each key. A row that reached the wrong owner would start again at 1, or be refused."""

    def __call__(self, key: Any, row: Row, state: Any) -> Row:
        state.set((state.get() or 0) + 1)
        return {**row, "n": state.get()}


def counting(epochs: list[list[Row]]) -> tuple[Graph, dict[str, MemorySink]]:
    """Keyed state at every depth. Rows of `by far` pass through a stage before a join, and later a transform."""
    flow, outs = Flow("counting"), {name: MemorySink() for name in ("near", "deep", "far", "later")}
    rows = flow.source("in", ListSource(epochs, DDL, partitions=2, event_time="at"))
    near = rows.key_by("by k", "k").process("near", Count(), returns=f"{DDL}, n bigint")
    near.sink("near out", outs["near"])
    again = near.map("again", lambda row: {"g": row["g"], "seen": row["at"], "twin": row["id"]}, returns=TWIN)
    by_g = again.key_by("by g", "g")
    by_g.process("deep", Count(), returns=f"{TWIN}, n bigint").sink("deep out", outs["deep"])
    by_far = rows.key_by("by far", "g")
    by_far.join("far", by_g, within="0 seconds", right_time="seen").sink("far out", outs["far"])
    same = again.transform("same", lambda df: df, local=lambda table: table, returns=TWIN)
    by_far.join("later", same.key_by("later by g", "g"), within="0 seconds", right_time="seen").sink(
        "later out", outs["later"]
    )
    return flow.graph, outs


def counts_of(rows: list[Row], key: str) -> Counter[tuple[int, int]]:
    """The expected result of counting rows by key, in any order: for each key, the numbers from 1."""
    found: Counter[int] = Counter(row[key] for row in rows)
    return Counter((value, n) for value, count in found.items() for n in range(1, count + 1))


@pytest.mark.long
@examples(25)
@given(
    lives=st.lists(
        st.tuples(
            st.integers(0, 1 << 16),
            st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=30), min_size=1, max_size=2),
        ),
        min_size=1,
        max_size=2,
    ),
    frame_bytes=st.sampled_from((60, 1 << 20)),
)
def test_rows_meet_the_owner_of_their_key_in_every_run_of_a_job(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, list[list[tuple[int, int]]]]], frame_bytes: int
) -> None:
    ids = itertools.count()
    checkpoint = str(tmp_path_factory.mktemp("assignment"))
    every: list[Row] = []
    found: dict[str, list[Row]] = defaultdict(list)
    with small_frames(frame_bytes):
        for seed, epochs in lives:  # each has its own assignments and continues with the state of the previous one
            rows = [[row_of(next(ids), k, g) for k, g in epoch] for epoch in epochs]
            every += itertools.chain.from_iterable(rows)
            graph, outs = counting(rows)
            faults = Faults(crash=0.02, speculate=0.05)
            owners = uneven(graph, seed)
            run_graph(graph, seed=seed, faults=faults, clock=ManualClock(), checkpoint=checkpoint, assignments=owners)
            for name, sink in outs.items():
                found[name] += sink.rows
    for name, key in (("near", "k"), ("deep", "g")):
        assert Counter((row[key], row["n"]) for row in found[name]) == counts_of(every, key), name
    for name in ("far", "later"):
        assert sorted((row["id"], row["twin"]) for row in found[name]) == [(row["id"], row["id"]) for row in every]


def row_of(number: int, k: int, g: int) -> Row:
    return {"id": number, "k": k, "g": g, "at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)}


@examples(40)
@given(st.sampled_from(POWERS), st.integers(1, 12))
def test_spreading_gives_every_bin_one_owner_and_every_partition_its_share(bins: int, partitions: int) -> None:
    assignment = spread(partitions, bins)
    shares = [assignment.owned_by(PartitionId(partition)) for partition in range(partitions)]
    assert sorted(number for share in shares for number in share) == list(range(bins))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert assignment.bins == bins


@pytest.mark.parametrize(
    ("partitions", "owners", "message"),
    [
        (2, (0, 1, 2, 0), "bin 2 belongs to partition 2, but the partitions are 0 to 1"),
        (2, (0, -1), "bin 1 belongs to partition -1, but the partitions are 0 to 1"),
        (2, (), "0 bins: the number of bins must be a power of two from 1 to 65536"),
        (2, (0, 1, 0), "3 bins: the number of bins must be a power of two from 1 to 65536"),
        (1, (0,) * (2 * MAX_BINS), "131072 bins: the number of bins must be a power of two from 1 to 65536"),
        (0, (0,), "0 partitions: the number of partitions must be from 1 to 65536"),
    ],
)
def test_an_invalid_assignment_is_refused(partitions: int, owners: tuple[int, ...], message: str) -> None:
    with pytest.raises(FlowError) as refused:
        Assignment(partitions, owners)
    assert str(refused.value) == message


def test_recorded_assignments_stay_and_other_stages_get_as_many_bins() -> None:
    recorded = {StageIndex(2): Assignment(3, (2, 2, 0, 0))}
    assert assign([StageIndex(1), StageIndex(2)], 2, recorded) == {StageIndex(1): spread(2, 4), **recorded}
    assert assign([StageIndex(1)], 2, {}) == {StageIndex(1): spread(2, BINS)}


def test_every_stage_behind_an_exchange_has_an_assignment() -> None:
    graph, _ = counting([[]])
    plan = compile_plan(graph)
    assert plan.exchanged == tuple(stage.index for stage in plan.stages if stage.index not in (0, 3))
