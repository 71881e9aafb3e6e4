"""A source for tables of Delta Lake: what it reads of which version, and what it refuses."""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import DeltaSink, DeltaSource, Flow, ListSource, MemorySink
from midstream.errors import MidstreamError, SchemaError, SetupError, SourceError
from midstream.flow.delta_source import TablePosition, advance, files_between
from midstream.storage.delta_log import DataFile
from midstream.testing import run_local

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'midstream[delta]'")


def put(lake: Path, *numbers: int, **options: Any) -> None:
    table = pa.table({"n": pa.array(numbers, pa.int64()), "name": [f"no. {n}" for n in numbers]})
    deltalake.write_deltalake(lake, table, **{"mode": "append", **options})


def read(source: DeltaSource) -> dict[int, list[Any]]:
    """The numbers of each epoch."""
    flow, out = Flow("read"), MemorySink()
    flow.source("lake", source).sink("out", out)
    run_local(flow)
    return {epoch: sorted(table.column("n").to_pylist()) for epoch, table in out.tables.items() if table.num_rows}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


# ── positions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(30))
def test_epochs_cut_the_files_of_all_versions_without_gaps_and_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    first, whole = rng.randrange(3), rng.random() < 0.5
    files = {v: [DataFile(f"{v}-{i}", {}) for i in range(rng.choice((0, 1, 4)))] for v in range(first, first + 6)}

    def files_of(at: TablePosition) -> Sequence[DataFile]:
        assert at.version >= first
        return files[at.version]

    at = begun = TablePosition(whole, first, first)
    read: list[DataFile] = []
    for newest in range(first, first + 6):
        while True:
            most = rng.choice((None, 1, 2, 3))
            end = advance(at, newest, most, files_of)
            taken = files_between(at, end, files_of)
            assert most is None or len(taken) <= most
            if end == at:
                break
            read += taken
            at = TablePosition.of(json.loads(json.dumps(end.offset)))
        assert read == [file for v in range(first, newest + 1) for file in files[v]]
    # After a crash in the first epoch, Spark's log has only its end, and the table may have gone on.
    assert files_between(TablePosition(not whole, first + 9, first + 9), at, files_of) == read
    assert at.beginning == begun


# ── what is read ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_whole_table_is_read_first_and_then_what_versions_add(lake: Path) -> None:
    for numbers in ((1, 2), (3,), (4,)):
        put(lake, *numbers)
    deltalake.DeltaTable(lake).delete("n = 2")
    assert read(DeltaSource(lake)) == {0: [1, 3, 4]}
    assert read(DeltaSource(lake, max_files_per_epoch=1, partitions=3)).keys() == {0, 1, 2}
    assert read(DeltaSource(lake, starting_version="latest")) == {}
    put(lake, 5)
    assert read(DeltaSource(lake, starting_version=4)) == {0: [5]}
    assert read(DeltaSource(lake, starting_version=1, changes="skip")) == {0: [3, 4, 5]}


def test_compaction_is_not_seen(lake: Path) -> None:
    for n in range(4):
        put(lake, n)
    assert deltalake.DeltaTable(lake).optimize.compact()["numFilesRemoved"] == 4
    put(lake, 4)
    assert read(DeltaSource(lake)) == {0: [0, 1, 2, 3, 4]}
    assert read(DeltaSource(lake, starting_version=0)) == {0: [0, 1, 2, 3, 4]}


def update(table: Any) -> None:
    table.update(updates={"n": "100"}, predicate="n = 1")


def delete(table: Any) -> None:
    table.delete("n = 1")


def overwrite(table: Any) -> None:
    deltalake.write_deltalake(table, pa.table({"n": [7], "name": ["seven"]}), mode="overwrite")


def merge(table: Any) -> None:
    rows = pa.table({"n": [1], "name": ["one"]})
    merger = table.merge(rows, "s.n = t.n", source_alias="s", target_alias="t")
    merger.when_matched_update_all().when_not_matched_insert_all().execute()


