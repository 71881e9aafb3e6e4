"""The auditor's verdicts on histories that can be checked by hand, and its explanations."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from midstream.audit import OperatorSeen, RecordedHistory, Verdict, decide
from midstream.errors import FlowError, SchemaError
from midstream.ids import Revision

FM_AND_MC = {Revision(2): ["FM", "MC"]}


def history(*operations: tuple[object, str, int]) -> pa.Table:
    rows, operators, revisions = zip(*operations, strict=True)
    return pa.table({"row": pa.array(rows), "operator": operators, "revision": pa.array(revisions, pa.int32())})


def told(*operations: tuple[object, str, int], changes: dict[Revision, list[str]] = FM_AND_MC) -> str:
    verdict = decide(history(*operations), changes)
    assert verdict.witness is not None
    assert not verdict.serialisable
    return str(verdict.witness)


def test_figure_2_is_caught():
    schedule_3 = [(17, "FC", 1), (17, "FM", 1), (17, "MC", 2)]
    assert told(*schedule_3) == (
        "row 17 passed 'FM' under revision 1 and 'MC' under revision 2; revision 2 changed both"
    )


def test_the_good_schedule_of_figure_2_passes():
    schedule_1 = [(17, "FC", 1), (17, "FM", 2), (17, "MC", 2)]
    assert decide(history(*schedule_1), FM_AND_MC) == Verdict(3, 1, 0, None)


def test_rows_may_see_different_revisions_if_each_sees_only_one():
    assert decide(history((1, "FM", 1), (2, "FM", 2), (1, "MC", 1), (2, "MC", 2)), FM_AND_MC).serialisable


def test_one_operator_that_sees_a_row_under_two_revisions_is_enough():
    """Section 6.1: a join made several rows from one, and FMX changed between them."""
    changes = {Revision(2): ["FMX"]}
    story = told((5, "J", 1), (5, "FMX", 1), (6, "FMX", 1), (5, "FMX", 2), changes=changes)
    assert story == "row 5 passed 'FMX' under revision 1 and again under revision 2; revision 2 changed it"


def test_operators_that_did_not_change_do_not_matter():
    assert decide(history((1, "FC", 1), (1, "FM", 2), (1, "MC", 2), (1, "E", 1)), FM_AND_MC).serialisable


def test_a_revision_counts_for_all_changes_up_to_it():
    changes = {Revision(2): ["FM", "MC"], Revision(3): ["MC"]}
    assert decide(history((1, "FM", 2), (1, "MC", 2)), changes).serialisable
    assert decide(history((1, "FM", 3), (1, "MC", 3)), changes).serialisable
    # FM is the same at revisions 2 and 3, so a row that met it at 2 may still come after change 3.
    assert decide(history((1, "FM", 2), (1, "MC", 3)), changes).serialisable
    assert not decide(history((1, "FM", 1), (1, "MC", 3)), changes).serialisable


def test_a_row_that_sees_a_later_but_not_an_earlier_change_is_a_violation():
    changes = {Revision(2): ["FM"], Revision(3): ["MC"]}
    assert told((1, "FM", 1), (1, "MC", 3), changes=changes) == (
        "row 1 passed 'FM' under revision 1 and 'MC' under revision 3; but revision 2 changed the one before revision "
        "3 changed the other"
    )
    assert decide(history((1, "FM", 2), (1, "MC", 2)), changes).serialisable


def test_a_verdict_counts_violations_and_shows_the_first_row():
    found = decide(history((1, "FM", 1), (3, "FM", 1), (2, "FM", 1), (3, "MC", 2), (2, "MC", 2)), FM_AND_MC)
    assert (found.operations, found.rows, found.violations) == (5, 3, 2)
    assert str(found) == (
        "not serialisable: 2 of 3 rows saw a mixture of revisions.\n"
        "row 3 passed 'FM' under revision 1 and 'MC' under revision 2; revision 2 changed both"
    )


def test_rows_may_have_ids_of_any_type():
    mixed = [OperatorSeen(("payments", 0, 7), "FM", Revision(1)), OperatorSeen(("payments", 0, 7), "MC", Revision(2))]
    found = decide(mixed, FM_AND_MC)
    assert found.witness is not None
    assert found.witness.before.row == ("payments", 0, 7)
    for kind in (pa.int64(), pa.string(), pa.binary()):
        ids = pa.array(["a", "b", "a"]).cast(kind) if kind != pa.int64() else pa.array([8, 9, 8])
        table = pa.table({"row": ids, "operator": ["FM", "FM", "MC"], "revision": [1, 1, 2]})
        assert decide(table, FM_AND_MC).violations == 1
    nested = pa.array([{"source": "s", "n": 1}, {"source": "s", "n": 2}, {"source": "s", "n": 1}])
    found = decide(pa.table({"row": nested, "operator": ["FM", "FM", "MC"], "revision": [1, 1, 2]}), FM_AND_MC)
    assert found.witness is not None
    assert found.rows == 2
    assert str(found.witness).startswith("row {'source': 's', 'n': 1} passed 'FM'")


def test_a_table_may_come_in_chunks_and_dictionaries():
    parts = [history((1, "FM", 1), (2, "MC", 1)), history((1, "MC", 2), (2, "FM", 1))]
    coded = [part.set_column(1, "operator", part["operator"].dictionary_encode()) for part in parts]
    for table in (pa.concat_tables(parts), pa.concat_tables(coded)):
        assert decide(table, FM_AND_MC).violations == 1
    repeated = pa.DictionaryArray.from_arrays([0, 1, 2], ["FM", "MC", "FM"])
    table = pa.table({"row": [1, 2, 1], "operator": repeated, "revision": [1, 1, 2]})
    assert decide(table, {Revision(2): ["FM"]}).violations == 1


def test_an_empty_history_is_serialisable():
    assert decide([], FM_AND_MC) == Verdict(0, 0, 0, None)
    assert decide(history((1, "FM", 1)).slice(1), {}) == Verdict(0, 0, 0, None)


def test_a_history_can_be_recorded_in_columns_at_once():
    recorded = RecordedHistory(np.array([0, 0]), np.array([0, 1]), np.array([1, 2]), (17,), ("FM", "MC"))
    assert decide(recorded, FM_AND_MC).violations == 1
    assert recorded.operation(1) == OperatorSeen(17, "MC", Revision(2))


def test_a_table_that_is_not_a_history_is_refused():
    with pytest.raises(SchemaError, match=r"'operator' is missing, found 'row', 'revision'"):
        decide(pa.table({"row": [1], "revision": [1]}), {})
    with pytest.raises(SchemaError, match="column 'row' of a history has nulls"):
        decide(history((None, "FM", 1)), {})


def test_one_name_instead_of_a_list_is_refused():
    with pytest.raises(FlowError, match=r"found the string 'FM'. Use e.g. \['FM'\]"):
        decide([], {Revision(2): "FM"})
