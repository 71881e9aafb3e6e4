"""Which bins share a divided one, where that is possible, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Divide, Flow, Insert, ListSource, Move, NoopSink, Remove, Rescale
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.migration_explanation import explained
from midstream.change.migration_goal import described, edit_of, record_of
from midstream.change.migration_request import migration_request
from midstream.change.prepare import prepare
from midstream.controllers.subjects import words_of
from midstream.data.hashing import bins_of, hash_columns
from midstream.errors import FlowError
from midstream.flow.edits import check_edits
from midstream.flow.model import Graph, Port
from midstream.ids import Revision, StageIndex, WireId
from midstream.planner.assignment import Assignment, DividedBin, spread
from midstream.planner.balance import balanced, drained
from midstream.planner.carried_assignments import carried
from midstream.planner.division import after_division, bin_of_key, divided, require_divisible, with_wires
from midstream.planner.migration import Itinerary
from midstream.planner.reassignment import goal_of, moved, rescaled
from midstream.planner.stages import Plan, compile_plan
from midstream.storage.blobs import BlobStore

ROWS = [[{"k": 1, "n": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)}]]
OTHERS = [[{"k": 1, "m": 1, "then": datetime(2026, 1, 1, tzinfo=UTC)}]]
COLUMNS = "k int, n int, at timestamp"


def plan_of(build: Callable[[Any, Any], None], *, how: str = "inner") -> Plan:
    return compile_plan(graph_with(build, how=how))


def graph_with(build: Callable[[Any, Any], None] | None = None, *, how: str = "inner") -> Any:
    """A join of two keyed streams; ``build`` gets the left one and the result."""
    flow = Flow("shop")
    left = flow.source("ls", ListSource(ROWS, COLUMNS, event_time="at")).key_by("by l", "k")
    right = flow.source("rs", ListSource(OTHERS, "k int, m int, then timestamp", event_time="then")).key_by("by r", "k")
    both = left.join("both", right, how=how, within="1 second")
    both.sink("out", NoopSink())
    if build is not None:
        build(left, both)
    return flow.graph


def plain(left: Any, both: Any) -> None:
    """Nothing more."""


def counted(key: Any, row: Any, state: Any) -> Any:
    return row


def some(row: Any) -> bool:
    return bool(row)


STAGE = StageIndex(1)


def test_a_bin_and_bins_of_other_partitions_share_its_rows() -> None:
    plan, now = plan_of(plain), spread(4, 8)
    [after] = [goal_of(plan, {STAGE: now}, [Divide("both", bin=5, into=3)])[STAGE]]
    assert after.divided == (DividedBin("both", "left", (5, 2, 3), (WireId(0), WireId(1))),)
    assert len({after.owners[number] for number in after.divided[0].bins}) == 3
    assert after.owners == now.owners, "nothing moves"
    one = divided(plan, after, Divide("both", bin=5, into=1))
    assert (one.divided, one.united) == ((), after.divided)
    assert divided(plan, after, Divide("both", bin=5, into=3)) == after


def test_a_key_is_found_by_its_columns_as_text_or_as_it_is() -> None:
    plan = plan_of(plain)
    number = bin_of_key(plan, "both", {"k": 12}, 256)
    graph = plan.graph
    import pyarrow as pa

    batch = pa.record_batch({"k": pa.array([12], graph["ls"].schema.field("k").type)})
    assert number == bins_of(hash_columns(batch, ["k"]), 256)[0] == bin_of_key(plan, "both", {"k": "12"}, 256)
    for key, message in (({"n": 1}, r"keyed by \(k\), and the key names \(n\)"), ({"k": "x"}, "'k' is int, not 'x'")):
        with pytest.raises(FlowError, match=message):
            bin_of_key(plan, "both", key, 256)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Divide("both", bin=99), "there is no bin 99 to divide; the bins are 0 to 7"),
        (
            Divide("both", bin=0, into=5),
            "cannot be divided into 5: only 4 partitions have a bin for it",
        ),
        (Divide("both", bin=1, into=2), "bin 1 is divided into 3 already; unite it first, with into=1"),
        (Divide("both", bin=2, into=2), "bin 2 has a share of another bin that is divided"),
        (Divide("out", bin=0), "'out' cannot be divided: it is a sink"),
        (Divide("nothing", bin=0), "'nothing' cannot be divided: the flow has no operator of that name"),
    ],
)
def test_what_cannot_be_divided_is_refused(edit: Divide, message: str) -> None:
    plan = plan_of(plain)
    now = divided(plan, spread(4, 8), Divide("both", bin=1, into=3))
    with pytest.raises(FlowError, match=message):
        divided(plan, now, edit)


@pytest.mark.parametrize(
    ("how", "spread_sides"), [("inner", {"left", "right"}), ("left", {"left"}), ("right", {"right"}), ("full", set())]
)
def test_rows_that_are_kept_without_a_partner_are_not_copied(how: str, spread_sides: set[str]) -> None:
    plan = plan_of(plain, how=how)
    for side in ("left", "right"):
        if side in spread_sides:
            assert len(require_divisible(plan, "both", side)) == 2
        else:
            with pytest.raises(FlowError, match="none of which could say that such a row has no partner"):
                require_divisible(plan, "both", side)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda left, both: left.process("count", counted, returns=COLUMNS).sink("counts", NoopSink()),
            "rows of its left side also go to 'count', in the same tasks",
        ),
    ],
)
def test_other_state_in_the_same_tasks_is_in_the_way(build: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        require_divisible(plan_of(build), "both", "left")


def test_state_for_its_results_in_the_same_tasks_is_in_the_way() -> None:
    graph = plan_of(lambda left, both: left.process("count", counted, returns=COLUMNS).sink("c", NoopSink())).graph
    others = [op for op in graph if op.name not in ("count", "c")]
    after = replace(graph["count"], name="after", inputs=(Port("both"),))
    plan = compile_plan(Graph("shop", (*others, after)))
    with pytest.raises(FlowError, match="'after' keeps state for its results in the same tasks; a key_by between"):
        require_divisible(plan, "both", "left")


def test_rows_that_pass_an_operator_behind_the_exchange_are_not_divided() -> None:
    flow = Flow("shop")
    left = flow.source("ls", ListSource(ROWS, COLUMNS, event_time="at")).key_by("by l", "k")
    right = flow.source("rs", ListSource(OTHERS, "k int, m int, then timestamp", event_time="then")).key_by("by r", "k")
    left.filter("some", some).join("both", right, within="1 second").sink("out", NoopSink())
    with pytest.raises(FlowError, match="rows of its left side pass another operator behind the exchange"):
        require_divisible(compile_plan(flow.graph), "both", "left")


def test_a_join_of_a_stream_with_itself_is_not_divided() -> None:
    flow = Flow("shop")
    rows = flow.source("ls", ListSource(ROWS, COLUMNS, event_time="at")).key_by("by l", "k")
    rows.join("both", rows.rename("other", {"n": "m", "at": "then"}), within="1 second", right_time="then").sink(
        "out", NoopSink()
    )
    with pytest.raises(FlowError, match=r"also go to|pass another operator"):
        require_divisible(compile_plan(flow.graph), "both", "left")


@given(
    st.integers(1, 6),
    st.lists(
        st.one_of(
            st.builds(
                lambda number, into: Divide("both", bin=number, into=into), st.integers(0, 31), st.integers(1, 4)
            ),
            st.builds(Rescale, st.integers(1, 8)),
            st.builds(lambda number: Move({number: 0}), st.integers(0, 31)),
            st.sampled_from(["balance", "drain"]),
        ),
        max_size=12,
    ),
)
def test_divisions_outlast_whatever_moves_bins(partitions: int, edits: list[Any]) -> None:
    plan, now = PLAN, spread(partitions, 32)
    for edit in edits:
        active = {each.home: each for each in now.divided}
        try:
            match edit:
                case Divide():
                    wanted = divided(plan, now, edit)
                    now = Itinerary({STAGE: wanted}).after_step({STAGE: now}, ())[STAGE]
                    assert {each.home for each in now.divided} == {*active, edit.bin} - (
                        {edit.bin} if edit.into == 1 else set()
                    )
                    continue
                case Rescale(partitions=count):
                    now = rescaled(now, count)
                case Move(bins=bins):
                    now = moved(now, bins)
                case "balance":
                    now = balanced(now, [float(number % 5) for number in range(32)])
                case "drain":
                    now = drained(now, [0])
        except FlowError:
            continue
        assert {each.home: each for each in now.divided} == active
    shares = [number for each in now.divided for number in each.bins]
    assert len(shares) == len(set(shares)), "no bin has two tasks"
    again = Assignment.from_document(now.to_document())
    assert (again, again.united) == (now, now.united)
    assert not {number for each in now.united for number in each.bins} & set(shares)


PLAN = plan_of(plain)


def test_what_follows_says_what_is_to_be_put_together() -> None:
    now = divided(PLAN, spread(4, 8), Divide("both", bin=1, into=3))
    back = after_division(now, spread(4, 8))
    assert (back.divided, back.united) == ((), now.divided)
    assert back == spread(4, 8), "a migration that leads there is over"


def configuration(store: BlobStore) -> Configuration:
    first = first_configuration(graph_with(), store, 4, bins=8)
    return first.with_assignments({STAGE: divided(first.plan, first.assignments[STAGE], Divide("both", bin=1, into=3))})


def test_a_change_after_which_the_join_could_not_be_divided_is_refused(tmp_path: Any) -> None:
    store = BlobStore(str(tmp_path))
    now = configuration(store)
    count = Insert(
        lambda rows: rows.process("count", counted, returns=COLUMNS).sink("counts", NoopSink()), after="by l"
    )
    with pytest.raises(FlowError, match=r"bins of 'both' are divided, and could not be after that: .*'count'.* into=1"):
        prepare(now, [count], store, revision=Revision(2))
    early = Insert(lambda rows: rows.filter("some", some), after="ls")
    after = prepare(now, [early], store, revision=Revision(2)).after
    assert after.assignments[STAGE].divided == now.assignments[STAGE].divided
    with pytest.raises(FlowError, match=r"by job\.migrate"):
        check_edits([Divide("both", bin=0)])


def test_a_script_whose_join_cannot_be_divided_does_not_start_and_others_go_on(tmp_path: Any) -> None:
    store = BlobStore(str(tmp_path))
    before = configuration(store)
    again = first_configuration(graph_with(), store, 6, before=before, bins=8)
    assert again.assignments[STAGE].partitions == 6
    assert again.assignments[STAGE].divided == before.assignments[STAGE].divided
    with pytest.raises(FlowError, match="are divided, and could not be after that"):
        first_configuration(graph_with(how="full"), store, 4, before=before, bins=8)


def test_wires_are_those_of_the_present_plan() -> None:
    now = divided(PLAN, spread(4, 8), Divide("both", bin=1, into=3))
    moved_on = compile_plan(graph_with(lambda left, both: None))
    [each] = with_wires(moved_on, carried(PLAN, {STAGE: now}, moved_on, 4, 8))[STAGE].divided
    assert each.wires == require_divisible(moved_on, "both", "left")


def test_an_explanation_says_what_is_divided() -> None:
    now = spread(4, 8)
    then = divided(PLAN, now, Divide("both", bin=1, into=3))
    request = migration_request([Divide("both", bin=1, into=3)], by="ann", strategy="sudden")
    told = str(explained(PLAN, request, {STAGE: now}, {STAGE: then}, lambda move: 0, 100.0))
    assert "both: bin 1 is divided; bins 2 and 3 get a share" in told
    assert "moves 0 bins" in told
    assert "both: bin 1 is united" in described(PLAN, {STAGE: then}, {STAGE: now}, request.strategy)


def test_records_and_words() -> None:
    for edit in (Divide("both", {"k": 7}, into=4, spread="right"), Divide("both", bin=3, into=1)):
        assert edit_of(record_of(edit)) == edit
    assert str(record_of(Divide("both", {"k": 7}, into=4))) == "shares of 7 at both: 4"
    assert words_of(Divide("both", bin=3, into=2)) == "divide a key of 'both' into 2"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Divide("j"),
        lambda: Divide("j", {"k": 1}, 3),
        lambda: Divide("j", bin=1, into=0),
        lambda: Divide("j", bin=1, spread="both"),
        lambda: Divide("j", {"k": 1.5}),  # type: ignore[dict-item]
    ],
)
def test_a_division_that_makes_no_sense_is_refused(make: Callable[[], Divide]) -> None:
    with pytest.raises(FlowError, match="Divide: "):
        make()


def test_a_removed_join_is_refused(tmp_path: Any) -> None:
    store = BlobStore(str(tmp_path))
    with pytest.raises(FlowError):
        prepare(configuration(store), [Remove("both")], store, revision=Revision(2))