@pytest.mark.parametrize("change", [update, delete, overwrite, merge])
def test_a_version_that_removes_rows_fails_the_job_or_is_skipped(lake: Path, change: Any) -> None:
    put(lake, 1, 2)
    change(deltalake.DeltaTable(lake))
    put(lake, 3)
    with pytest.raises(MidstreamError, match=r"version 1 of the table removes or replaces rows.*changes='skip'"):
        read(DeltaSource(lake, starting_version=0))
    assert read(DeltaSource(lake, starting_version=0, changes="skip")) == {0: [1, 2, 3]}


TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "yes": (pa.bool_(), [True, False]),
    "tiny": (pa.int8(), [-128, 127]),
    "small": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int": (pa.int32(), [-(2**31), 2**31 - 1]),
    "large": (pa.int64(), [-(2**63), 2**63 - 1]),
    "single": (pa.float32(), [0.5, -1.5]),
    "real": (pa.float64(), [0.1, -2.5]),
    "text": (pa.string(), ["a/b %20=c", "日本 🙂"]),
    "day": (pa.date32(), [date(1, 1, 1), date(2026, 2, 28)]),
    "moment": (
        pa.timestamp("us", "UTC"),
        [datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(1969, 1, 1, tzinfo=UTC)],
    ),
    "clock": (pa.timestamp("us"), [datetime(2026, 1, 2, 3, 4, 5), datetime(1999, 12, 31, 23, 59, 59, 999999)]),
    "price": (pa.decimal128(38, 2), [Decimal("1.10"), Decimal("9" * 36 + ".99")]),
    "bytes": (pa.binary(), [b"a", b"xyz"]),
    "tags": (pa.list_(pa.string()), [["a", None], []]),
    "place": (pa.struct({"lat": pa.float64(), "name": pa.string()}), [{"lat": 1.5, "name": None}, None]),
    "scores": (pa.map_(pa.string(), pa.int32()), [[("a", 1)], []]),
}


@pytest.mark.parametrize(
    "by",
    [None, ["yes", "large", "text", "day", "moment"], ["tiny", "small", "int", "single", "real", "clock", "price"]],
)
@pytest.mark.parametrize("starting_version", [None, 0])
def test_every_type_is_read_as_it_was_written(lake: Path, by: list[str] | None, starting_version: int | None) -> None:
    columns = {name: pa.array([*values, None], kind) for name, (kind, values) in TYPES.items()}
    wanted = pa.table({"n": pa.array([0, 1, 2], pa.int64()), **columns})
    deltalake.write_deltalake(lake, wanted, partition_by=by)
    flow, out = Flow("types"), MemorySink()
    flow.source("lake", DeltaSource(lake, starting_version=starting_version)).sink("out", out)
    run_local(flow)
    found = pa.concat_tables(out.tables.values()).sort_by("n")
    assert {name: found.column(name).to_pylist() for name in found.column_names} == wanted.to_pydict()


def test_columns_are_those_of_the_newest_version_and_null_where_a_file_lacks_them(lake: Path) -> None:
    put(lake, 1)
    added = pa.table({"n": [2], "size": [0.5]})
    deltalake.write_deltalake(lake, added, mode="append", schema_mode="merge")
    source = DeltaSource(lake, starting_version=0)
    flow, out = Flow("columns"), MemorySink()
    flow.source("lake", source).sink("out", out)
    run_local(flow)
    rows = sorted(out.rows, key=lambda row: row["n"])
    assert rows == [{"n": 1, "name": "no. 1", "size": None}, {"n": 2, "name": None, "size": 0.5}]
    more = pa.table({"n": [3], "colour": ["red"]})
    deltalake.write_deltalake(lake, more, mode="append", schema_mode="merge")
    run_local(flow)  # built before: it does not have the new column
    assert max(out.rows, key=lambda row: row["n"]) == {"n": 3, "name": None, "size": None}


