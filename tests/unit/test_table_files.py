"""Files of a table: what is written is read back equal, by plain readers, whatever the format and its options."""

from __future__ import annotations

import datetime as dt
import decimal
import errno
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as papq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.json_lines import json_lines
from midstream.engine.file_outlets import FileOutlets
from midstream.errors import CheckpointError, FlowError, OperatorFailed, SchemaError
from midstream.flow.spec import SinkTable
from midstream.ids import Epoch, PartitionId, WireId
from midstream.storage import table_files
from midstream.storage.disk import Unsynced
from midstream.storage.table_files import SinkFile, TableFiles, epochs_of
from midstream.storage.table_format import TableFormat
from tests.examples import examples
from tests.power_loss import Recorder, Synced

NOON = dt.datetime(2026, 11, 16, 12, tzinfo=dt.UTC)
ROWS = pa.record_batch(
    {
        "user": ["ann", "bob", None, "ann"],
        "amount": [1.0, 2.5, None, -3.0],
        "at": pa.array([NOON, None, NOON, NOON], pa.timestamp("us", "UTC")),
    }
)


def writer(folder: Path, format: str = "parquet", schema: pa.Schema = ROWS.schema, **more: Any) -> TableFiles:
    options = more.pop("options", {})
    given: dict[str, Any] = {"epoch": 7, "partition": 1, "attempt": "7.0-1-5", **more}
    return TableFiles(
        pafs.LocalFileSystem(), str(folder), TableFormat.of(format, options), schema, unsynced=Unsynced(), **given
    )


def written(files: TableFiles, *batches: pa.RecordBatch) -> tuple[SinkFile, ...]:
    for batch in batches:
        files.write(batch)
    return files.finish()


def with_epoch(rows: pa.RecordBatch, epoch: int = 7) -> list[dict[str, Any]]:
    return [{**row, "epoch": epoch} for row in rows.to_pylist()]


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "lz4"])
def test_parquet_files_return_the_rows_that_were_written(tmp_path, codec):
    [file] = written(writer(tmp_path, options={"compression": codec}), ROWS)
    assert papq.read_table(tmp_path / file.staged).to_pylist() == with_epoch(ROWS)
    assert file.rows == 4
    assert file.size == (tmp_path / file.staged).stat().st_size


def test_csv_files_return_the_rows_that_were_written(tmp_path):
    [file] = written(writer(tmp_path, "csv", options={"header": True, "sep": ";"}), ROWS)
    found = pacsv.read_csv(
        tmp_path / file.staged,
        parse_options=pacsv.ParseOptions(delimiter=";"),
        convert_options=pacsv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False),
    )
    assert found.select(["user", "amount", "epoch"]).to_pylist() == [
        {"user": row["user"], "amount": row["amount"], "epoch": 7} for row in ROWS.to_pylist()
    ]


def test_json_omits_nulls_unless_configured_otherwise(tmp_path):
    [file] = written(writer(tmp_path, "json", options={"compression": "gzip"}), ROWS)
    assert file.name.endswith(".json.gz")
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / file.staged).read_bytes()).splitlines()]
    assert lines[2] == {"at": "2026-11-16T12:00:00.000000Z", "epoch": 7}
    [file] = written(writer(tmp_path, "json", options={"ignoreNullFields": False}), ROWS)
    lines = [json.loads(line) for line in (tmp_path / file.staged).read_text().splitlines()]
    assert lines[2] == {"user": None, "amount": None, "at": "2026-11-16T12:00:00.000000Z", "epoch": 7}


VALUES = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(),
        "whole": st.none() | st.integers(-(2**63), 2**63 - 1),
        "real": st.none() | st.floats(),
        "truth": st.none() | st.booleans(),
        "exact": st.none() | st.decimals(min_value=-(10**6), max_value=10**6, places=2),
        "list": st.none() | st.lists(st.none() | st.floats() | st.integers(0, 9).map(float), max_size=3),
        "struct": st.none() | st.fixed_dictionaries({"a": st.none() | st.text(max_size=3)}),
        'a "name"\n': st.none() | st.integers(0, 9),
    }
)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("whole", pa.int64()),
        ("real", pa.float64()),
        ("truth", pa.bool_()),
        ("exact", pa.decimal128(10, 2)),
        ("list", pa.list_(pa.float64())),
        ("struct", pa.struct([("a", pa.string())])),
        ('a "name"\n', pa.int64()),
    ]
)


