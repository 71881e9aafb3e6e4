"""Assignments after edits, against what can be counted: even spreads, and the fewest moves."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, Move, NoopSink, Rescale
from midstream.errors import FlowError
from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, spread
from midstream.planner.reassignment import keyed_stages, moved, reassigned, rescaled, stage_names
from midstream.planner.stages import Plan, compile_plan


@st.composite
def assignments(draw: st.DrawFn, most_bins: int = 6) -> Assignment:
    partitions = draw(st.integers(1, 5))
    bins = 1 << draw(st.integers(0, most_bins))
    return Assignment(partitions, tuple(draw(st.integers(0, partitions - 1)) for _ in range(bins)))


def moves(before: Assignment, after: Assignment) -> int:
    return sum(old != new for old, new in zip(before.owners, after.owners, strict=True))


@given(assignments(), st.data())
def test_a_rescaled_stage_is_spread_evenly(before: Assignment, data: st.DataObject):
    partitions = data.draw(st.integers(1, before.bins))
    after = rescaled(before, partitions)
    held = Counter(after.owners)
    assert after.partitions == partitions
    assert {held[owner] for owner in range(partitions)} <= {before.bins // partitions, -(-before.bins // partitions)}


@given(assignments(most_bins=2), st.integers(1, 3))
def test_no_even_spread_moves_fewer_bins(before: Assignment, partitions: int):
    if partitions > before.bins:
        return
    low, high = before.bins // partitions, -(-before.bins // partitions)
    even = [
        owners
        for owners in product(range(partitions), repeat=before.bins)
        if all(low <= owners.count(owner) <= high for owner in range(partitions))
    ]
    fewest = min(moves(before, Assignment(partitions, owners)) for owners in even)
    assert moves(before, rescaled(before, partitions)) == fewest


@given(assignments(), st.data())
def test_only_the_named_bins_move(before: Assignment, data: st.DataObject):
    owners = st.integers(0, before.partitions - 1)
    wanted = data.draw(st.dictionaries(st.integers(0, before.bins - 1), owners))
    after = moved(before, wanted)
    assert after.partitions == before.partitions
    assert after.owners == tuple(wanted.get(number, owner) for number, owner in enumerate(before.owners))


def two_stages() -> Plan:
    """Counts by user, then of these by city."""
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], "user string, city string"))
    counted = rows.key_by("by user", "user").process("count", lambda key, row, state: row, returns="city string")
    counted.key_by("by city", "city").process("sum", lambda key, row, state: row, returns="city string").sink(
        "out", NoopSink()
    )
    return compile_plan(flow.graph)


def test_a_stage_is_named_by_its_key_by_or_by_an_operator_in_it():
    plan = two_stages()
    assert keyed_stages(plan) == {"by user": (1,), "count": (1,), "by city": (2,), "sum": (2,)}
    assert stage_names(plan) == {1: "by user", 2: "by city"}


BEFORE = {StageIndex(1): spread(2, bins=4), StageIndex(2): spread(2, bins=4)}


def test_edits_are_made_in_order_and_per_stage():
    after = reassigned(two_stages(), BEFORE, [Rescale(3, stage="sum"), Move({0: 2}, stage="by city")])
    assert after[StageIndex(1)] == BEFORE[StageIndex(1)]
    assert after[StageIndex(2)].partitions == 3
    assert after[StageIndex(2)].owners[0] == 2
    assert {each.partitions for each in reassigned(two_stages(), BEFORE, [Rescale(1)]).values()} == {1}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            Rescale(4, stage="by usr"),
            "no stage 'by usr' behind an exchange; did you mean 'by user'? A stage is named by",
        ),
        (Rescale(5, stage="sum"), "partitions=5: give a whole number from 1 to 4, the number of bins"),
        (Rescale(0), "partitions=0: give a whole number from 1 to 4"),
        (Rescale(2), "changes nothing: every bin has that owner already ('by user' has 2 partitions, 'by city' has 2"),
        (Move({0: 1}), "Move could mean several stages; say which with stage=, the name of an operator in it: 'by"),
        (Move({}, stage="sum"), "Move names no bin"),
        (Move({4: 0}, stage="sum"), "there is no bin 4 to move; the bins are 0 to 3"),
        (Move({0: 2}, stage="sum"), "bin 0 cannot move to partition 2; the partitions are 0 to 1. Rescale makes more"),
        (Move({0: 0}, stage="sum"), "changes nothing"),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit, message):
    with pytest.raises(FlowError) as refusal:
        reassigned(two_stages(), BEFORE, [edit])
    assert message in str(refusal.value)


def test_a_flow_without_an_exchange_has_no_bins():
    flow = Flow("f")
    flow.source("in", ListSource([[]], "user string")).sink("out", NoopSink())
    with pytest.raises(FlowError, match="has no stage behind an exchange, so it has no bins; a key_by makes one"):
        reassigned(compile_plan(flow.graph), {}, [Rescale(2)])
