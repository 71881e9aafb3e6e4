"""A sink for tables of Delta Lake: what a table holds, whose it is, and what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import DeltaSink, Flow, Insert, ListSource, NoopSink, Update
from midstream.errors import CheckpointError, FlowError, MidstreamError, SchemaError, SetupError
from midstream.ids import Epoch
from midstream.runtime.table_claims import check_tables, claim_tables, replace_epoch
from midstream.testing import ChangeAt, run_local
from tests.sink_flows import DDL, flow_to, table_of

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'midstream[delta]'")

JOB = "job one"
Rows = dict[Any, list[int]]


def claimed(sink: DeltaSink, job: str = JOB, **options: Any) -> DeltaSink:
    """The sink of a started job."""
    graph = flow_to(sink, **options).graph
    check_tables(graph, job)
    found = claim_tables(graph, job).payloads["out0"]
    assert isinstance(found, DeltaSink)
    return found


def put(sink: DeltaSink, epoch: int, *numbers: int) -> None:
    replace_epoch(sink, lambda: table_of(*numbers).to_batches(max_chunksize=2), Epoch(epoch))


@dataclass(frozen=True)
class Lake:
    """A table, and what it holds."""

    path: Path

    def rows(self, epoch_column: str = "epoch") -> Rows:
        found: Rows = {}
        table = deltalake.DeltaTable(self.path).to_pyarrow_table()
        for row in table.sort_by("n").to_pylist():
            assert row["name"] == f"no. {row['n']}"
            found.setdefault(row[epoch_column], []).append(row["n"])
        return found

    @property
    def version(self) -> int:
        return int(deltalake.DeltaTable(self.path).version())


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_epoch_replaces_what_it_wrote_before_and_is_one_version(lake: Lake) -> None:
    sink = claimed(DeltaSink(lake.path))
    before = lake.version
    for epoch, numbers in [(0, (1, 2, 3)), (1, (4,)), (1, (5, 6, 7, 8, 9))]:
        put(sink, epoch, *numbers)
    assert lake.rows() == {0: [1, 2, 3], 1: [5, 6, 7, 8, 9]}
    assert lake.version == before + 3
    put(sink, 1)
    assert lake.rows() == {0: [1, 2, 3]}
    put(sink, 2)
    assert lake.version == before + 4, "an epoch without rows that nobody wrote before makes no version"
    assert deltalake.DeltaTable(lake.path).transaction_version(f"midstream-{JOB}-out0") == 1


@pytest.mark.parametrize("partition_by", [(), ("name",)])
def test_the_table_holds_the_last_version_of_every_epoch(lake: Lake, partition_by: tuple[str, ...]) -> None:
    """A job may go back some epochs, if it is rewound: later epochs are then deleted."""
    rng = random.Random(1)
    sink, wanted = claimed(DeltaSink(lake.path, partition_by=partition_by)), dict[int, list[int]]()
    for _ in range(25):
        epoch = rng.randint(max(0, len(wanted) - 3), len(wanted))
        numbers = [rng.randrange(1000) for _ in range(rng.choice((0, 1, 5)))]
        put(sink, epoch, *numbers)
        kept = {before: rows for before, rows in wanted.items() if before < epoch}
        # An epoch that was never written and has no rows leaves later ones alone; there are none.
        wanted = kept | {epoch: sorted(numbers)}
        assert lake.rows() == {each: rows for each, rows in wanted.items() if rows}


def test_rows_without_an_epoch_belong_to_the_user_and_stay(lake: Lake) -> None:
    deltalake.write_deltalake(lake.path, table_of(-1))
    sink = claimed(DeltaSink(lake.path, epoch_column='the "epoch"'))
    for numbers in ((1,), (2,)):
        put(sink, 0, *numbers)
    deltalake.write_deltalake(lake.path, table_of(-2), mode="append", schema_mode="merge")
    put(sink, 0, 3)
    assert lake.rows('the "epoch"') == {None: [-2, -1], 0: [3]}


def test_columns_come_and_go(lake: Lake) -> None:
    sink = claimed(DeltaSink(lake.path))
    put(sink, 0, 1)
    replace_epoch(sink, table_of(2, size=[0.5]).to_batches, Epoch(1))
    replace_epoch(sink, table_of(3, size=[1.5]).to_batches, Epoch(1))
    put(sink, 2, 4)
    found = deltalake.DeltaTable(lake.path).to_pyarrow_table().sort_by("n").select(["n", "size", "epoch"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [(1, None, 0), (3, 1.5, 1), (4, None, 2)]


class Broken(Exception):
    pass


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("portions", [0, 1, 3])
def test_a_failure_while_rows_are_made_is_the_error_and_changes_nothing(lake: Lake, portions: int, epoch: int) -> None:
    sink = claimed(DeltaSink(lake.path))
    put(sink, 0, 1, 2)
    put(sink, 1, 3)
    before = lake.version

    def rows() -> Iterator[pa.RecordBatch]:
        yield from table_of(*range(6)).to_batches(max_chunksize=2)[:portions]
        raise Broken

    with pytest.raises(Broken):
        replace_epoch(sink, rows, Epoch(epoch))
    assert (lake.rows(), lake.version) == ({0: [1, 2], 1: [3]}, before)


def test_a_concurrent_commit_of_another_writer_is_not_a_failure(lake: Lake) -> None:
    """Rows that are not the job's are added beside it. Files that it replaces are compacted: then it begins again."""
    sink = claimed(DeltaSink(lake.path))
    put(sink, 0, 1)
    tries = []

    def rows() -> list[pa.RecordBatch]:
        tries.append(0)
        added = table_of(-len(tries)).append_column("epoch", pa.nulls(1, pa.int64()))
        deltalake.write_deltalake(lake.path, added, mode="append")
        if len(tries) < 3:
            assert deltalake.DeltaTable(lake.path).optimize.compact()["numFilesRemoved"] == 2
        return list(table_of(20 + len(tries)).to_batches())

    replace_epoch(sink, rows, Epoch(0))
    assert lake.rows() == {None: [-3, -2, -1], 0: [23]}
    replace_epoch(sink, rows, Epoch(1))
    assert lake.rows() == {None: [-4, -3, -2, -1], 0: [23], 1: [24]}


