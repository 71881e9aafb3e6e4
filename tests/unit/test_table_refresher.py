"""When a lookup's table is read again, and what becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink
from midstream.checkpoint.change_records import Outcome
from midstream.errors import FlowError, FunctionError
from midstream.flow.edits import revise
from midstream.flow.model import Graph
from midstream.flow.table_refresh import TableRefresh
from midstream.planner.programs import pack_blobs
from midstream.runtime.table_refresher import BY, TableRefresher
from midstream.testing import run_local


def table(rate: float, *more: str) -> pa.Table:
    return pa.table({"k": ["a", *more], "rate": [rate] * (1 + len(more))})


def flow_with(read: Any, **options: Any) -> Flow:
    flow, out = Flow("prices"), MemorySink()
    prices = flow.source("in", ListSource([[{"k": "a", "n": 1}]], "k string, n int"))
    prices.lookup("rates", read, on="k", **options).sink("out", out)
    return flow


@dataclass
class Outcomes:
    """A change as far as a refresher looks at it."""

    outcome: Outcome = Outcome.APPLIED


@dataclass
class Running:
    """A job whose changes are in effect at once, or as :attr:`outcome` says."""

    graph: Graph
    outcome: Outcome = Outcome.APPLIED
    made: list[tuple[str | None, Any]] = field(default_factory=list)
    changes: list[Outcomes] = field(default_factory=list)

    def newest(self) -> Any:
        """Its configuration, as far as a refresher looks at it."""
        blobs = {name: blob.digest for name, blob in pack_blobs(self.graph).items()}
        return SimpleNamespace(graph=self.graph, blobs=blobs)

    def update(self, *edits: Any, by: str | None = None, note: str | None = None) -> Any:
        revised = revise(self.graph, edits)
        self.made.append((by, edits[0].function))
        if self.outcome is Outcome.APPLIED:
            self.graph = revised
        self.changes.append(Outcomes(self.outcome))
        return self.changes[-1]


class World:
    """A job, its refresher, a table that can be changed, and a clock."""

    def __init__(self, version: Callable[[], Any] | None = None) -> None:
        self.rate, self.reads, self.now = 1.0, 0, 0.0
        flow = flow_with(self.read, refresh="10 seconds", version=version)
        self.job = Running(flow.graph)
        self.reads = 0
        digests = self.job.newest().blobs
        self.refresher = TableRefresher(self.job, self.job.newest, flow._refreshes, digests, clock=lambda: self.now)

    def read(self) -> pa.Table:
        self.reads += 1
        return table(self.rate)

    def after(self, seconds: float) -> list[float]:
        """The rates of all changes made so far, some time later."""
        self.now += seconds
        self.refresher.look()
        return [made["rate"][0].as_py() for _, made in self.job.made]


def test_a_table_that_differs_becomes_a_change() -> None:
    world = World()
    world.rate = 2.0
    assert world.after(9) == [], "not yet due"
    assert world.after(1) == [2.0]
    assert world.job.made[0][0] == BY
    world.rate = 3.0
    assert world.after(10) == [2.0, 3.0]


def test_an_equal_table_makes_no_change() -> None:
    world = World()
    assert [world.after(10) for _ in range(3)] == [[], [], []]
    assert world.reads == 3


def test_a_table_is_read_only_if_its_version_differs() -> None:
    version = iter([1, 1, 1, 2, 2])
    world = World(lambda: next(version))
    for _ in range(5):
        world.after(10)
    assert world.reads == 2


def test_a_table_that_failed_is_not_tried_again() -> None:
    world = World()
    world.job.outcome = Outcome.ROLLED_BACK
    world.rate = 2.0
    assert world.after(10) == world.after(10) == [2.0]
    world.rate = 3.0
    assert world.after(10) == [2.0, 3.0]


def test_a_refresh_waits_for_a_change_in_progress() -> None:
    world = World()
    world.job.outcome = Outcome.PENDING
    world.rate = 2.0
    world.after(10)
    world.rate = 3.0
    assert world.after(10) == [2.0]
    world.job.changes[0].outcome = world.job.outcome = Outcome.APPLIED
    assert world.after(10) == [2.0, 3.0]


def test_a_failure_is_logged_and_the_next_refresh_comes(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    good, broken = world.read, lambda: 1 / 0
    for read, says in ((broken, "ZeroDivisionError"), (lambda: pa.table({"other": [1]}), "must have the column 'k'")):
        refresh = TableRefresh(read, 10.0)
        world.refresher._refreshes = {"rates": refresh}
        with caplog.at_level(logging.WARNING, logger="midstream"):
            assert world.after(10) == []
        assert "the table of lookup 'rates' stays as it is" in caplog.text
        assert says in caplog.text
    world.refresher._refreshes = {"rates": TableRefresh(good, 10.0)}
    world.rate = 2.0
    assert world.after(10) == [2.0]


def test_a_restart_with_another_table_than_the_scripts_reads_at_once() -> None:
    world = World()
    digests = world.job.newest().blobs
    world.job.update(_update(table(5.0)))
    refresher = TableRefresher(
        world.job, world.job.newest, world.refresher._refreshes, digests, clock=lambda: world.now
    )
    refresher.look()
    assert [made["rate"][0].as_py() for _, made in world.job.made] == [5.0, 1.0]


def _update(new: pa.Table) -> Any:
    from midstream import Update

    return Update("rates", new)


def test_a_lookup_that_a_change_has_removed_is_left_alone() -> None:
    world = World()
    flow = Flow("prices")
    flow.source("in", ListSource([[]], "k string")).sink("out", MemorySink())
    world.job.graph = flow.graph
    assert world.after(10) == []
    assert world.reads == 0


def test_the_local_runtime_reads_the_table_once() -> None:
    reads = []

    def read() -> pa.Table:
        reads.append(1)
        return table(2.0)

    run_local(flow_with(read, refresh="1 ms"))
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("read", "options", "error", "says"),
    [
        (lambda: table(1.0), {"refresh": "soon"}, FlowError, "lookup 'rates': refresh='soon' is not a length of time"),
        (
            table(1.0),
            {"refresh": "1 hour"},
            FunctionError,
            "with refresh=, table must be a function without parameters",
        ),
        (lambda path: table(1.0), {"refresh": "1 hour"}, FunctionError, "table must be a function without parameters"),
        (lambda: table(1.0), {"refresh": "1 hour", "version": 3}, FunctionError, "version must be a function without"),
        (table(1.0), {"version": lambda: 3}, FlowError, "version= is asked as often as refresh= says; give that"),
        (lambda: 1 / 0, {"refresh": "1 hour"}, FlowError, "the table cannot be read: ZeroDivisionError"),
        (lambda: 3, {"refresh": "1 hour"}, FlowError, "expected a pyarrow.Table, a pandas DataFrame or a batch"),
    ],
)
def test_bad_refreshes_are_refused(read: Any, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        flow_with(read, **options)