def test_the_description_of_a_source_takes_its_columns_and_place_along(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(lake, 1)
    monkeypatch.chdir(lake.parent)
    packed = pickle.dumps(DeltaSource("lake"))
    monkeypatch.chdir("/")
    found = pickle.loads(packed)
    lake.rename(lake.with_name("moved"))
    assert (found.location, found.schema.names) == (str(lake), ["n", "name"])


def test_what_a_job_wrote_is_read_by_another(lake: Path) -> None:
    flow = Flow("write")
    epochs = [[{"n": 10 * epoch + i} for i in range(3)] for epoch in range(4)]
    flow.source("in", ListSource(epochs, "n bigint")).sink("lake", DeltaSink(lake))
    run_local(flow)
    found = read(DeltaSource(lake, starting_version=0, max_files_per_epoch=1))
    assert list(found.values()) == [[row["n"] for row in rows] for rows in epochs]


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "the path is empty"),
        ({"starting_version": -1}, "starting_version is -1"),
        ({"starting_version": True}, "starting_version is True"),
        ({"starting_version": "newest"}, "starting_version is 'newest'.*'latest'"),
        ({"changes": "ignore"}, "changes is 'ignore'; allowed: 'refuse', 'skip'"),
        ({"max_files_per_epoch": 0}, "max_files_per_epoch is 0"),
        ({"partitions": 1.5}, "partitions is 1.5"),
        ({"storage_options": {"key": 1}}, "storage_options has 'key': int; give texts only"),
    ],
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        DeltaSource(**{"path": "lake", **options})


def assert_refused(source: DeltaSource, says: str, error: type[Exception] = SourceError) -> None:
    with pytest.raises(error, match=says):
        read(source)


def test_tables_that_cannot_be_read_are_refused(lake: Path, tmp_path: Path) -> None:
    assert_refused(DeltaSource(lake), "lake' cannot be read")
    put(lake, 1)
    assert_refused(
        DeltaSource(lake, starting_version=5), "starting_version is 5, and the newest version of the table is 0"
    )
    put(lake, 2)
    commit = lake / "_delta_log" / f"{1:020}.json"
    put(lake, 3)
    deltalake.DeltaTable(lake).create_checkpoint()
    kept = commit.read_bytes()
    commit.unlink()
    assert_refused(DeltaSource(lake, starting_version=0), "version 1 of the table .* is no longer in its log")
    commit.write_bytes(kept[:50])
    assert_refused(DeltaSource(lake, starting_version=0), "version 1 of the table .* cannot be read")
    commit.write_bytes(kept)
    next(lake.glob("*.parquet")).unlink()
    assert_refused(DeltaSource(lake, starting_version=0), "is gone, so its rows cannot be read: the table was vacuumed")


def test_a_column_of_another_type_is_refused(lake: Path) -> None:
    put(lake, 1)
    source = DeltaSource(lake)
    assert source.schema.field("n").type == pa.int64()
    other = pa.table({"n": ["one"], "name": ["one"]})
    deltalake.write_deltalake(lake, other, mode="overwrite", schema_mode="overwrite")
    assert_refused(
        DeltaSource(lake, starting_version=0), "with version 0 column 'n' is bigint, and .* string", SchemaError
    )


@pytest.mark.parametrize(
    ("feature", "mode"), [("deletionVectors", "none"), ("columnMapping", "none"), ("timestampNtz", "name")]
)
def test_tables_whose_files_are_not_what_they_hold_are_refused(lake: Path, feature: str, mode: str) -> None:
    """Already when the flow is built; and when a version asks for it later."""
    put(lake, 1)
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature], "writerFeatures": [feature]}
    first = (lake / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    [about] = [entry["metaData"] for line in first if "metaData" in (entry := json.loads(line))]
    about["configuration"] = {"delta.columnMapping.mode": mode}
    lines = [json.dumps({"protocol": protocol}), json.dumps({"metaData": about})]
    source = DeltaSource(lake, starting_version=0)
    assert source.schema.names == ["n", "name"], "it was read before the version came"
    (lake / "_delta_log" / f"{1:020}.json").write_text("\n".join(lines))
    says = "columnMapping" if mode == "name" else feature
    assert_refused(source, f"has {says}, with which its files are not what it holds")
    assert_refused(DeltaSource(lake), f"has {says}, with which its files are not what it holds")


def test_without_the_package_a_flow_says_what_to_install(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    assert_refused(DeltaSource(lake), r"pip install 'midstream\[delta\]'", SetupError)