@pytest.mark.parametrize("upsert", [False, True])
def test_epochs_are_known_again_in_a_table_that_forgets_transactions(lake: Lake, upsert: bool) -> None:
    """It does so by the time in a transaction, and those of a sink have none; also when it makes a checkpoint."""
    expiring = {"delta.setTransactionRetentionDuration": "interval 0 seconds"}
    columns = pa.schema([("n", pa.int64()), ("name", pa.string()), ("epoch", pa.int64())])
    deltalake.DeltaTable.create(lake.path, columns, configuration=expiring)
    sink = claimed(DeltaSink(lake.path, mode="upsert", key="n") if upsert else DeltaSink(lake.path))
    put(sink, 0, 1)
    put(sink, 1, 2)
    long_ago = deltalake.Transaction("of somebody else", 1, last_updated=1)
    properties = deltalake.CommitProperties(app_transactions=[long_ago])
    deltalake.write_deltalake(lake.path, table_of(-1), mode="append", schema_mode="merge", commit_properties=properties)
    table = deltalake.DeltaTable(lake.path)
    table.create_checkpoint()
    table.cleanup_metadata()
    assert deltalake.DeltaTable(lake.path).transaction_version("of somebody else") is None, "it forgets"
    put(sink, 1, 3)
    assert lake.rows() == {None: [-1], 0: [1], 1: [3]}
    again = claimed(DeltaSink(lake.path, mode="upsert", key="n") if upsert else DeltaSink(lake.path))
    put(again, 1, 4)
    assert lake.rows() == {None: [-1], 0: [1], 1: [4]}


def vacuumed(lake: Lake) -> None:
    """What nobody should do beside a job, because files that it has not committed yet would go as well."""
    table = deltalake.DeltaTable(lake.path)
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)


def test_a_table_may_be_compacted_and_vacuumed_as_soon_as_an_epoch_is_committed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = claimed(DeltaSink(lake.path))
    put(sink, 0, 1)
    put(sink, 1, 2, 3)
    write = deltalake.write_deltalake

    def write_and_vacuum(*args: Any, **options: Any) -> None:
        write(*args, **options)
        vacuumed(lake)

    with monkeypatch.context() as patched:
        patched.setattr(deltalake, "write_deltalake", write_and_vacuum)
        put(sink, 2, 4)
    assert lake.rows() == {0: [1], 1: [2, 3], 2: [4]}
    put(sink, 2, 5)  # its rows share a file with those of other epochs
    vacuumed(lake)
    put(sink, 3, 6)
    assert lake.rows() == {0: [1], 1: [2, 3], 2: [5], 3: [6]}


