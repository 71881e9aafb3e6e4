"""A worker process drops loaded objects when no configuration that could still run refers to them, but not before."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, NoopSink, Update
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.prepare import prepare
from midstream.control.messages import StageChange, TaskId, TaskOrder
from midstream.engine.clock import ManualClock
from midstream.engine.parts import preload
from midstream.engine.resources import Resources
from midstream.engine.slices import SliceSizer
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex
from midstream.runtime.task import TaskRun
from midstream.state.access import StateAccess
from midstream.storage.blobs import BlobStore


class Noted:
    """A function that records when it is opened and closed."""

    def __init__(self, name: str, notes: Path) -> None:
        self.name, self.notes = name, notes

    def open(self) -> None:
        self.note("opened")

    def close(self) -> None:
        self.note("closed")
        if self.name == "bad":
            raise RuntimeError("cannot be closed")

    def note(self, what: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{self.name} {what}\n")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


def table(price: int) -> pa.Table:
    return pa.table({"k": [1], "price": [price]})


class World:
    """A flow with two functions and a table in one stage, its resources, and changes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.store = BlobStore(str(folder / "blobs"))
        flow = Flow("f")
        rows = flow.source("in", ListSource([[]], "k bigint")).map("m", self.noted("old")).map("n", self.noted("same"))
        rows.lookup("t", table(1), on="k").sink("out", NoopSink())
        self.first = first_configuration(flow.graph, self.store, 1)
        self.resources = Resources(self.store)

    def noted(self, name: str) -> Noted:
        return Noted(name, self.notes)

    def changed(self, *updates: Update) -> Configuration:
        return prepare(self.first, updates, self.store, revision=Revision(2)).after

    def load(self, configuration: Configuration) -> None:
        for digest in configuration.programs:
            preload(self.resources.program(digest), self.resources)

    def forget_all_but(self, *live: Configuration) -> set[str]:
        return set(self.resources.forget_all_but(frozenset().union(*(each.digests() for each in live))))

    def story(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def task(self, configuration: Configuration, change: StageChange | None = None) -> TaskRun:
        order = TaskOrder(Revision(1), configuration.programs[0], change=change)
        access = StateAccess("job", str(self.folder / "state"), str(self.folder / "local"))
        task = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), 1)
        owners, clock = configuration.assignments, ManualClock()
        return TaskRun(task, order, owners, self.resources, access, clock=clock, sizer=SliceSizer())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def loaded(configuration: Configuration) -> set[Digest]:
    """What workers hold of a configuration; nobody there reads its document."""
    return set(configuration.digests() - {configuration.document.digest})


def test_objects_only_an_old_configuration_uses_are_closed_and_dropped(world: World):
    after = world.changed(Update("m", world.noted("new")), Update("t", table(2)))
    world.load(world.first)
    world.load(after)
    assert world.forget_all_but(world.first, after) == set(), "the change may be rolled back"
    assert world.forget_all_but(after) == loaded(world.first) - after.digests()
    assert world.story() == ["old opened", "same opened", "new opened", "old closed"]


def test_dropped_objects_are_loaded_again_when_needed(world: World):
    world.load(world.first)
    world.forget_all_but()
    world.load(world.first)
    assert sorted(world.story()[-4:]) == ["old closed", "old opened", "same closed", "same opened"]
    assert world.forget_all_but(world.first) == set()


def test_a_function_of_a_live_program_stays_even_if_the_program_was_never_loaded(world: World):
    world.load(world.first)
    after = world.changed(Update("m", world.noted("new")))
    world.forget_all_but(after)
    assert world.story() == ["old opened", "same opened", "old closed"]


def test_nothing_is_dropped_while_a_task_uses_it(world: World):
    after = world.changed(Update("m", world.noted("new")))
    task = world.task(world.first, StageChange(Revision(2), after.programs[0], ("m",)))
    list(task.run([]))
    assert world.forget_all_but() == set(), "it may call the functions of both revisions"
    task.close()
    assert world.story() == ["old opened", "same opened", "new opened"], "the next task may need them"
    assert world.forget_all_but(after) == loaded(world.first) - after.digests()
    assert world.story()[3:] == ["old closed"]


def test_a_task_that_cannot_be_started_holds_nothing(world: World):
    lost = world.changed(Update("m", world.noted("lost")))
    world.store.remove(lost.programs[0], world.store.holds.mark())
    with pytest.raises(Exception, match="cannot be read"):
        world.task(lost)
    world.load(world.first)
    assert world.forget_all_but() == loaded(world.first)


def test_an_error_in_closing_one_function_does_not_prevent_closing_others(world: World):
    world.load(world.changed(Update("m", world.noted("bad"))))
    world.forget_all_but()
    assert sorted(world.story()[2:]) == ["bad closed", "same closed"]


def test_a_task_can_end_while_another_thread_loads_a_function(world: World):
    """The thread that hears of a change loads what it needs; a running task must not wait for that."""
    task = world.task(world.first)
    is_loading, may_go_on = threading.Event(), threading.Event()

    def load() -> str:
        is_loading.set()
        assert may_go_on.wait(60)
        return "loaded"

    made: list[str] = []
    thread = threading.Thread(
        target=lambda: made.append(world.resources.made("slow", world.first.programs[0], None, load))
    )
    thread.start()
    assert is_loading.wait(60)
    task.close()  # would hang if it waited for the loading
    world.forget_all_but(world.first)
    may_go_on.set()
    thread.join()
    assert made == ["loaded"]
