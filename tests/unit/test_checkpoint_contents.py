"""A checkpoint contains no pickle of a class of midstream, and every document has a format number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from midstream import (
    ControlContext,
    ControlOperation,
    Flow,
    ListSource,
    MemorySink,
    Update,
    take_savepoint,
    transaction,
)
from midstream.errors import JobFailed
from midstream.storage.documents import FORMAT
from midstream.testing import ChangeAt, ControlAt, run_local
from tests.fixtures.make_checkpoint import FOLDER
from tests.fixtures.shop import ALL_EPOCHS, run
from tests.pickles import PUBLIC, count_pickles, midstream_names


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of flows that use every operator, of changes of every kind, of control operations, and of a job that
    failed, with a savepoint."""
    folder = tmp_path_factory.mktemp("written")
    run(range(ALL_EPOCHS), str(folder / "shop"))

    flow = Flow("bank")
    accounts = flow.table("accounts", key="string", value="double", default=0.0)
    boxes = flow.table("boxes", key="string", value="object", default=frozenset({1}))

    @transaction
    def keep(t, e):
        t.write(accounts, e.who, t.read(accounts, e.who) + 1)
        t.write(boxes, e.who, t.read(boxes, e.who))

    rows = flow.source("rows", ListSource([[{"n": n, "who": "ann"}] for n in range(3)], "n bigint, who string"))
    rows.transact("ledger", keep, order_by="n").sink("out", MemorySink())

    def fail(row):
        raise ValueError("no")

    broken = rows.map("broken", lambda row: row if row["n"] < 2 else fail(row))
    broken.sink("others", MemorySink())
    update = ChangeAt.of(0, Update("ledger", keep), scheduler="epoch")
    with pytest.raises(JobFailed):
        run_local(flow, checkpoint=str(folder / "bank"), changes=[update, ControlAt(0, Store())], audit="n")
    take_savepoint(str(folder / "bank"), "before the failure")
    assert json.loads((folder / "bank" / "epochs" / "0000000001").read_bytes().split(b"\n")[0])["controls"]
    return folder


class Store(ControlOperation):
    mode = "blocking"

    def complete(self, ctx: ControlContext) -> Any:
        return [ctx.store({"rows": ctx.stats.rows_in}), ctx.operator]


class Leak(Store):
    def complete(self, ctx: ControlContext) -> Any:
        return [ctx.stats]


def test_a_result_that_would_keep_an_object_of_midstream_is_refused(tmp_path: Path):
    flow = Flow("f")
    rows = flow.source("in", ListSource([[{"n": 1}]] * 3, "n int")).map("m", lambda row: row)
    rows.sink("out", MemorySink())
    control = ControlAt(1, Leak())
    run_local(flow, checkpoint=str(tmp_path), changes=[control])
    assert "OperatorStats is internal to midstream" in str(control.handle.error)


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    found = [(str(path.relative_to(folder)), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert found
    return iter(found)


def test_no_pickle_of_a_class_of_midstream_is_on_disk(written):
    pickles = 0
    for folder in (written, FOLDER):
        for name, data in files(folder):
            assert midstream_names(data) <= PUBLIC, name
            pickles += count_pickles(data)
    assert pickles > 100, "functions and state of users are pickled, and this test can see that"


def test_pickles_of_users_are_in_blobs_and_state_only(written):
    holders = {name.split("/")[1] for name, data in files(written) if count_pickles(data)}
    assert holders == {"blobs", "state", "control-values"}


def test_every_document_has_its_format_number(written):
    seen = set()
    for name, data in files(written):
        kind = name.split("/")[1]
        seen.add(kind)
        match kind:
            case "midstream.json" | "epochs" | "changes" | "controls" | "savepoints":
                found = json.loads(data.split(b"\n")[0])["format"]
            case "journal":
                found = msgspec.msgpack.decode(data)["format"]
            case "audit" if name.endswith(".json"):
                found = json.loads(data)["format"]
            case "state" | "audit":
                found = int(pa.ipc.open_file(data).schema.metadata[b"format"])
            case "blobs" if data.startswith(b"{"):
                found = json.loads(data)["format"]
            case _:  # a user's function, table or value, or the lock
                assert kind in ("blobs", "control-values", "lock"), name
                continue
        assert found == FORMAT, name
    documents = {"midstream.json", "epochs", "changes", "controls", "savepoints", "state", "journal", "audit"}
    assert seen == documents | {"blobs", "control-values", "lock"}