TYPES: dict[str, tuple[str, list[Any]]] = {
    "yes": ("boolean", [True, False]),
    "tiny": ("tinyint", [-128, 127]),
    "small": ("smallint", [-(2**15), 2**15 - 1]),
    "int": ("int", [-(2**31), 2**31 - 1]),
    "large": ("bigint", [-(2**63), 2**63 - 1]),
    "single": ("float", [0.5, float("inf")]),
    "real": ("double", [0.1, -1e-300]),
    "text": ("string", ["", 'a "quoted"\n, \\N \\. line', "日本 🙂"]),
    "bytes": ("binary", [b"", b"\x00\xff\\x"]),
    "day": ("date", [date(1, 1, 1), date(2026, 2, 28)]),
    "moment": ("timestamp", [datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(1969, 12, 31, tzinfo=UTC)]),
    "clock": ("timestamp_ntz", [datetime(2026, 1, 2, 3, 4, 5), datetime(9999, 12, 31, 23, 59, 59, 999999)]),
    "price": ("decimal(38, 2)", [Decimal("-0.10"), Decimal("9" * 36 + ".99")]),
    "tags": ("array<string>", [["a", None], []]),
    "place": ("struct<lat: double, name: string>", [{"lat": 1.5, "name": None}]),
    "scores": ("map<string, int>", [[("a", 1)], []]),
}


def test_every_type_is_read_as_it_was_written_and_replaced(lake: Lake) -> None:
    """Twice: the second start finds the table with its types."""
    ddl = ", ".join(f"{name} {kind}" for name, (kind, _) in TYPES.items())
    longest = max(len(values) for _, values in TYPES.values())
    rows = [{name: [*values, None, None, None][i] for name, (_, values) in TYPES.items()} for i in range(longest + 1)]
    as_dicts = [{**row, "scores": dict(row["scores"]) if row["scores"] is not None else None} for row in rows]
    for count in (1, 2):
        flow = Flow("types")
        flow.source("in", ListSource([as_dicts] * count, ddl)).sink("out", DeltaSink(lake.path))
        run_local(flow, checkpoint=str(lake.path.parent / "c"))
    found = deltalake.DeltaTable(lake.path).to_pyarrow_table().to_pylist()
    for epoch in (0, 1):
        mine = [{name: row[name] for name in TYPES} for row in found if row["epoch"] == epoch]
        assert sorted(mine, key=by_number) == sorted(rows, key=by_number)


def by_number(row: dict[str, Any]) -> int:
    return row["large"] or 0


# ── whose a table is ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_driver_that_was_replaced_is_refused(lake: Lake) -> None:
    old = claimed(DeltaSink(lake.path))
    put(old, 0, 1)
    new = claimed(DeltaSink(lake.path))
    with pytest.raises(CheckpointError, match="no longer written by this driver"):
        put(old, 1, 2)
    put(new, 1, 3)
    assert lake.rows() == {0: [1], 1: [3]}


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_driver_that_is_replaced_while_it_writes_is_refused(lake: Lake, epoch: int) -> None:
    old = claimed(DeltaSink(lake.path))
    put(old, 0, 1)

    def rows() -> list[pa.RecordBatch]:
        claimed(DeltaSink(lake.path))
        return list(table_of(2).to_batches())

    with pytest.raises(CheckpointError, match="no longer written by this driver"):
        replace_epoch(old, rows, Epoch(epoch))
    assert lake.rows() == {0: [1]}


def test_a_table_that_is_gone_is_reported(lake: Lake) -> None:
    sink = claimed(DeltaSink(lake.path))
    lake.path.rename(lake.path.with_name("moved"))
    with pytest.raises(CheckpointError, match="is gone"):
        put(sink, 0, 1)


def assert_refused(
    says: str, *sinks: Any, job: str = "job two", error: type[Exception] = CheckpointError, **more: Any
) -> None:
    with pytest.raises(error, match=says):
        check_tables(flow_to(*sinks, **more).graph, job)


def test_tables_of_others_are_refused_and_nothing_is_written(lake: Lake, tmp_path: Path) -> None:
    put(claimed(DeltaSink(lake.path)), 0, 1)
    orphan = tmp_path / "orphan"
    deltalake.write_deltalake(orphan, table_of(1).append_column("epoch", pa.array([7], pa.int64())))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    (tmp_path / "file").write_text("I am a file")
    before = lake.version

    assert_refused(
        r"out0.*belongs to sink 'out0' of flow 'shop' \(job job one\), not to this job", DeltaSink(lake.path)
    )
    assert_refused("out1.*belongs to sink 'out0'", NoopSink(), DeltaSink(lake.path), job=JOB)
    assert_refused(r"holds rows of epochs \(up to 7\), and does not say which job", DeltaSink(orphan))
    assert_refused(r"holds other data \(cat\.png\)", DeltaSink(tmp_path / "photos"))
    assert_refused("is a file", DeltaSink(tmp_path / "file"))
    assert_refused("partitioned by .*the sink says partition_by=", DeltaSink(lake.path, partition_by="name"), job=JOB)
    assert_refused("'n' is bigint, and in the table .* it is int", DeltaSink(small(tmp_path)), error=SchemaError)
    says = "'Name' differs by case only from 'name' in the table"
    assert_refused(says, DeltaSink(lake.path), job=JOB, error=SchemaError, ddl="n bigint, Name string")
    twice = [DeltaSink(tmp_path / "free"), DeltaSink(f"{tmp_path}/x/../free")]
    assert_refused("'out0' and 'out1' both write to", *twice, error=FlowError)
    assert lake.version == before
    assert not (tmp_path / "free").exists()


