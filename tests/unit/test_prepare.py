"""Prepared changes: what waits for the next epoch, what is refused, and what the coordinator is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink, NoopSink, Update, agg
from midstream.change.configuration import first_configuration
from midstream.change.explain import Explanation
from midstream.change.prepare import PreparedChange, prepare
from midstream.checkpoint.change_records import NOT_STORED, UpdateRecord
from midstream.errors import FlowError, SchemaError
from midstream.flow.model import Graph
from midstream.ids import Digest, Revision
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore

DDL = "k string, n bigint"
WIDER = f"{DDL}, more bigint"


def same(row: Any) -> Any:
    return row


def prepared(
    folder: Path, graph: Graph, *updates: Update, scheduler: Scheduler = Scheduler.FRIES
) -> tuple[PreparedChange, frozenset[Digest]]:
    """A change of the flow as written; and what the store then has in addition to what that flow needs."""
    store = BlobStore(str(folder))
    current = first_configuration(graph, store, 2)
    before = store.digests()
    change = prepare(current, updates, store, revision=Revision(2), scheduler=scheduler)
    return change, store.digests() - before


# ── side entrances ────────────────────────────────────────────────────────────────────────────────────────────────


def two_sources(unite_before: str) -> Graph:
    """FM and MC, one after the other; rows of a second source come in directly at MC, or at an operator before it."""
    flow = Flow("f")
    others = flow.source("others", ListSource([[]], DDL))
    rows = flow.source("in", ListSource([[]], DDL)).map("FM", same)
    if unite_before == "between":
        rows = rows.union("both", others).map("between", same)
    else:
        rows = rows.map("between", same).union("both", others)
    rows.map("MC", same).sink("out", NoopSink())
    return flow.graph


@pytest.mark.parametrize("unite_before", ["between", "MC"])
def test_a_change_has_a_side_entrance_if_rows_come_in_behind_its_heads(tmp_path: Path, unite_before: str):
    change, _ = prepared(tmp_path, two_sources(unite_before), Update("FM", same), Update("MC", same))
    assert change.plan.heads == {"FM"}
    assert change.begun.has_side_entrance
    assert "expected wait: up to 250 ms" in str(Explanation(change, epoch_ms=250.0))


@pytest.mark.parametrize("updated", [("MC",), ("FM",), ("FM", "between")])
def test_a_change_whose_heads_all_rows_pass_has_no_side_entrance(tmp_path: Path, updated: tuple[str, ...]):
    change, _ = prepared(tmp_path, two_sources("MC"), *(Update(name, same) for name in updated))
    assert not change.begun.has_side_entrance
    assert "expected wait: about 8 ms" in str(Explanation(change, epoch_ms=250.0))


# ── columns that one epoch has only one kind of ───────────────────────────────────────────────────────────────────


def mapped(build: Any) -> Graph:
    flow = Flow("f")
    build(flow.source("in", ListSource([[]], DDL)).map("m", same))
    return flow.graph


def read_by_spark() -> Graph:
    return mapped(lambda rows: rows.sink("out", lambda df, epoch: None))


@pytest.mark.parametrize("scheduler", [Scheduler.FRIES, Scheduler.MARKER])
def test_other_columns_for_a_sink_within_an_epoch_are_refused_and_nothing_is_stored(
    tmp_path: Path, scheduler: Scheduler
):
    with pytest.raises(SchemaError, match=r"gives sink 'out' other columns, \(.*more bigint\), within an epoch; use"):
        prepared(tmp_path, read_by_spark(), Update("m", same, returns=WIDER), scheduler=scheduler)
    assert BlobStore(str(tmp_path)).digests() == _stored_by(tmp_path / "other", read_by_spark())


def _stored_by(folder: Path, graph: Graph) -> frozenset[Digest]:
    store = BlobStore(str(folder))
    first_configuration(graph, store, 2)
    return store.digests()


@pytest.mark.parametrize("scheduler", [Scheduler.EPOCH, Scheduler.REPLAY])
def test_other_columns_for_a_sink_are_possible_from_one_epoch_to_the_next(tmp_path: Path, scheduler: Scheduler):
    change, stored = prepared(tmp_path, read_by_spark(), Update("m", same, returns=WIDER), scheduler=scheduler)
    assert change.after.graph["out"].schema.names == ["k", "n", "more"]
    assert change.after.document.digest in stored


def test_a_change_that_gives_built_in_state_other_columns_waits_for_the_next_epoch(tmp_path: Path):
    def counted(rows: Any) -> None:
        rows.key_by("by", "k").aggregate("total", n=agg.count()).sink("out", MemorySink())

    change, _ = prepared(tmp_path, mapped(counted), Update("m", same, returns=WIDER))
    assert not change.plan.from_next_epoch
    assert change.from_next_epoch
    assert "but waits for the next epoch: aggregate 'total' gets other columns" in change.describe()


def test_a_change_that_leaves_the_columns_of_state_alone_does_not_wait(tmp_path: Path):
    def counted(rows: Any) -> None:
        rows.key_by("by", "k").aggregate("total", n=agg.count()).sink("out", MemorySink())

    change, _ = prepared(tmp_path, mapped(counted), Update("m", lambda row: row))
    assert not change.from_next_epoch


# ── functions that cannot be stored ───────────────────────────────────────────────────────────────────────────────


class OnlyHere:
    """A transform that holds something that cannot be pickled, as one with a DataFrame does."""

    def __call__(self, df: Any) -> Any:
        return df

    def __reduce__(self) -> Any:
        raise TypeError("it cannot leave the driver")


def test_an_operator_whose_function_cannot_be_stored_does_not_keep_the_digest_of_its_old_one(tmp_path: Path):
    def transformed(rows: Any) -> None:
        rows.transform("t", same, local=same).sink("out", MemorySink())

    change, _ = prepared(tmp_path, mapped(transformed), Update("t", OnlyHere(), local=same))
    assert "t" in change.before.blobs, "its first function could be stored"
    assert "t" not in change.after.blobs
    [record] = change.edits
    assert isinstance(record, UpdateRecord)
    assert (record.before, record.function) == (change.before.blobs["t"], NOT_STORED)


def test_a_change_that_does_not_fit_stores_nothing(tmp_path: Path):
    graph = read_by_spark()
    with pytest.raises(FlowError, match="has no function to replace"):
        prepared(tmp_path, graph, Update("m", lambda row: row), Update("out", same))
    assert BlobStore(str(tmp_path)).digests() == _stored_by(tmp_path / "other", graph)
