"""The auditor against the definition: whether the precedence graph of rows and changes has a cycle."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from midstream.audit import OperatorSeen, decide
from midstream.ids import Revision

Changes = Mapping[Revision, Collection[str]]

revisions = st.integers(0, 5).map(Revision)
names = st.sampled_from(["A", "B", "C", "D"])
histories = st.lists(st.builds(OperatorSeen, st.integers(0, 4), names, revisions), max_size=12)
all_changes = st.dictionaries(st.integers(1, 5).map(Revision), st.sets(names, min_size=1, max_size=3), max_size=4)


def is_acyclic(precedence: set[tuple[object, object]]) -> bool:
    after: dict[object, set[object]] = {}
    for first, second in precedence:
        after.setdefault(second, set()).add(first)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return False
    return True


def is_serialisable(history: Collection[OperatorSeen], changes: Changes) -> bool:
    precedence: set[tuple[object, object]] = set(pairwise(("change", each) for each in sorted(changes)))
    for operation in history:
        row = ("row", operation.row)
        for revision, updated in changes.items():
            if operation.operator in updated:
                change = ("change", revision)
                precedence.add((change, row) if revision <= operation.revision else (row, change))
    return is_acyclic(precedence)


def as_table(history: Collection[OperatorSeen]) -> pa.Table:
    return pa.table(
        {
            "row": pa.array([f"row {each.row}" for each in history], pa.string()),
            "operator": pa.array([each.operator for each in history], pa.string()),
            "revision": pa.array([each.revision for each in history], pa.int32()),
        }
    )


@given(histories, all_changes)
def test_a_history_is_serialisable_exactly_if_its_precedence_graph_has_no_cycle(history, changes):
    assert decide(history, changes).serialisable == is_serialisable(history, changes)


@given(histories, all_changes)
def test_the_witness_row_alone_is_not_serialisable_and_the_rest_is(history, changes):
    verdict = decide(history, changes)
    while verdict.witness is not None:
        witness = verdict.witness
        assert {witness.before, witness.after} <= set(history)
        assert not is_serialisable([witness.before, witness.after], changes)
        history = [each for each in history if each.row != witness.before.row]
        fewer = decide(history, changes)
        assert fewer.violations == verdict.violations - 1
        verdict = fewer
    assert is_serialisable(history, changes)


@given(histories, all_changes)
def test_a_table_is_judged_like_the_operations_in_it(history, changes):
    one, other = decide(history, changes), decide(as_table(history), changes)
    assert (one.operations, one.rows, one.violations) == (other.operations, other.rows, other.violations)
    assert (one.witness is None) == (other.witness is None)
    if one.witness and other.witness:
        assert other.witness.before.row == f"row {one.witness.before.row}"
        assert str(other.witness) == "row " + str(one.witness)


@given(histories, all_changes)
def test_the_order_of_records_does_not_matter(history, changes):
    assert decide(history[::-1], changes).violations == decide(history, changes).violations