def small(folder: Path) -> Path:
    """A table whose column is of another type."""
    deltalake.DeltaTable.create(folder / "small", pa.schema([("n", pa.int32())]))
    return folder / "small"


def test_without_the_package_a_start_says_what_to_install(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    assert_refused(r"out0.*pip install 'midstream\[delta\]'", DeltaSink(lake.path), error=SetupError)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "the path is empty"),
        ({"epoch_column": ""}, "epoch_column is ''"),
        ({"partition_by": ["a", "a"]}, "names a column twice"),
        ({"storage_options": {"key": 1}}, "storage_options has 'key': int; give texts only"),
    ],
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FlowError, match=says):
        DeltaSink(**{"path": "lake", **options})


@pytest.mark.parametrize(
    ("ddl", "options", "says"),
    [
        ("n bigint, epoch bigint", {}, "adds the column 'epoch'.*another epoch_column"),
        ("n bigint", {"partition_by": "k"}, "partition_by"),
        ("n bigint", {"partition_by": "n"}, "names all columns"),
        ("n bigint, a array<int>", {"partition_by": "a"}, "cannot be partitioned"),
        ("n bigint, Epoch bigint", {}, "'Epoch' differs by case only from 'epoch', the sink's column"),
    ],
)
def test_columns_that_a_table_cannot_hold_are_refused(ddl: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        flow_to(DeltaSink("lake", **options), ddl=ddl)


# ── in a job ──────────────────────────────────────────────────────────────────────────────────────────────────────


EPOCHS = [[{"n": 10 * epoch + i} for i in range(3)] for epoch in range(5)]


def named(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "name": f"no. {row['n']}"}


def job_to(lake: Lake, epochs: list[list[dict[str, Any]]] = EPOCHS) -> Flow:
    flow = Flow("job")
    rows = flow.source("in", ListSource(epochs, "n bigint")).map("name", named, returns=DDL)
    rows.sink("out", DeltaSink(lake.path))
    rows.sink("second", fails_on_tens)
    return flow


def fails_on_tens(rows: Any, epoch: int) -> None:
    """The second sink: it fails on rows of the change, when the first one has written them."""
    if any(row["n"] >= 1000 for row in rows.to_pylist()):
        raise OSError("disk full")


def thousandfold(row: dict[str, Any]) -> dict[str, Any]:
    return named({"n": 1000 + row["n"]})


def test_rows_of_a_change_that_was_rolled_back_are_replaced(lake: Lake) -> None:
    change = ChangeAt.of(1, Update("name", thousandfold), scheduler="epoch")
    run = run_local(job_to(lake), changes=[change])
    assert [str(record.outcome) for record in run.history] == ["rolled back"]
    assert lake.rows() == {epoch: [row["n"] for row in rows] for epoch, rows in enumerate(EPOCHS)}
    actions = [commit["operationParameters"]["mode"] for commit in deltalake.DeltaTable(lake.path).history()]
    assert "Overwrite" in actions, "the rows of the change were in the table before"


def test_a_sink_that_is_inserted_while_the_job_runs_owns_its_table(lake: Lake, tmp_path: Path) -> None:
    def flow(epochs: list[list[dict[str, Any]]]) -> Flow:
        flow = Flow("inserted")
        rows = flow.source("in", ListSource(epochs, "n bigint")).map("name", named, returns=DDL)
        rows.sink("rest", NoopSink())
        return flow

    at = str(tmp_path / "job")
    insert = Insert(lambda rows: rows.sink("lake", DeltaSink(lake.path)), after="name")
    run_local(flow(EPOCHS[:3]), checkpoint=at, changes=[ChangeAt.of(1, insert, scheduler="epoch")])
    first = min(lake.rows())
    assert lake.rows() == {epoch: [row["n"] for row in EPOCHS[epoch]] for epoch in range(first, 3)}
    run_local(flow(EPOCHS[3:]), checkpoint=at)  # a restart of the script without it
    assert lake.rows() == {epoch: [row["n"] for row in EPOCHS[epoch]] for epoch in range(first, 5)}
    with pytest.raises(MidstreamError, match="belongs to sink 'lake' of flow 'inserted'"):
        run_local(job_to(lake), checkpoint=str(tmp_path / "another"))