def as_json(value: Any) -> Any:
    """What a value becomes in JSON: the oracle, one value at a time."""
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case decimal.Decimal():
            return float(value)
        case dict():
            return {key: as_json(each) for key, each in value.items() if each is not None}
        case list():
            return [as_json(each) for each in value]
        case _:
            return value


@examples(60)
@given(st.lists(VALUES, max_size=6))
def test_json_lines_are_what_the_json_module_reads(rows):
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    lines = json_lines(batch).to_pybytes().decode().split("\n")[:-1]
    assert [json.loads(line) for line in lines] == [as_json(row) for row in batch.to_pylist()]


def test_whole_floats_stay_floats():
    batch = pa.record_batch({"x": [1.0, 1e300, -0.0]})
    assert json_lines(batch).to_pybytes() == b'{"x":1.0}\n{"x":1e+300}\n{"x":-0.0}\n'


def test_partition_columns_become_folders(tmp_path):
    files = written(writer(tmp_path, partition_by=["user"]), ROWS)
    for file in files:
        (tmp_path / file.name).parent.mkdir(exist_ok=True)
        (tmp_path / file.staged).rename(tmp_path / file.name)
    table = ds.dataset(tmp_path, partitioning="hive", exclude_invalid_files=True).to_table()
    found = sorted(table.to_pylist(), key=lambda row: (str(row["user"]), str(row["amount"])))
    expected = sorted(with_epoch(ROWS), key=lambda row: (str(row["user"]), str(row["amount"])))
    assert found == expected


def test_a_folder_name_is_quoted(tmp_path):
    rows = pa.record_batch({"key": ["a/b", "x=y", "é", ""], "n": [1, 2, 3, 4]})
    files = written(writer(tmp_path, schema=rows.schema, partition_by=["key"]), rows)
    assert {Path(file.name).parent.name for file in files} == {
        "key=a%2Fb",
        "key=x%3Dy",
        "key=%C3%A9",
        f"key={table_files.NULL_FOLDER}",
    }


def test_few_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "OPEN_FILES", 3)
    rows = pa.record_batch({"key": [str(i % 10) for i in range(100)], "n": list(range(100))})
    files = written(writer(tmp_path, schema=rows.schema, partition_by=["key"]), rows, rows)
    assert sum(file.rows for file in files) == 200
    assert len({file.name for file in files}) == len(files) > 10
    assert sorted(n for file in files for n in papq.read_table(tmp_path / file.staged)["n"].to_pylist()) == sorted(
        2 * list(range(100))
    )


