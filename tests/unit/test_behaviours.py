"""Steps of a migration make other programs, but nothing that was learnt or loaded for the job is over with them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from midstream import Flow, ListSource, NoopSink
from midstream.change.configuration import Configuration, first_configuration
from midstream.engine.behaviours import Behaviours
from midstream.engine.parts import preload
from midstream.engine.resources import Resources
from midstream.ids import Digest, StageIndex
from midstream.planner.assignment import Assignment, spread
from midstream.storage.blobs import BlobStore

STAGE = StageIndex(1)


def once(key: Any, row: Any, state: Any) -> Any:
    return row


def twice(key: Any, row: Any, state: Any) -> Any:
    return [row, row]


class World:
    def __init__(self, folder: Path) -> None:
        self.store = BlobStore(str(folder))
        self.resources = Resources(self.store)
        self.behaviours = Behaviours(self.resources)

    def configuration(self, function: Any, assignment: Assignment) -> Configuration:
        """A job with this function, stored and loaded."""
        flow = Flow("f")
        rows = flow.source("in", ListSource([[]], "k bigint")).key_by("by k", "k")
        rows.process("count", function, returns="k bigint").sink("out", NoopSink())
        first = first_configuration(flow.graph, self.store, 2).with_assignments({STAGE: assignment}).store(self.store)
        for digest in first.programs:
            preload(self.resources.program(digest), self.resources)
        return first

    def of(self, configuration: Configuration) -> list[Digest]:
        return [self.behaviours.of(program) for program in configuration.programs]

    def forget_all_but(self, *live: Configuration) -> Collection[Digest]:
        needed = frozenset[Digest]().union(*(each.digests() for each in live))
        return self.behaviours.forgotten(self.resources.forget_all_but(needed))


EVEN = spread(2)
MOVED = Assignment(2, (1, *EVEN.owners[1:]))
BACK = Assignment(2, (1, 0, *EVEN.owners[2:]))


def test_a_step_changes_programs_and_no_behaviour(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, step = world.configuration(once, EVEN), world.configuration(once, MOVED)
    assert not set(first.programs) & set(step.programs)
    assert world.of(first) == world.of(step)
    assert world.forget_all_but(step) == frozenset(), "nothing that was loaded is over"
    following = world.configuration(once, BACK)
    assert world.of(following) == world.of(step)
    assert world.forget_all_but(following) == frozenset()


def test_another_function_is_another_behaviour_and_the_old_one_is_over_with_its_last_program(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, step, changed = (
        world.configuration(function, owners) for function, owners in ((once, EVEN), (once, MOVED), (twice, MOVED))
    )
    before = world.of(first)
    assert world.of(step) == before
    after = world.of(changed)
    assert (after[0], after[1] != before[1]) == (before[0], True), "only the second stage has the function"
    assert world.forget_all_but(step, changed) == frozenset()
    assert world.forget_all_but(changed) == {before[1], step.blobs["count"]}
