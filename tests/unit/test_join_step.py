"""The output of a join, when it comes, and the state it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from midstream.data.schema import parse_ddl
from midstream.data.times import EpochTimes
from midstream.engine.steps import ONLY
from midstream.errors import OperatorFailed, StateError
from midstream.flow.model import Operator
from midstream.flow.spec import LATE, LATE_RIGHT, How
from midstream.flow.windows import Tumbling
from midstream.ids import Epoch, PartitionId, Run
from midstream.operators import join_step as join_module
from midstream.operators.join import Join
from midstream.operators.join_step import instantiate_join
from midstream.state.base import ALL_BINS, Base
from midstream.state.files import Author, FileRef, StateFiles
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage
from midstream.state.panes import SEGMENT, Panes, RowCodec
from midstream.state.task import TaskState

CLICKS = parse_ddl("user string, at timestamp, page string")
SALES = parse_ddl("buyer string, sold timestamp, tags array<string>")


def moment(time: int | None) -> datetime | None:
    return None if time is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)


def clicks(*rows: tuple) -> pa.RecordBatch:
    found = [{"user": user, "at": moment(at), "page": page} for user, at, page in rows]
    return pa.RecordBatch.from_pylist(found, CLICKS)


def sales(*rows: tuple) -> pa.RecordBatch:
    found = [{"buyer": user, "sold": moment(at), "tags": tags} for user, at, tags in rows]
    return pa.RecordBatch.from_pylist(found, SALES)


def by_window(size: int, how: How = How.INNER) -> Join:
    return Join(("user",), ("buyer",), "at", "sold", how, window=Tumbling(size))


def within(reach: int, how: How = How.INNER) -> Join:
    return Join(("user",), ("buyer",), "at", "sold", how, within_us=reach)


class Epochs:
    """Runs a join epoch after epoch, each on the state that the previous one committed."""

    def __init__(self, folder: Path) -> None:
        self.base = Base(str(folder / "base"), "join", StateFiles(str(folder / "checkpoint")))
        self.lineage = Lineage.start("join")
        self.watermark: int | None = None
        self.delta: FileRef | None = None

    def run(self, spec: Join, *slices: pa.RecordBatch, watermark: int | None = None, schemas=(CLICKS, SALES)):
        """The rows of each branch; the schema of a slice tells its side."""
        keys = set(spec.right_keys)
        joined = pa.schema([*schemas[0], *(field for field in schemas[1] if field.name not in keys)])
        results: dict[str, list[dict]] = {}
        watermark = self.watermark if watermark is None else watermark
        with TaskState(self.base, self.lineage, ALL_BINS) as state:
            times = EpochTimes(0, self.watermark, watermark)
            work = instantiate_join(Operator("join", spec, (), joined), spec, schemas, state, times)
            outputs = [work.entries[schemas.index(piece.schema)](piece) for piece in slices]
            assert work.finish is not None
            assert work.flush is not None
            for output in [*outputs, *work.flush(), *work.finish()]:
                for branch, batch in output.items():
                    results.setdefault(branch, []).extend(batch.to_pylist())
            epoch = Epoch(self.lineage.epoch + 1)
            self.delta = state.write_delta(Author("join", epoch, Run(0), PartitionId(0), 0))
        self.lineage = self.lineage.after(epoch, [self.delta] if self.delta is not None else [])
        self.watermark = watermark
        return results

    def stored(self) -> list[tuple[bytes, bytes]]:
        with TaskState(self.base, self.lineage, ALL_BINS) as state:
            return [row for number in ALL_BINS for name in Namespace for row in state.scan(number, name)]


@pytest.fixture
def epochs(tmp_path: Path) -> Iterator[Epochs]:
    made = Epochs(tmp_path)
    yield made
    made.base.close()


def pair(user: str, at: int, page: str, sold: int | None, tags: list | None) -> dict:
    return {"user": user, "at": moment(at), "page": page, "sold": moment(sold), "tags": tags}


# ── pairs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("left_first", [True, False])
def test_rows_of_one_window_meet_in_one_epoch_and_across_epochs(epochs, left_first):
    left, right = clicks(("ann", 3, "home"), ("ann", 10, "next")), sales(("ann", 9, ["x", None]), ("bob", 3, []))
    expected = {ONLY: [pair("ann", 3, "home", 9, ["x", None])]}
    order = (left, right) if left_first else (right, left)
    assert epochs.run(by_window(10), *order) == expected
    epochs.lineage = Lineage.start("join")
    assert epochs.run(by_window(10), order[0]) == {}
    assert epochs.run(by_window(10), order[1]) == expected


def test_within_includes_its_bound_on_both_sides(epochs):
    epochs.run(within(5), clicks(("ann", 100, "p")))
    found = epochs.run(within(5), sales(*(("ann", at, []) for at in (94, 95, 100, 105, 106))))
    assert sorted(row["sold"] for row in found[ONLY]) == [moment(95), moment(100), moment(105)]


def test_keys_of_several_columns_may_have_different_names_and_be_times(epochs):
    left = parse_ddl("a int, b string, at timestamp")
    right = parse_ddl("d string, c int, sold timestamp")
    spec = Join(("a", "b", "at"), ("c", "d", "sold"), "at", "sold", How.INNER, within_us=0)
    ours = pa.RecordBatch.from_pylist([{"a": 1, "b": "x", "at": moment(5)}, {"a": 1, "b": "y", "at": moment(5)}], left)
    theirs = pa.RecordBatch.from_pylist([{"c": 1, "d": "x", "sold": moment(5)}], right)
    epochs.run(spec, theirs, schemas=(left, right))
    assert epochs.run(spec, ours, schemas=(left, right)) == {ONLY: [{"a": 1, "b": "x", "at": moment(5)}]}


def test_a_slice_with_very_many_pairs_emits_the_rest_at_the_end(epochs, monkeypatch):
    monkeypatch.setattr(join_module, "MAX_PAIRS", 50)
    epochs.run(by_window(10), clicks(*(("ann", 1, str(number)) for number in range(20))))
    with TaskState(epochs.base, epochs.lineage, ALL_BINS) as state:
        spec = by_window(10)
        schema = pa.schema([*CLICKS, *(field for field in SALES if field.name != "buyer")])
        work = instantiate_join(Operator("join", spec, (), schema), spec, (CLICKS, SALES), state, EpochTimes(0))
        at_once = work.entries[1](sales(*(("ann", 2, [str(number)]) for number in range(20))))[ONLY]
        assert 50 <= at_once.num_rows < 100
        assert work.flush is not None
        rest = [output[ONLY] for output in work.flush()]
        assert list(work.flush()) == [], "each is emitted once"
    assert max(batch.num_rows for batch in rest) <= 50
    found = {(row["page"], row["tags"][0]) for batch in (at_once, *rest) for row in batch.to_pylist()}
    assert len(found) == at_once.num_rows + sum(batch.num_rows for batch in rest) == 400


# ── late rows, and rows without a partner ─────────────────────────────────────────────────────────────────────────


def test_in_a_window_join_a_row_is_late_if_its_window_has_ended(epochs):
    epochs.run(by_window(10), watermark=20)
    late_left, late_right = clicks(("ann", 19, "late")), sales(("ann", 12, ["late"]))
    found = epochs.run(by_window(10), late_left, late_right, clicks(("ann", 20, "p")), sales(("ann", 20, [])))
    assert found.pop(ONLY) == [pair("ann", 20, "p", 20, [])]
    assert found == {LATE: late_left.to_pylist(), LATE_RIGHT: late_right.to_pylist()}


def test_in_a_within_join_a_row_older_than_the_watermark_is_late(epochs):
    epochs.run(within(5), clicks(("ann", 16, "kept")), watermark=20)
    late = sales(("ann", 19, ["late"]))
    found = epochs.run(within(5), late, sales(("ann", 20, ["in time"])))
    assert found == {ONLY: [pair("ann", 16, "kept", 20, ["in time"])], LATE_RIGHT: late.to_pylist()}


@pytest.mark.parametrize(("spec", "over"), [(by_window(10, How.LEFT), 10), (within(5, How.LEFT), 9)])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_left_row_gets_nulls_as_soon_as_no_partner_can_come(epochs, spec, over, at_once):
    lonely, happy = ("ann", 3, "lonely"), ("bob", 3, "happy")
    first = epochs.run(spec, clicks(lonely, happy), sales(("bob", 4, [])), watermark=over if at_once else over - 1)
    second = epochs.run(spec, watermark=over)
    expected = pair("ann", 3, "lonely", None, None)
    assert first[ONLY] == [pair("bob", 3, "happy", 4, []), *([expected] if at_once else [])]
    assert second == ({} if at_once else {ONLY: [expected]})
    assert epochs.run(spec, watermark=1000) == {}


@pytest.mark.parametrize("spec", [by_window(10, How.LEFT), within(5, How.LEFT)])
def test_a_left_row_with_a_later_partner_gets_no_nulls(epochs, spec):
    epochs.run(spec, clicks(("ann", 3, "a"), ("ann", 3, "b")))
    assert len(epochs.run(spec, sales(("ann", 4, [])))[ONLY]) == 2
    assert epochs.run(spec, watermark=1000) == {}
    assert epochs.stored() == []


@pytest.mark.parametrize("spec", [by_window(10, How.LEFT), within(5, How.LEFT)])
def test_a_partner_in_the_epoch_that_closes_is_in_time(epochs, spec):
    epochs.run(spec, clicks(("ann", 3, "p")))
    assert epochs.run(spec, sales(("ann", 4, [])), watermark=1000) == {ONLY: [pair("ann", 3, "p", 4, [])]}


@pytest.mark.parametrize("spec", [by_window(10, How.LEFT), within(5, How.LEFT)])
def test_rows_of_one_key_and_time_from_several_epochs_all_get_nulls(epochs, spec):
    epochs.run(spec, clicks(("ann", 3, "a")))
    epochs.run(spec, clicks(("ann", 3, "b")))
    found = epochs.run(spec, watermark=1000)[ONLY]
    assert sorted(row["page"] for row in found) == ["a", "b"]


def alone(buyer: str, sold: int, tags: list) -> dict:
    return {"user": buyer, "at": None, "page": None, "sold": moment(sold), "tags": tags}


@pytest.mark.parametrize("spec", [by_window(10, How.FULL), within(5, How.FULL)])
@pytest.mark.parametrize("at_once", [True, False])
def test_in_a_full_join_each_side_waits_and_a_right_row_keeps_its_key(epochs, spec, at_once):
    rows = clicks(("ann", 3, "a"), ("bob", 3, "b")), sales(("bob", 4, []), ("eve", 4, ["x"]))
    found = epochs.run(spec, *rows, watermark=1000 if at_once else None)[ONLY]
    found += epochs.run(spec, watermark=1000).get(ONLY, [])
    assert found == [pair("bob", 3, "b", 4, []), pair("ann", 3, "a", None, None), alone("eve", 4, ["x"])]
    assert epochs.stored() == []


@pytest.mark.parametrize("spec", [by_window(10, How.RIGHT), within(5, How.RIGHT)])
def test_a_right_row_with_a_later_partner_gets_no_nulls(epochs, spec):
    epochs.run(spec, sales(("ann", 4, []), ("eve", 4, [])))
    assert epochs.run(spec, clicks(("ann", 3, "p"), ("bob", 3, "q")))[ONLY] == [pair("ann", 3, "p", 4, [])]
    assert epochs.run(spec, watermark=1000) == {ONLY: [alone("eve", 4, [])]}


def test_a_partner_may_come_longer_after_than_before(epochs):
    spec = Join(("user",), ("buyer",), "at", "sold", How.FULL, within_us=2, after_us=10)
    epochs.run(spec, clicks(("ann", 100, "p")), watermark=90)
    found = epochs.run(spec, sales(*(("ann", at, []) for at in (97, 98, 110, 111))))
    assert sorted(row["sold"] for row in found[ONLY]) == [moment(98), moment(110)]
    assert epochs.run(spec, watermark=99) == {}, "a left row from 99 on may still be a partner of 97, 2 later"
    assert epochs.run(spec, watermark=100) == {ONLY: [alone("ann", 97, [])]}
    assert epochs.run(spec, watermark=113) == {}
    assert epochs.run(spec, watermark=114) == {ONLY: [alone("ann", 111, [])]}
    epochs.run(spec, watermark=1000)
    assert epochs.stored() == [], "panes go when all they could hold is over"


@pytest.mark.parametrize("time", ["at", "sold"])
def test_a_row_without_a_time_is_refused_by_name(epochs, time):
    bad = clicks(("ann", 1, "p"), ("bob", None, "q")) if time == "at" else sales(("ann", 1, []), ("bob", None, []))
    with pytest.raises(OperatorFailed, match=f"event time '{time}' is null") as caught:
        epochs.run(within(5), bad)
    assert caught.value.row[time] is None
    assert "bob" in caught.value.row.values()


def test_a_row_without_a_key_is_refused_by_name(epochs):
    with pytest.raises(OperatorFailed, match="'user' is null") as caught:
        epochs.run(within(5), clicks(("ann", 1, "p"), (None, 2, "q")))
    assert caught.value.row == {"user": None, "at": moment(2), "page": "q"}


# ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_are_over_within_their_epoch_are_never_stored(epochs):
    epochs.run(by_window(10), clicks(("ann", 3, "p")), sales(("bob", 3, [])), watermark=10)
    assert epochs.delta is None


def test_an_idle_epoch_writes_nothing(epochs):
    epochs.run(within(5, How.LEFT), clicks(("ann", 3, "p")), watermark=0)
    epochs.run(within(5, How.LEFT), watermark=1)
    assert epochs.delta is None


def test_one_more_row_for_a_very_frequent_key_costs_little(epochs):
    many = clicks(*(("ann", 1, f"{number:0100}") for number in range(2000)))
    epochs.run(by_window(10), many)
    assert sum(len(value) for _, value in epochs.stored()) > 10 * SEGMENT
    epochs.run(by_window(10), clicks(("ann", 2, "one more")))
    assert epochs.delta is not None
    assert epochs.delta.size < SEGMENT + 3000
    assert len(epochs.run(by_window(10), sales(("ann", 9, [])))[ONLY]) == 2001
    epochs.run(by_window(10), watermark=10)
    assert epochs.stored() == []


def test_a_pane_can_grow_by_segments_over_several_epochs(epochs):
    for part in "abc":
        epochs.run(by_window(10), clicks(*(("ann", 1, f"{part}{number:0100}") for number in range(500))))
    found = epochs.run(by_window(10), sales(("ann", 9, [])))[ONLY]
    assert len({row["page"] for row in found}) == len(found) == 1500


def test_state_with_other_columns_is_refused(epochs):
    epochs.run(within(5), clicks(("ann", 1, "p")))
    with pytest.raises(
        StateError, match=r"join 'join': its state was written with other columns, .* within 6 us.* another name"
    ):
        epochs.run(within(6), clicks(("ann", 1, "p")))


def test_the_format_on_disk_never_changes(epochs):
    codec = RowCodec(parse_ddl("flag boolean, n int, name string, x double"))
    rows = [{"flag": True, "n": 7, "name": "ann", "x": 0.5}, {"flag": None, "n": -1, "name": None, "x": None}]
    encoded = codec.encode(pa.RecordBatch.from_pylist(rows, codec.schema))
    assert encoded.data.hex() == (
        "19000000" "00" "01" "07000000" "000000000000e03f" "03000000" "616e6e"
        "16000000" "0d" "00" "ffffffff" "0000000000000000" "00000000"
    )  # fmt: skip
    epochs.run(within(5, How.LEFT), clicks(("ann", 12, "p")), sales(("bob", 1, [])))
    row = "19000000" "00" "0c00000000000000" "03000000" "01000000" "616e6e" "70"  # fmt: skip
    # Nested columns are Arrow's own messages, which Arrow keeps readable.
    assert {key.hex(): value.hex() for key, value in epochs.stored() if key[1] != Namespace.JOIN_RIGHT} == {
        "8414800000000000000a616e6e": row,
        "8418800000000000000c616e6e": row,
        "841914": "800000000000000a5d829441d41175ac",
        "571915": "800000000000000047a08c334936d415",
    }


def test_nothing_is_read_for_times_later_than_any_pane(epochs, monkeypatch):
    epochs.run(within(5), clicks(("ann", 1, "p")), sales(("ann", 1, [])))
    asked: list[int] = []
    read = Panes.read

    def watched(panes, keys):
        asked.append(len(keys))
        return read(panes, keys)

    monkeypatch.setattr(Panes, "read", watched)
    epochs.run(within(5), clicks(("ann", 100, "p")), sales(("ann", 101, [])))
    assert asked == []
    epochs.run(within(5), clicks(("ann", 100, "p"), ("ann", 101, "p")))
    assert asked == [2]