@pytest.mark.parametrize("partition_by", [[], ["key"]])
@pytest.mark.parametrize("most", [1, 7, 20, 1000])
def test_a_file_has_no_more_rows_than_wanted(tmp_path, most, partition_by):
    rows = pa.record_batch({"key": [str(i % 2) for i in range(50)], "n": list(range(50))})
    files = writer(
        tmp_path, schema=rows.schema, partition_by=partition_by, options={"rows_per_file": most, "compression": "zstd"}
    )
    done = written(files, rows.slice(0, 1), rows.slice(1, 33), rows.slice(34))
    assert [papq.read_metadata(tmp_path / file.staged).num_rows for file in done] == [file.rows for file in done]
    assert max(file.rows for file in done) <= most
    folders = len(partition_by) + 1
    assert len({file.name for file in done}) == len(done) == folders * -(-50 // folders // most)
    found = [n for file in done for n in papq.read_table(tmp_path / file.staged)["n"].to_pylist()]
    assert found == list(range(50)) if not partition_by else sorted(found) == list(range(50))


def test_without_rows_no_file_is_written(tmp_path):
    assert written(writer(tmp_path), ROWS.slice(0, 0)) == ()
    assert list(tmp_path.iterdir()) == []


def test_an_aborted_task_leaves_nothing(tmp_path):
    files = writer(tmp_path, partition_by=["user"])
    files.write(ROWS)
    files.abort()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = writer(tmp_path)
    monkeypatch.setattr(papq.ParquetWriter, "write_batch", full)
    with pytest.raises(CheckpointError, match=r"epoch 7 cannot be written to .*No space left.*Nothing of this epoch"):
        written(files, ROWS)
    files.abort()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def outlets_of(folder, sinks=3):
    tables = {f"sink {i}": SinkTable(str(folder / str(i)), TableFormat.of("parquet", {})) for i in range(sinks)}
    return FileOutlets(
        {WireId(0): tables}, {WireId(0): ROWS.schema}, epoch=Epoch(7), partition=PartitionId(1), durable=True
    )


def test_the_files_of_all_sinks_of_a_task_are_synced_when_it_finishes_and_not_before(tmp_path):
    recorder = Recorder()
    with recorder.recording():
        outlets = outlets_of(tmp_path)
        outlets.write(WireId(0), ROWS)
        written = len(recorder.operations)
        files = [tmp_path / str(i) / file.staged for i, [file] in enumerate(outlets.finish().values())]
    content = [Synced(str(file), is_folder=False) for file in files]
    names = [Synced(str(file.parent), is_folder=True) for file in files]
    assert not set(content) & set(recorder.operations[:written])
    assert set(recorder.operations[written:]) == {*content, *names}
    assert len(recorder.operations[written:]) == 6, "each once"


def test_without_durability_nothing_is_synced(tmp_path):
    recorder = Recorder()
    with recorder.recording():
        files = writer(tmp_path, durable=False)
        unsynced = files._unsynced
        written(files, ROWS)
    assert not unsynced
    assert not any(isinstance(each, Synced) for each in recorder.operations)


def test_a_disk_that_fills_at_the_sync_is_a_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_: Unsynced) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outlets = outlets_of(tmp_path)
    outlets.write(WireId(0), ROWS)
    monkeypatch.setattr(Unsynced, "sync", full)
    with pytest.raises(OperatorFailed, match=r"epoch 7 cannot be synced to disk: .*No space left.*Nothing of this"):
        outlets.finish()
    outlets.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_name_of_a_file_has_its_epochs():
    assert epochs_of("epoch-0000000007-0000000009-merged-0.parquet") == (7, 9)
    assert [epochs_of(name) for name in ("_committed.json", "part-0.parquet", "epoch-x-y-z-0.csv")] == [None] * 3


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("orc", {}, "format 'orc' is not known; allowed: parquet, json, csv"),
        ("csv", {"headers": True}, "csv has no option 'headers'; did you mean 'header'"),
        ("parquet", {"header": True}, "parquet has no option 'header'.*Allowed: compression"),
        ("csv", {"header": "maybe"}, "header='maybe' is neither True nor False"),
        ("csv", {"sep": ";", "delimiter": ";"}, "'sep' and 'delimiter' are the same option"),
        ("csv", {"sep": "||"}, r"sep='\|\|' cannot separate columns"),
        ("json", {"compression": "snappy"}, "json files with compression='snappy' are not possible; allowed: none"),
        ("parquet", {"compression": "snappy", "compression_level": 3}, "compression_level=3, but snappy has no levels"),
        ("parquet", {"compression": "zstd", "compression_level": 30}, "zstd has levels 1 to 22"),
        ("csv", {"rows_per_file": "many"}, "rows_per_file='many' is not a whole number from 1"),
        ("json", {"rows_per_file": 5, "maxRecordsPerFile": 6}, "'rows_per_file' and 'maxRecordsPerFile' are the same"),
        ("parquet", {"rows_per_group": 0}, "rows_per_group=0 is not a whole number from 1"),
    ],
)
def test_invalid_options_are_refused(format, options, message):
    with pytest.raises(FlowError, match=message):
        TableFormat.of(format, options)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.binary()])
def test_csv_refuses_types_that_it_cannot_hold(kind):
    with pytest.raises(SchemaError, match=r"sink 'out': column 'x' is .*, which csv cannot hold"):
        TableFormat.of("csv", {}).check(pa.schema([("x", kind)]), "sink 'out'")
    TableFormat.of("json", {}).check(pa.schema([("x", kind)]), "sink 'out'")
