"""Frames: rows are decoded as they were encoded, and Spark sees only a header and bytes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from midstream.data.schema import parse_ddl
from midstream.engine.frames import (
    FRAME_ORDER,
    FRAME_SCHEMA,
    FrameKind,
    Header,
    decode_rows,
    encode_rows,
    frame,
)
from midstream.ids import PartitionId, Revision, WireId
from tests.frames import headers, payloads


def header(dest: int = 1, wire: int = 2, revision: int = 3, src: int = 4, seq: int = 5, rows: int = 6) -> Header:
    return Header(PartitionId(dest), WireId(wire), Revision(revision), PartitionId(src), seq, rows)


EVERY_KIND = pa.RecordBatch.from_pylist(
    [
        {"n": 1, "s": "é🙂", "d": None, "a": ["x", None], "m": [("k", 1)], "t": {"x": 1, "y": None}, "b": b"\x00"},
        {"n": None, "s": "", "d": 1.5, "a": [], "m": None, "t": None, "b": b""},
    ],
    schema=parse_ddl(
        "n bigint, s string, d double, a array<string>, m map<string,int>, t struct<x: int, y: string>, b binary"
    ),
)


@pytest.mark.parametrize(
    "rows",
    [
        EVERY_KIND,
        EVERY_KIND.slice(1),  # rows before the offset must not be sent
        EVERY_KIND.slice(0, 0),
        pa.record_batch({"k": pa.array(["a", "b", "a"]).dictionary_encode()}),
        pa.RecordBatch.from_arrays(
            [pa.array([1], pa.int64())], schema=pa.schema([pa.field("n", pa.int64(), nullable=False)])
        ),
    ],
)
def test_rows_survive_the_round_trip_with_their_schema(rows):
    found = decode_rows(encode_rows(rows))
    found.validate(full=True)
    assert found.schema == rows.schema
    assert found.to_pylist() == rows.to_pylist()


def test_a_slice_is_encoded_without_the_rest_of_its_batch():
    large = pa.record_batch({"s": ["x" * 1000] * 1000})
    assert encode_rows(large.slice(0, 1)).size < 10_000


def test_a_frame_is_one_row_of_the_exchange():
    payload = encode_rows(EVERY_KIND)
    one = frame(header(), payload)
    one.validate(full=True)
    assert one.schema == FRAME_SCHEMA
    assert one.num_rows == 1
    assert headers(one) == [header()]
    assert headers(one)[0].kind is FrameKind.ROWS
    assert decode_rows(payloads(one)[0]).equals(EVERY_KIND)


def test_many_frames_keep_their_order_and_their_payloads():
    batches = [pa.record_batch({"n": list(range(i))}) for i in range(5)]
    frames = pa.concat_batches([frame(header(seq=i, rows=i), encode_rows(batch)) for i, batch in enumerate(batches)])
    assert [each.seq for each in headers(frames)] == [0, 1, 2, 3, 4]
    assert [decode_rows(payload).num_rows for payload in payloads(frames)] == [0, 1, 2, 3, 4]
    assert headers(frames[2:4]) == headers(frames)[2:4]
    assert [decode_rows(payload).num_rows for payload in payloads(frames[2:4])] == [2, 3]


def test_an_empty_batch_has_no_frames():
    empty = FRAME_SCHEMA.empty_table().combine_chunks()
    batch = pa.RecordBatch.from_arrays([column.combine_chunks() for column in empty.columns], schema=FRAME_SCHEMA)
    assert headers(batch) == []
    assert payloads(batch) == []


def test_a_payload_is_framed_without_a_copy_and_read_aligned():
    payload = encode_rows(EVERY_KIND)
    one = frame(header(), payload)
    assert one.column("payload").buffers()[2].address == payload.address
    odd = pa.concat_batches([frame(header(), pa.py_buffer(b"x")), one])  # pushes the second payload to an odd address
    assert [each.address % 8 for each in payloads(odd)] == [0, 0]


def test_frames_sort_by_revision_then_sender_then_number():
    assert FRAME_ORDER == ("revision", "src", "seq")
    assert set(FRAME_ORDER) <= set(FRAME_SCHEMA.names)


def test_an_unknown_frame_kind_is_an_error():
    one = frame(header(), encode_rows(EVERY_KIND))
    strange = one.set_column(
        FRAME_SCHEMA.get_field_index("kind"), FRAME_SCHEMA.field("kind"), pa.array([99], pa.int8())
    )
    with pytest.raises(ValueError, match="99 is not a valid FrameKind"):
        headers(strange)


def test_rows_without_a_payload_are_fillers_not_frames():
    one = frame(header(), encode_rows(EVERY_KIND))
    filler = one.set_column(one.schema.get_field_index("payload"), "payload", pa.nulls(1, pa.binary()))
    spaced = pa.concat_batches([filler, one, filler, filler, one, filler])
    assert headers(spaced) == [header(), header()]
    assert [decode_rows(payload).equals(EVERY_KIND) for payload in payloads(spaced)] == [True, True]
