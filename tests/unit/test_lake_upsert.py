"""Upserts into tables of Delta Lake and Iceberg replace by key, and an epoch that runs again undoes its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

from midstream import DeltaSink, Flow, IcebergSink, ListSource
from midstream.errors import CheckpointError, FlowError, JobFailed, SchemaError
from midstream.ids import Epoch
from midstream.runtime.owned_tables import LakeSink
from midstream.runtime.table_claims import check_tables, claim_tables, replace_epoch
from midstream.testing import run_local
from tests.lakes import Warehouse
from tests.sink_flows import flow_to

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'midstream[delta]'")

DDL = "k string, n bigint"
JOB = "job one"


class Lake(Protocol):
    """A table to upsert into."""

    def sink(self, **options: Any) -> LakeSink:
        """A sink for the table; an upsert by k unless said otherwise."""

    def make(self, rows: pa.Table) -> None:
        """Make the table, or add rows of somebody else."""

    def rows(self) -> list[dict[str, Any]]:
        """What the table holds."""

    def commits(self) -> int:
        """How often it was changed."""

    def tidy(self) -> None:
        """Compact it, as another writer may."""


class InDelta:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "out"

    def sink(self, **options: Any) -> DeltaSink:
        return DeltaSink(self._path, **{"mode": "upsert", "key": "k", **options})

    def partitioned_by_n(self) -> DeltaSink:
        return self.sink(partition_by="n")

    def make(self, rows: pa.Table) -> None:
        deltalake.write_deltalake(self._path, rows, mode="append", schema_mode="merge")

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = deltalake.DeltaTable(self._path).to_pyarrow_table().to_pylist()
        return found

    def commits(self) -> int:
        return int(deltalake.DeltaTable(self._path).version())

    def tidy(self) -> None:
        deltalake.DeltaTable(self._path).optimize.compact()

    def lose_the_past(self) -> None:
        deltalake.DeltaTable(self._path).vacuum(0, dry_run=False, enforce_retention_duration=False)


class InIceberg:
    def __init__(self, house: Warehouse) -> None:
        self._house = house
        house.catalog.create_namespace("sales")

    @property
    def _table(self) -> Any:
        return self._house.table("sales.out")

    def sink(self, **options: Any) -> IcebergSink:
        return self._house.sink("sales.out", **{"mode": "upsert", "key": "k", **options})

    def partitioned_by_n(self) -> IcebergSink:
        table = self._house.catalog.create_table("sales.out", pa.schema([("k", pa.string()), ("n", pa.int64())]))
        with table.update_spec() as spec:
            spec.add_identity("n")
        return self.sink()

    def make(self, rows: pa.Table) -> None:
        self._house.catalog.create_table_if_not_exists("sales.out", rows.schema).append(rows)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._table.scan().to_arrow().to_pylist()
        return found

    def commits(self) -> int:
        return len(self._table.metadata.metadata_log)

    def tidy(self) -> None:
        table = self._table
        if (rows := table.scan().to_arrow()).num_rows:
            table.overwrite(rows)
        table = self._table
        keep = {ref.snapshot_id for ref in table.metadata.refs.values()}
        table.maintenance.expire_snapshots().by_ids(
            [each.snapshot_id for each in table.snapshots() if each.snapshot_id not in keep]
        ).commit()

    def lose_the_past(self) -> None:
        with self._table.manage_snapshots() as tags:
            tags.remove_tag("midstream-before-out0")
        self.tidy()


@pytest.fixture(params=["delta", "iceberg"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "delta":
        yield InDelta(tmp_path)
        return
    for package in ("pyiceberg", "sqlalchemy"):
        pytest.importorskip(package, reason="PyIceberg is not installed: pip install 'midstream[iceberg]'")
    with Warehouse.make(tmp_path / "lake") as house:
        yield InIceberg(house)


def claimed(sink: LakeSink, ddl: str = DDL) -> LakeSink:
    graph = flow_to(sink, ddl=ddl).graph
    check_tables(graph, JOB)
    found = claim_tables(graph, JOB).payloads["out0"]
    assert isinstance(found, LakeSink)
    return found


def batches(*rows: tuple[str | None, int], **more: list[Any]) -> list[pa.RecordBatch]:
    keys, numbers = [k for k, _ in rows], [n for _, n in rows]
    table = pa.table({"k": pa.array(keys, pa.string()), "n": pa.array(numbers, pa.int64()), **more})
    return list(table.to_batches(max_chunksize=3))


def put(sink: LakeSink, epoch: int, *rows: tuple[str | None, int], **more: list[Any]) -> None:
    replace_epoch(sink, lambda: batches(*rows, **more), Epoch(epoch))


def found(out: Lake) -> dict[str, int]:
    rows = out.rows()
    assert len({row["k"] for row in rows}) == len(rows), "each key is there once"
    return {row["k"]: row["n"] for row in sorted(rows, key=lambda row: row["k"])}


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_takes_the_place_of_the_one_with_its_key(out: Lake) -> None:
    out.make(pa.table({"k": ["a", "z"], "n": [0, 9], "note": ["mine", "mine"]}))
    sink = claimed(out.sink())
    before = out.commits()
    put(sink, 0, ("a", 1), ("b", 1))
    put(sink, 1, ("b", 2), ("c", 2))
    rows = sorted((row["k"], row["n"], row["note"], row["epoch"]) for row in out.rows())
    assert rows == [("a", 1, "mine", 0), ("b", 2, None, 1), ("c", 2, None, 1), ("z", 9, "mine", None)]
    assert out.commits() == before + 2


def test_of_several_rows_with_one_key_the_last_counts(out: Lake) -> None:
    sink = claimed(out.sink())
    put(sink, 0, *((f"k{n % 3}", n) for n in range(20)))
    assert found(out) == {"k0": 18, "k1": 19, "k2": 17}


def test_an_epoch_that_runs_again_leaves_nothing_of_its_first_run(out: Lake) -> None:
    sink = claimed(out.sink())
    put(sink, 0, ("a", 1), ("b", 1))
    put(sink, 1, ("b", -1), ("c", -1))  # of a change that is rolled back
    before = out.commits()
    put(sink, 1, ("a", 2))
    assert (found(out), out.commits()) == ({"a": 2, "b": 1}, before + 1)
    put(sink, 1)
    assert found(out) == {"a": 1, "b": 1}
    put(sink, 2)
    put(sink, 3, ("a", 3))
    assert found(out) == {"a": 3, "b": 1}


def test_columns_that_rows_lack_keep_what_they_had_before_the_epoch(out: Lake) -> None:
    """Also in its second run, for keys of the first run and for others; a new column comes with either."""
    out.make(pa.table({"k": ["a", "b", "c"], "n": [0, 0, 0], "note": ["x", "y", "z"]}))
    sink = claimed(out.sink())
    put(sink, 0, ("a", 1), size=[0.5])
    put(sink, 1, ("a", 2), ("b", 2), size=[7.5, 7.5])
    put(sink, 1, ("a", 3), ("c", 3), ("d", 3), late=[1, 2, 3])
    rows = sorted((row["k"], row["n"], row["note"], row["size"], row["late"], row["epoch"]) for row in out.rows())
    assert rows == [
        ("a", 3, "x", 0.5, 1, 1),
        ("b", 0, "y", None, None, None),
        ("c", 3, "z", None, 2, 1),
        ("d", 3, None, None, 3, 1),
    ]


def test_the_table_is_what_the_last_runs_of_epochs_make(out: Any) -> None:
    """Epochs come in order, and the newest one may run again, with other rows. Others tidy the table meanwhile."""
    rng = random.Random(1)
    sink = claimed(out.sink())
    before: dict[str, int] = {}
    for epoch in range(7):
        for _ in range(rng.randint(1, 3)):
            rows = [(rng.choice("abcdefg"), rng.randrange(100)) for _ in range(rng.choice((0, 1, 4, 9)))]
            put(sink, epoch, *rows)
            after = {**before, **dict(rows)}
            assert found(out) == dict(sorted(after.items()))
            if rng.random() < 0.3:
                out.tidy()
        before = after


def test_a_row_may_move_to_another_partition(out: Any) -> None:
    sink = claimed(out.partitioned_by_n())
    put(sink, 0, ("a", 1), ("b", 1), ("c", 2))
    put(sink, 1, ("a", 2), ("b", 3))
    assert found(out) == {"a": 2, "b": 3, "c": 2}
    put(sink, 1, ("a", 4))
    assert found(out) == {"a": 4, "b": 1, "c": 2}


KEYS: dict[str, tuple[str, list[Any]]] = {
    "Yes": ("boolean", [True, False]),
    "n %": ("bigint", [-(2**63), 2**63 - 1]),
    'a."b"': ("string", ["", "日本 'x' 🙂"]),
    "bytes": ("binary", [b"", b"\x00\xff"]),
    "day": ("date", [date(1, 1, 1), date(2026, 2, 28)]),
    "clock": ("timestamp_ntz", [datetime(2026, 1, 2, 3, 4, 5), datetime(2026, 1, 2, 3, 4, 5, 1)]),
    "price": ("decimal(38, 2)", [Decimal("-0.10"), Decimal("9" * 36 + ".99")]),
}


def test_a_key_may_have_columns_of_many_types_and_any_names(out: Lake) -> None:
    ddl = ", ".join(f"`{name}` {kind}" for name, (kind, _) in KEYS.items()) + ", v int, tags array<string>"
    first = [{name: values[number] for name, (_, values) in KEYS.items()} for number in (0, 1)]
    mixed = [{**first[0], name: first[1][name]} for name in KEYS]
    rows = [{**row, "v": v, "tags": ["x"]} for v, row in enumerate([*first, *mixed])]
    again = [{**row, "v": 100 + row["v"], "tags": None} for row in rows[1:]]
    flow = Flow("types")
    flow.source("in", ListSource([rows, again], ddl)).sink("out", out.sink(key=list(KEYS)))
    run_local(flow)
    wanted = [{**rows[0], "epoch": 0}, *({**row, "epoch": 1} for row in again)]
    assert sorted(out.rows(), key=lambda row: row["v"]) == wanted


class Broken(Exception):
    pass


@pytest.mark.parametrize("portions", [0, 1, 2])
def test_a_failure_while_rows_are_made_changes_nothing(out: Lake, portions: int) -> None:
    sink = claimed(out.sink())
    put(sink, 0, ("a", 1))
    put(sink, 1, ("a", 2))

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(("a", 7), ("b", 7), ("c", 7), ("d", 7))[:portions]
        raise Broken

    before = out.commits()
    for epoch in (1, 2):
        with pytest.raises(Broken):
            replace_epoch(sink, rows, Epoch(epoch))
        assert (found(out), out.commits()) == ({"a": 2}, before)
    put(sink, 1)
    assert found(out) == {"a": 1}


def test_rows_that_somebody_adds_meanwhile_are_upserted_too(out: Any) -> None:
    sink = claimed(out.sink())
    put(sink, 0, ("a", 1))
    tries = []

    def rows() -> list[pa.RecordBatch]:
        tries.append(0)
        if len(tries) < 3:
            key = f"own {len(tries)}"
            out.make(pa.table({"k": [key], "n": [0], "epoch": pa.array([None], pa.int64())}))
        return batches(("a", 5), ("own 1", 5))

    replace_epoch(sink, rows, Epoch(1))
    assert found(out) == {"a": 5, "own 1": 5, "own 2": 0}


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_driver_that_is_replaced_while_it_upserts_is_refused(out: Lake, epoch: int) -> None:
    old = claimed(out.sink())
    put(old, 0, ("a", 1))
    put(old, 1, ("a", 2))

    def rows() -> list[pa.RecordBatch]:
        claimed(out.sink())
        return batches(("a", 9))

    with pytest.raises(CheckpointError, match="no longer written by this driver"):
        replace_epoch(old, rows, Epoch(epoch))
    assert found(out) == {"a": 2}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "merge"}, "mode 'merge' is not known; allowed: append, upsert"),
        ({"key": ()}, r"mode='upsert' needs key=, the columns by which .*; found key=\(\)"),
        ({"key": ["k", "k"]}, "mode='upsert' needs key=, .* each once"),
        ({"mode": "append"}, "key='k' is for mode='upsert'; found mode='append'"),
    ],
)
def test_invalid_parameters_are_refused(out: Lake, options: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowError, match=f"(Delta|Iceberg)Sink: {says}"):
        out.sink(**options)


@pytest.mark.parametrize(
    ("ddl", "says"), [("n bigint", "key: .*'k'"), ("k double", "'k' of the key is double"), ("k array<int>", "'k' of")]
)
def test_keys_that_rows_cannot_have_are_refused(out: Lake, ddl: str, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        flow_to(out.sink(), ddl=ddl)


def test_a_null_in_the_key_fails_the_epoch(out: Lake) -> None:
    flow = flow_to(out.sink(), ddl=DDL, rows=[{"k": "a", "n": 1}, {"k": None, "n": 1}])
    with pytest.raises(JobFailed, match="a row has a null in the column 'k', which is in the key of the upsert into"):
        run_local(flow)
    assert out.rows() == []


def test_a_job_that_went_back_further_is_refused(out: Lake) -> None:
    sink = claimed(out.sink())
    for epoch in range(3):
        put(sink, epoch, ("a", epoch))
    with pytest.raises(CheckpointError, match="holds upserts up to epoch 2, and the job has gone back to epoch 1"):
        put(sink, 1, ("a", 7))
    assert found(out) == {"a": 2}


def test_an_epoch_that_cannot_be_undone_is_refused(out: Any) -> None:
    """The version before it is gone."""
    sink = claimed(out.sink())
    put(sink, 0, ("a", 1))
    put(sink, 1, ("a", 2))
    out.lose_the_past()
    with pytest.raises(CheckpointError, match=r"what the newest epoch has overwritten in .* cannot be read"):
        put(sink, 1, ("a", 3))
    assert found(out) == {"a": 2}
    put(sink, 2, ("a", 4))
    assert found(out) == {"a": 4}


def test_tables_whose_rows_have_other_keys_are_refused(out: Lake) -> None:
    sink = claimed(out.sink())
    put(sink, 0, ("a", 1))
    before = out.commits()
    others: list[tuple[dict[str, Any], str]] = [
        ({"key": ["k", "n"]}, r"says mode='upsert' and key=\['k', 'n'\]"),
        ({"mode": "append", "key": ()}, "says mode='append'"),
    ]
    for options, says in others:
        with pytest.raises(CheckpointError, match=f"were upserted by another key than the sink has, which {says}"):
            check_tables(flow_to(out.sink(**options), ddl=DDL).graph, JOB)
    assert out.commits() == before


def test_a_table_of_delta_lake_in_which_nothing_can_be_replaced_is_refused(tmp_path: Path) -> None:
    columns = pa.schema([("k", pa.string()), ("n", pa.int64())])
    deltalake.DeltaTable.create(tmp_path / "out", columns, configuration={"delta.appendOnly": "true"})
    with pytest.raises(CheckpointError, match=r"has delta\.appendOnly, so no row of it can be replaced"):
        check_tables(flow_to(InDelta(tmp_path).sink(), ddl=DDL).graph, JOB)
    assert deltalake.DeltaTable(tmp_path / "out").version() == 0


def test_a_table_in_which_keys_are_not_unique_is_refused(out: Lake) -> None:
    out.make(pa.table({"k": ["a", "b", "a"], "n": [1, 2, 3]}))
    before = out.commits()
    with pytest.raises(CheckpointError, match=r"several rows of the table .* have the key \{'k': 'a'\}"):
        check_tables(flow_to(out.sink(), ddl=DDL).graph, JOB)
    assert out.commits() == before
