"""A sink for tables of Apache Iceberg: what a table holds, whose it is, and what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, IcebergSink, Insert, ListSource, NoopSink, Update
from midstream.errors import CheckpointError, FlowError, MidstreamError, SchemaError, SetupError
from midstream.ids import Epoch
from midstream.runtime import iceberg_sink
from midstream.runtime.table_claims import check_tables, claim_tables, replace_epoch
from midstream.testing import ChangeAt, run_local
from tests.lakes import Warehouse
from tests.sink_flows import DDL, flow_to, table_of

pytest.importorskip("pyiceberg", reason="PyIceberg is not installed: pip install 'midstream[iceberg]'")
pytest.importorskip("sqlalchemy", reason="PyIceberg's catalog in a database: pip install 'pyiceberg[sql-sqlite]'")


JOB = "job one"
Rows = dict[Any, list[int]]


def claimed(sink: IcebergSink, job: str = JOB) -> IcebergSink:
    """The sink of a started job."""
    graph = flow_to(sink).graph
    check_tables(graph, job)
    found = claim_tables(graph, job).payloads["out0"]
    assert isinstance(found, IcebergSink)
    return found


def put(sink: IcebergSink, epoch: int, *numbers: int) -> None:
    replace_epoch(sink, lambda: table_of(*numbers).to_batches(max_chunksize=2), Epoch(epoch))


@dataclass(frozen=True)
class Lake:
    """A table, and what it holds."""

    house: Warehouse

    def sink(self, **options: Any) -> IcebergSink:
        return self.house.sink("sales.payments", **options)

    @property
    def table(self) -> Any:
        return self.house.table("sales.payments")

    def rows(self, epoch_column: str = "epoch") -> Rows:
        found: Rows = {}
        for row in self.table.scan().to_arrow().sort_by("n").to_pylist():
            assert row["name"] == f"no. {row['n']}"
            found.setdefault(row[epoch_column], []).append(row["n"])
        return found

    @property
    def commits(self) -> int:
        return len(self.table.metadata.metadata_log)


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    with Warehouse.make(tmp_path / "lake") as house:
        house.catalog.create_namespace("sales")
        yield Lake(house)


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_epoch_replaces_what_it_wrote_before_and_is_one_commit(lake: Lake) -> None:
    sink = claimed(lake.sink())
    before = lake.commits
    for epoch, numbers in [(0, (1, 2, 3)), (1, (4,)), (1, (5, 6, 7, 8, 9))]:
        put(sink, epoch, *numbers)
    assert lake.rows() == {0: [1, 2, 3], 1: [5, 6, 7, 8, 9]}
    assert lake.commits == before + 3
    put(sink, 1)
    assert lake.rows() == {0: [1, 2, 3]}
    put(sink, 2)
    assert lake.commits == before + 4, "an epoch without rows that nobody wrote before makes no snapshot"
    summary = lake.table.current_snapshot().summary.additional_properties
    wanted = {"midstream.job": JOB, "midstream.flow": "shop", "midstream.sink": "out0", "midstream.epoch": "1"}
    assert summary.items() >= wanted.items()
    assert lake.table.properties.items() >= wanted.items()


@pytest.mark.parametrize("partitioned", [False, True])
def test_the_table_holds_the_last_version_of_every_epoch(
    lake: Lake, partitioned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may go back some epochs, if it is rewound: later epochs are then deleted."""
    monkeypatch.setattr(iceberg_sink, "SLICE_BYTES", 50)
    if partitioned:
        table = lake.house.catalog.create_table("sales.payments", table_of(0).schema)
        with table.update_spec() as spec:
            spec.add_identity("name")
    rng = random.Random(1)
    sink, wanted = claimed(lake.sink()), dict[int, list[int]]()
    for _ in range(9):
        epoch = rng.randint(max(0, len(wanted) - 3), len(wanted))
        numbers = [rng.randrange(1000) for _ in range(rng.choice((0, 1, 5)))]
        put(sink, epoch, *numbers)
        kept = {before: rows for before, rows in wanted.items() if before < epoch}
        # An epoch that was never written and has no rows leaves later ones alone; there are none.
        wanted = kept | {epoch: sorted(numbers)}
        assert lake.rows() == {each: rows for each, rows in wanted.items() if rows}


