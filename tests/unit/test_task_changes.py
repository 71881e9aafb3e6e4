"""A task learns of a change: when it starts, or while it runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, State, Update
from midstream.change.configuration import first_configuration
from midstream.change.prepare import prepare
from midstream.control.messages import Exhausted, StageChange, SwitchRequested, TaskId, TaskOrder
from midstream.engine.clock import ManualClock
from midstream.engine.intake import inlet_origin
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.ids import Epoch, InputPosition, PartitionId, Revision, Run, StageIndex
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from midstream.storage.blobs import BlobStore
from tests.oracle import Row

OLD, NEW = Revision(1), Revision(2)
TASK = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), 1)
SCHEMA = pa.schema([("n", pa.int64()), ("v", pa.int64())])
ROWS = pa.RecordBatch.from_pydict({"n": list(range(40)), "v": [0] * 40}, schema=SCHEMA)


def read(rows: Any, epoch: int) -> None:
    """A sink that reads a DataFrame: a single one gets plain columns."""


def old(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "v": 1}


def new(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "v": 2}


class Fixed(SliceSizer):
    """Slices of ten rows."""

    def __init__(self) -> None:
        super().__init__(10)

    def observe(self, *, rows: int, elapsed_ns: int) -> None:
        return None


class World:
    """A flow of one map, and a change of it."""

    def __init__(self, folder: Path) -> None:
        flow = Flow("f")
        flow.source("in", ListSource([[]], "n bigint, v bigint")).map("m", old).sink("out", read)
        store = BlobStore(str(folder / "blobs"))
        self.before = first_configuration(flow.graph, store, 1)
        after = prepare(self.before, [Update("m", new)], store, revision=NEW).after
        self.change = StageChange(NEW, after.programs[0], ("m",))
        self.resources = Resources(store)
        self.access = StateAccess("job", str(folder / "state"), str(folder / "local"))

    def task(self, change: StageChange | None = None, switch_at: InputPosition | None = None) -> TaskRun:
        order = TaskOrder(OLD, self.before.programs[0], change=change, switch_at=switch_at)
        return TaskRun(
            TASK, order, self.before.assignments, self.resources, self.access, clock=ManualClock(), sizer=Fixed()
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def versions(out: list[pa.RecordBatch]) -> list[int]:
    return [row["v"] for each in out for row in each.to_pylist()]


def all_of(task: TaskRun) -> list[int]:
    return versions([ready for pause in task.run([ROWS]) for ready in pause])


def test_a_task_without_a_change_runs_what_it_was_assigned(world: World):
    assert all_of(world.task()) == [1] * 40


@pytest.mark.parametrize("at", [0, 13, 40])
def test_a_task_switches_at_the_position_in_its_order(world: World, at: int):
    task = world.task(world.change, {inlet_origin(0): at})
    assert all_of(task) == [1] * at + [2] * (40 - at)


def test_a_task_can_switch_at_the_beginning(world: World):
    assert all_of(world.task(world.change, {})) == [2] * 40


def test_a_task_with_a_change_but_no_position_stays_and_does_not_ask(world: World):
    task = world.task(world.change, None)
    out = []
    for ready in task.run([ROWS]):
        out += ready
        assert task.offer(world.change) is None
    assert versions(out) == [1] * 40


def test_a_running_task_asks_with_its_position_and_switches_if_allowed(world: World):
    task = world.task()
    out = []
    for number, ready in enumerate(task.run([ROWS])):
        out += ready
        if number == 1:
            assert task.offer(world.change) == SwitchRequested(TASK, NEW, {inlet_origin(0): 20})
            task.switch()
    assert versions(out) == [1] * 20 + [2] * 20


def test_a_task_that_may_not_switch_stays_to_its_end_and_does_not_ask_again(world: World):
    task = world.task()
    out = []
    for number, ready in enumerate(task.run([ROWS])):
        out += ready
        if number == 1:
            assert task.offer(world.change) is not None
            task.stay()
        elif number > 1:
            assert task.offer(world.change) is None
    assert versions(out) == [1] * 40


def test_a_task_that_has_taken_all_its_input_reports_so_instead_of_asking(world: World):
    task = world.task()
    assert task.exhausted(world.change) is None, "rows may come"
    *_, _last = task.run([ROWS])
    found = task.offer(world.change)
    assert isinstance(found, Exhausted)
    assert found.revision == world.change.revision


def test_operators_reached_by_new_rows_are_reported_once(world: World):
    task = world.task(world.change, {inlet_origin(0): 20})
    told = []
    for _ in task.run([ROWS]):
        told.append(task.reached())
    found = [each for each in told if each is not None]
    assert [(each.task, each.revision, each.operators) for each in found] == [(TASK, NEW, ("m",))]
    assert told[2] is not None, "after the slice in which they came"


# ── end-of-epoch output ───────────────────────────────────────────────────────────────────────────────────────────


class Timed:
    """Emits its version when the epoch ends, once for each key."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, key: Any, row: Row, state: State) -> None:
        state.clock_timer(state.now)

    def on_timer(self, key: Any, time: datetime, state: State) -> Row:
        return {"n": key, "v": self.version}


class TimedWorld:
    """A flow of a process with timers, behind an exchange, and a change of it that begins at another operator."""

    def __init__(self, folder: Path) -> None:
        flow = Flow("f")
        rows = flow.source("in", ListSource([[]], "n bigint, v bigint"))
        rows.key_by("by_n", "n").process("p", Timed(1)).sink("out", read)
        store = BlobStore(str(folder / "blobs"))
        self.before = first_configuration(flow.graph, store, 1)
        after = prepare(self.before, [Update("p", Timed(2))], store, revision=NEW).after
        self.change = StageChange(NEW, after.programs[1], ())
        self.resources = Resources(store)
        self.access = StateAccess("job", str(folder / "state"), str(folder / "local"))
        first = self.task(0)
        self.frames = [ready for pause in first.run([ROWS]) for ready in pause]

    def task(self, stage: int = 1, change: StageChange | None = None) -> TaskRun:
        lineages = {"p": Lineage.start("p").encode()} if stage else {}
        who = TaskId(Epoch(0), Run(0), StageIndex(stage), PartitionId(0), 1)
        order = TaskOrder(OLD, self.before.programs[stage], lineages=lineages, change=change)
        return TaskRun(
            who, order, self.before.assignments, self.resources, self.access, clock=ManualClock(), sizer=Fixed()
        )


@pytest.fixture
def timed(tmp_path: Path) -> TimedWorld:
    return TimedWorld(tmp_path)


def test_end_of_epoch_output_has_the_new_revision_if_the_task_started_with_the_change(timed: TimedWorld):
    assert (
        versions([ready for pause in timed.task(change=timed.change).run(timed.frames) for ready in pause]) == [2] * 40
    )


def test_end_of_epoch_output_has_the_old_revision_if_the_task_may_not_switch(timed: TimedWorld):
    task, out = timed.task(), []
    for number, ready in enumerate(task.run(timed.frames)):
        out += ready
        if number == 1:
            assert isinstance(task.offer(timed.change), SwitchRequested)
            task.stay()
    assert versions(out) == [1] * 40
    assert task.revision == OLD
