"""A join equals nested loops over all rows, however they are sliced, interleaved and spread over epochs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.hashing import bins_of, hash_columns
from midstream.data.schema import joined_schema, parse_ddl
from midstream.data.times import EpochTimes
from midstream.engine.steps import ONLY
from midstream.flow.model import Operator
from midstream.flow.spec import LATE, LATE_RIGHT, How
from midstream.flow.windows import Tumbling
from midstream.ids import BINS, BinId, Epoch, PartitionId, Run
from midstream.operators import join_step as join_module
from midstream.operators.join import Join
from midstream.operators.join_step import instantiate_join
from midstream.state import panes as panes_module
from midstream.state.base import ALL_BINS, Base
from midstream.state.files import Author, StateFiles
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage
from midstream.state.panes import RowCodec
from midstream.state.task import TaskState
from tests.examples import examples

LEFT = parse_ddl("user string, at timestamp, id int, note string")
RIGHT = parse_ddl("rid int, happened timestamp, who string")
NAMESPACES = [namespace for namespace in Namespace if namespace.name.startswith("JOIN_")]
SIDES = (("user", "at", LEFT), ("who", "happened", RIGHT))


@dataclass(frozen=True)
class Step:
    """A slice of one side."""

    side: int
    rows: tuple[tuple[str, int], ...]  # key and time


@dataclass(frozen=True)
class Turn:
    """One epoch: slices in order of arrival, and how far the watermark moves."""

    steps: tuple[Step, ...]
    forward: int | None


rows = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-12, 30)), max_size=6).map(tuple)
steps = st.builds(Step, st.integers(0, 1), rows)
turns = st.builds(Turn, st.lists(steps, max_size=5).map(tuple), st.none() | st.integers(0, 12))
nearness = (
    st.tuples(st.sampled_from([(1, 0), (3, 0), (5, 0), (5, 2), (10, 0), (10, 9)]), st.none(), st.none())
    | st.tuples(st.none(), st.sampled_from([0, 1, 2, 4, 9]), st.none())
    | st.tuples(st.none(), st.sampled_from([0, 2, 4]), st.sampled_from([0, 2, 10]))
)


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    with tempfile.TemporaryDirectory() as folder:
        made = Base(f"{folder}/base", "join", StateFiles(f"{folder}/checkpoint"))
        yield made
        made.close()


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """A few rows fill a segment, and a few pairs fill an output batch."""
    monkeypatch.setattr(panes_module, "SEGMENT", 120)
    monkeypatch.setattr(join_module, "MAX_PAIRS", 4)


@pytest.mark.long
@given(near=nearness, how=st.sampled_from(How), story=st.lists(turns, max_size=5), partitions=st.integers(1, 3))
@examples(40)
def test_a_join_equals_nested_loops(base, near, how, story, partitions):
    window, before, after = near
    spec = Join(("user",), ("who",), "at", "happened", how, window and Tumbling(*window), before, after_us=after)
    # At the end the watermark moves past everything: all waiting rows are emitted, and nothing stays in state.
    story = [*story, Turn((), 10_000)]
    epochs, watermarks = numbered(story)
    found, lineage = run(base, spec, epochs, watermarks, partitions)
    assert found == expected(spec, epochs, watermarks)
    with TaskState(base, lineage, ALL_BINS) as state:
        assert [key for number in ALL_BINS for name in NAMESPACES for key in state.scan(number, name)] == []


# ── the input: numbered rows, and the watermark before and after each epoch ───────────────────────────────────────


def numbered(story):
    number, watermark = 0, None
    epochs, watermarks = [], [None]
    for turn in story:
        epoch = []
        for step in turn.steps:
            epoch.append((step.side, [(key, time, number + index) for index, (key, time) in enumerate(step.rows)]))
            number += len(step.rows)
        epochs.append(epoch)
        if turn.forward is not None:
            watermark = turn.forward - 6 if watermark is None else watermark + turn.forward
        watermarks.append(watermark)
    return epochs, watermarks


# ── the oracle ────────────────────────────────────────────────────────────────────────────────────────────────────


def expected(spec, epochs, watermarks):
    results: list[Counter] = [Counter() for _ in epochs]
    accepted: tuple[list, list] = ([], [])
    for epoch, slices in enumerate(epochs):
        for side, entries in slices:
            for key, time, number in entries:
                if is_late(spec, time, watermarks[epoch]):
                    results[epoch][(LATE, LATE_RIGHT)[side], number, None] += 1
                else:
                    accepted[side].append((key, time, number, epoch))
    for key, time, number, epoch in accepted[0]:
        partners = [(its, when) for other, at, its, when in accepted[1] if other == key and is_near(spec, time, at)]
        for its, when in partners:
            results[max(epoch, when)][ONLY, number, its] += 1
        if not partners and spec.how in (How.LEFT, How.FULL):
            alone(spec, 0, time, epoch, (ONLY, number, None), watermarks, results)
    for key, time, number, epoch in accepted[1]:
        met = any(other == key and is_near(spec, at, time) for other, at, *_ in accepted[0])
        if not met and spec.how in (How.RIGHT, How.FULL):
            alone(spec, 1, time, epoch, (ONLY, None, number), watermarks, results)
    return results


def alone(spec, side, time, epoch, row, watermarks, results):
    """The row comes out in the first epoch after which no partner can come."""
    given_up = [when for when in range(epoch, len(results)) if is_over(spec, side, time, watermarks[when + 1])]
    if given_up:
        results[given_up[0]][row] += 1


def reach_of(spec):
    """How long before and how long after the left row the right one may be."""
    return spec.within_us, spec.within_us if spec.after_us is None else spec.after_us


def is_near(spec, left, right):
    if spec.window is not None:
        return window_end(spec, left) == window_end(spec, right)
    before, after = reach_of(spec)
    return left - before <= right <= left + after


def is_late(spec, time, watermark):
    if watermark is None:
        return False
    return window_end(spec, time) <= watermark if spec.window is not None else time < watermark


def is_over(spec, side, time, watermark):
    if watermark is None:
        return False
    if spec.window is not None:
        return window_end(spec, time) <= watermark
    return time + reach_of(spec)[1 - side] < watermark


def window_end(spec, time):
    size, offset = spec.window.size_us, spec.window.offset_us
    return ((time - offset) // size + 1) * size + offset


# ── the join, with one task per partition, each epoch on the state that the previous one committed ────────────────


def run(base, spec, epochs, watermarks, partitions):
    lineage = Lineage.start("join")
    results = []
    for epoch, slices in enumerate(epochs):
        deltas: list = []
        result: Counter = Counter()
        times = EpochTimes(0, watermarks[epoch], watermarks[epoch + 1])
        for partition in range(partitions):
            bins = [BinId(number) for number in range(BINS) if number % partitions == partition]
            with TaskState(base, lineage, bins) as state:
                work = instantiate_join(Operator("join", spec, (), joined(spec.how)), spec, (LEFT, RIGHT), state, times)
                for side, entries in slices:
                    result += counted(work.entries[side](batch_of(side, entries, set(bins))))
                assert work.flush is not None
                assert work.finish is not None
                for output in (*work.flush(), *work.finish()):
                    result += counted(output)
                delta = state.write_delta(Author("join", Epoch(epoch), Run(0), PartitionId(partition), 0))
                deltas += [delta] if delta is not None else []
        lineage = lineage.after(Epoch(epoch), deltas)
        results.append(result)
    return results, lineage


def batch_of(side, entries, bins):
    key, time, schema = SIDES[side]
    number = ("id", "rid")[side]
    rows = [{key: name, time: moment(at), number: its, "note": note(its)} for name, at, its in entries]
    batch = pa.RecordBatch.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema)
    return batch.filter(pa.array([found in bins for found in bins_of(hash_columns(batch, [key])).tolist()], pa.bool_()))


def counted(outputs):
    """The rows of each output; their values must be those of the input."""
    result: Counter = Counter()
    for branch, batch in outputs.items():
        assert batch.num_rows
        for row in batch.to_pylist():
            if branch == LATE_RIGHT:
                result[branch, row["rid"], None] += 1
                continue
            assert row["note"] == (None if row["id"] is None else note(row["id"]))
            result[branch, row["id"], row.get("rid")] += 1
            assert (row.get("happened") is None) == (row.get("rid") is None)
            assert (row["at"] is None) == (row["id"] is None)
            assert row["user"] is not None
    return result


def joined(how):
    return joined_schema(LEFT, RIGHT, {"who": "user"}, "join", keeps_left=how.keeps_left, keeps_right=how.keeps_right)


def note(number):
    return None if number % 3 == 0 else "x" * (number % 7)


def moment(time):
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)


# ── rows as bytes ─────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "decimal(20,2)": st.decimals(-(10**9), 10**9, places=2).map(Decimal),
    "string": st.text(max_size=5),
    "binary": st.binary(max_size=5),
    "date": st.dates(),
    "timestamp": st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
    "timestamp_ntz": st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)),
    "array<string>": st.lists(st.none() | st.text(max_size=3), max_size=3),
    "struct<a: int, b: array<int>>": st.fixed_dictionaries({"a": st.none() | st.integers(0, 9), "b": st.just([1])}),
}


@st.composite
def batches(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=10))
    schema = parse_ddl(", ".join(f"c{index} {kind}" for index, kind in enumerate(kinds)))
    row = st.tuples(*(st.none() | COLUMNS[kind] for kind in kinds))
    found = draw(st.lists(row, max_size=12))
    columns = [pa.array([row[index] for row in found], field.type) for index, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@pytest.mark.long
@given(batches(), st.lists(st.integers(0, 12)), st.integers(0, 3))
def test_rows_are_decoded_from_bytes_cut_at_any_row(batch, cuts, skipped):
    codec = RowCodec(batch.schema)
    batch = batch.slice(skipped)
    encoded = codec.encode(batch)
    bounds = sorted({0, batch.num_rows, *(cut for cut in cuts if cut < batch.num_rows)})
    ranges = list(zip(bounds, [*bounds[1:], batch.num_rows], strict=True))
    offsets = encoded.offsets
    found, counts = codec.decode([encoded.data[offsets[start] : offsets[stop]] for start, stop in ranges])
    assert found.equals(batch)
    assert counts.tolist() == [stop - start for start, stop in ranges]