def test_rows_without_an_epoch_belong_to_the_user_and_stay(lake: Lake) -> None:
    lake.house.catalog.create_table("sales.payments", table_of(0).schema).append(table_of(-1))
    sink = claimed(lake.sink(epoch_column="the epoch"))
    for numbers in ((1,), (2,)):
        put(sink, 0, *numbers)
    lake.table.append(table_of(-2))
    put(sink, 0, 3)
    assert lake.rows("the epoch") == {None: [-2, -1], 0: [3]}


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": "n"}])
def test_the_table_may_have_columns_of_types_that_flows_lack(lake: Lake, options: dict[str, Any]) -> None:
    columns = pa.schema([*table_of(0).schema, pa.field("at", pa.time64("us"))])
    table = lake.house.catalog.create_table("sales.payments", columns)
    table.append(table_of(1, at=pa.array([time(12, 30)], pa.time64("us"))))
    sink = claimed(lake.sink(**options))
    put(sink, 0, *((1, 2) if options else (2,)))
    found = lake.table.scan().to_arrow().sort_by("n").to_pylist()
    assert [(row["n"], row["at"], row["epoch"]) for row in found] == [
        (1, time(12, 30), 0 if options else None),
        (2, None, 0),
    ]


def test_columns_come_and_go(lake: Lake) -> None:
    sink = claimed(lake.sink())
    put(sink, 0, 1)
    replace_epoch(sink, table_of(2, size=[0.5]).to_batches, Epoch(1))
    replace_epoch(sink, table_of(3, size=[1.5]).to_batches, Epoch(1))
    put(sink, 2, 4)
    found = lake.table.scan().to_arrow().sort_by("n").select(["n", "size", "epoch"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [(1, None, 0), (3, 1.5, 1), (4, None, 2)]


class Broken(Exception):
    pass


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("portions", [0, 1, 3])
def test_a_failure_while_rows_are_made_is_the_error_and_changes_nothing(lake: Lake, portions: int, epoch: int) -> None:
    sink = claimed(lake.sink())
    put(sink, 0, 1, 2)
    put(sink, 1, 3)
    before = lake.commits

    def rows() -> Iterator[pa.RecordBatch]:
        yield from table_of(*range(6)).to_batches(max_chunksize=2)[:portions]
        raise Broken

    with pytest.raises(Broken):
        replace_epoch(sink, rows, Epoch(epoch))
    assert (lake.rows(), lake.commits) == ({0: [1, 2], 1: [3]}, before)


def test_a_concurrent_commit_of_another_writer_is_not_a_failure(lake: Lake) -> None:
    """Rows that are not the job's are added beside it, and all files are rewritten: then it begins again."""
    sink = claimed(lake.sink())
    put(sink, 0, 1)
    tries = []

    def rows() -> list[pa.RecordBatch]:
        tries.append(0)
        if len(tries) < 3:
            added = table_of(-len(tries)).append_column("epoch", pa.nulls(1, pa.int64()))
            lake.table.append(added)
            lake.table.overwrite(lake.table.scan().to_arrow())
        return list(table_of(20 + len(tries)).to_batches())

    replace_epoch(sink, rows, Epoch(0))
    assert lake.rows() == {None: [-2, -1], 0: [23]}
    tries.clear()
    replace_epoch(sink, rows, Epoch(1))
    assert lake.rows() == {None: [-2, -2, -1, -1], 0: [23], 1: [23]}


def test_other_snapshots_may_be_expired(lake: Lake) -> None:
    """What a repeated epoch is recognised by does not go with its snapshot."""
    sink = claimed(lake.sink())
    put(sink, 0, 1)
    put(sink, 1, 2)
    lake.table.append(table_of(-1).append_column("epoch", pa.nulls(1, pa.int64())))
    table = lake.table
    older = [each.snapshot_id for each in table.snapshots() if each != table.current_snapshot()]
    table.maintenance.expire_snapshots().by_ids(older).commit()
    assert len(lake.table.snapshots()) == 1
    put(sink, 1, 3)
    assert lake.rows() == {None: [-1], 0: [1], 1: [3]}


TYPES: dict[str, tuple[str, list[Any]]] = {
    "yes": ("boolean", [True, False]),
    "tiny": ("tinyint", [-128, 127]),
    "small": ("smallint", [-(2**15), 2**15 - 1]),
    "int": ("int", [-(2**31), 2**31 - 1]),
    "large": ("bigint", [-(2**63), 2**63 - 1]),
    "single": ("float", [0.5, float("inf")]),
    "real": ("double", [0.1, -1e-300]),
    "text": ("string", ["", "日本 🙂"]),
    "bytes": ("binary", [b"", b"\x00\xff\\x"]),
    "day": ("date", [date(1, 1, 1), date(2026, 2, 28)]),
    "moment": ("timestamp", [datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(1969, 12, 31, tzinfo=UTC)]),
    "clock": ("timestamp_ntz", [datetime(2026, 1, 2, 3, 4, 5), datetime(9999, 12, 31, 23, 59, 59, 999999)]),
    "price": ("decimal(38, 2)", [Decimal("-0.10"), Decimal("9" * 36 + ".99")]),
    "tags": ("array<tinyint>", [[1, None], []]),
    "place": ("struct<lat: double, name: string>", [{"lat": 1.5, "name": None}]),
    "scores": ("map<string, smallint>", [[("a", 1)], []]),
}


def test_every_type_is_read_as_it_was_written_and_replaced(lake: Lake, tmp_path: Path) -> None:
    """Twice: the second start finds the table with its types."""
    ddl = ", ".join(f"{name} {kind}" for name, (kind, _) in TYPES.items())
    longest = max(len(values) for _, values in TYPES.values())
    rows = [{name: [*values, None, None, None][i] for name, (_, values) in TYPES.items()} for i in range(longest + 1)]
    as_dicts = [{**row, "scores": dict(row["scores"]) if row["scores"] is not None else None} for row in rows]
    for count in (1, 2):
        flow = Flow("types")
        flow.source("in", ListSource([as_dicts] * count, ddl)).sink("out", lake.sink())
        run_local(flow, checkpoint=str(tmp_path / "c"))
    found = lake.table.scan().to_arrow().to_pylist()
    for epoch in (0, 1):
        mine = [{name: row[name] for name in TYPES} for row in found if row["epoch"] == epoch]
        assert sorted(mine, key=by_number) == sorted(rows, key=by_number)


def by_number(row: dict[str, Any]) -> int:
    return row["large"] or 0


# ── whose a table is ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_driver_that_was_replaced_is_refused(lake: Lake) -> None:
    old = claimed(lake.sink())
    put(old, 0, 1)
    new = claimed(lake.sink())
    with pytest.raises(CheckpointError, match="no longer written by this driver"):
        put(old, 1, 2)
    put(new, 1, 3)
    assert lake.rows() == {0: [1], 1: [3]}


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_driver_that_is_replaced_while_it_writes_is_refused(lake: Lake, epoch: int) -> None:
    """PyIceberg would put its rows on top of what the next driver has committed."""
    old = claimed(lake.sink())
    put(old, 0, 1)

    def rows() -> list[pa.RecordBatch]:
        claimed(lake.sink())
        return list(table_of(2).to_batches())

    with pytest.raises(CheckpointError, match="no longer written by this driver"):
        replace_epoch(old, rows, Epoch(epoch))
    assert lake.rows() == {0: [1]}


def test_a_table_that_is_gone_is_reported(lake: Lake) -> None:
    sink = claimed(lake.sink())
    lake.house.catalog.drop_table("sales.payments")
    with pytest.raises(CheckpointError, match="is gone"):
        put(sink, 0, 1)


def assert_refused(
    says: str, *sinks: Any, job: str = "job two", error: type[Exception] = CheckpointError, **more: Any
) -> None:
    with pytest.raises(error, match=says):
        check_tables(flow_to(*sinks, **more).graph, job)


def test_tables_of_others_are_refused_and_nothing_is_written(lake: Lake) -> None:
    put(claimed(lake.sink()), 0, 1)
    orphan = table_of(1).append_column("epoch", pa.array([7], pa.int64()))
    lake.house.catalog.create_table("sales.orphan", orphan.schema).append(orphan)
    lake.house.catalog.create_table("sales.small", pa.schema([("n", pa.int32())]))
    strict = pa.schema([pa.field("n", pa.int64()), pa.field("must", pa.string(), nullable=False)])
    lake.house.catalog.create_table("sales.strict", strict)
    before = lake.commits

    assert_refused(r"out0.*belongs to sink 'out0' of flow 'shop' \(job job one\), not to this job", lake.sink())
    assert_refused("out1.*belongs to sink 'out0'", NoopSink(), lake.sink(), job=JOB)
    assert_refused("holds rows of epochs, and does not say which job", lake.house.sink("sales.orphan"))
    assert_refused("'n' is bigint, and in the table .* it is int", lake.house.sink("sales.small"), error=SchemaError)
    assert_refused("'must' of the table .* is required", lake.house.sink("sales.strict"), error=SchemaError)
    says = "'Name' differs by case only from 'name' in the table"
    assert_refused(says, lake.sink(), job=JOB, error=SchemaError, ddl="n bigint, Name string")
    assert_refused("has no namespace 'purchases'", lake.house.sink("purchases.payments"), error=SetupError)
    twice = [lake.house.sink("sales.free"), lake.house.sink("sales.free")]
    assert_refused("'out0' and 'out1' both write to", *twice, error=FlowError)
    assert_refused("cannot be opened", IcebergSink("a.b", catalog="nowhere"), error=SetupError)
    assert lake.commits == before
    assert not lake.house.catalog.table_exists("sales.free")


def test_without_the_package_a_start_says_what_to_install(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    assert_refused(r"out0.*pip install 'midstream\[iceberg\]'", lake.sink(), error=SetupError)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": ""}, "table is ''"),
        ({"table": "payments"}, "table is 'payments'; give a namespace and a name"),
        ({"table": "sales..payments"}, "give a namespace and a name"),
        ({"catalog": ""}, "catalog is ''"),
        ({"epoch_column": ""}, "epoch_column is ''"),
        ({"catalog_options": {"key": 1}}, "catalog_options has 'key': int; give texts only"),
    ],
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowError, match=says):
        IcebergSink(**{"table": "sales.payments", **options})


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("n bigint, epoch bigint", "adds the column 'epoch'.*another epoch_column"),
        ("n bigint, Epoch bigint", "'Epoch' differs by case only from 'epoch', the sink's column"),
    ],
)
def test_columns_that_a_table_cannot_hold_are_refused(ddl: str, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        flow_to(IcebergSink("sales.payments"), ddl=ddl)


# ── in a job ──────────────────────────────────────────────────────────────────────────────────────────────────────


EPOCHS = [[{"n": 10 * epoch + i} for i in range(3)] for epoch in range(5)]


def named(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "name": f"no. {row['n']}"}


def fails_on_tens(rows: Any, epoch: int) -> None:
    """The second sink: it fails on rows of the change, when the first one has written them."""
    if any(row["n"] >= 1000 for row in rows.to_pylist()):
        raise OSError("disk full")


def thousandfold(row: dict[str, Any]) -> dict[str, Any]:
    return named({"n": 1000 + row["n"]})


def job_to(lake: Lake) -> Flow:
    flow = Flow("job")
    rows = flow.source("in", ListSource(EPOCHS, "n bigint")).map("name", named, returns=DDL)
    rows.sink("out", lake.sink())
    rows.sink("second", fails_on_tens)
    return flow


def test_rows_of_a_change_that_was_rolled_back_are_replaced(lake: Lake) -> None:
    change = ChangeAt.of(1, Update("name", thousandfold), scheduler="epoch")
    run = run_local(job_to(lake), changes=[change])
    assert [str(record.outcome) for record in run.history] == ["rolled back"]
    assert lake.rows() == {epoch: [row["n"] for row in rows] for epoch, rows in enumerate(EPOCHS)}
    operations = [str(snapshot.summary.operation.value) for snapshot in lake.table.snapshots()]
    assert "delete" in operations, "the rows of the change were in the table before"


def test_a_sink_that_is_inserted_while_the_job_runs_owns_its_table(lake: Lake, tmp_path: Path) -> None:
    def flow(epochs: list[list[dict[str, Any]]]) -> Flow:
        flow = Flow("inserted")
        rows = flow.source("in", ListSource(epochs, "n bigint")).map("name", named, returns=DDL)
        rows.sink("rest", NoopSink())
        return flow

    at = str(tmp_path / "job")
    sink = lake.sink()
    insert = Insert(lambda rows: rows.sink("lake", sink), after="name")
    run_local(flow(EPOCHS[:3]), checkpoint=at, changes=[ChangeAt.of(1, insert, scheduler="epoch")])
    first = min(lake.rows())
    assert lake.rows() == {epoch: [row["n"] for row in EPOCHS[epoch]] for epoch in range(first, 3)}
    run_local(flow(EPOCHS[3:]), checkpoint=at)  # a restart of the script without it
    assert lake.rows() == {epoch: [row["n"] for row in EPOCHS[epoch]] for epoch in range(first, 5)}
    with pytest.raises(MidstreamError, match="belongs to sink 'lake' of flow 'inserted'"):
        run_local(job_to(lake), checkpoint=str(tmp_path / "another"))
