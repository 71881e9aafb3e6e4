"""Configurations as documents: what a revision runs is written out whole, and read back as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, MemorySink, Update
from midstream.change.configuration import Configuration, configuration_of, first_configuration, read_configuration
from midstream.change.prepare import apply, prepare, store_edits
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.retention import blobs_on_record
from midstream.errors import CheckpointError, FlowError
from midstream.ids import Digest, Epoch, Revision
from midstream.planner.assignment import Assignment, spread
from midstream.planner.programs import StateMigration
from midstream.planner.stages import compile_plan
from midstream.storage.blobs import BlobStore
from midstream.testing import ChangeAt, run_local
from tests.assignments import uneven
from tests.examples import examples
from tests.simulation.flows import random_case

Row = dict[str, Any]


def counting() -> Flow:
    flow = Flow("counting")
    rows = flow.source("in", ListSource([[{"k": "a", "n": n} for n in range(20)]] * 4, "k string, n bigint"))
    counted = rows.map("double", lambda row: row).key_by("by k", "k").process("count", count, returns="n bigint")
    counted.sink("out", MemorySink())
    return flow


def count(key: Any, row: Row, state: Any) -> Row:
    state.set((state.get() or 0) + 1)
    return {"n": state.get()}


def same(one: Configuration, other: Configuration) -> bool:
    """Whether they are equal, plan and all. The user's objects are no part of a graph's equality."""
    return one == other and one.programs == other.programs and one.document == other.document


@examples(30)
@given(st.randoms(use_true_random=False))
def test_a_configuration_is_read_as_it_was_written(rng: random.Random) -> None:
    graph = random_case(rng).flow.graph
    earlier = compile_plan(graph)
    # Numbers as they are after wires have come and gone.
    numbers = compile_plan(graph, type(earlier.numbers)(earlier.numbers.wires[1:], rng.randint(40, 50))).numbers
    blobs = {op.name: Digest(f"{rng.randrange(16**8):064x}") for op in graph if rng.random() < 0.7}
    steps = {name: (StateMigration(Revision(2), digest),) for name, digest in blobs.items() if rng.random() < 0.3}
    owners = uneven(graph, rng.randrange(1 << 16))
    configuration = Configuration(compile_plan(graph, numbers), Revision(5), owners, blobs, steps)
    assert configuration.plan.numbers == numbers
    assert same(read_configuration(configuration.document.data, Revision(5), configuration.owners.data), configuration)


def test_the_same_configuration_under_another_number_shares_its_blobs(tmp_path: Path) -> None:
    first = first_configuration(counting().graph, BlobStore(str(tmp_path)), 2)
    again = first.as_revision(Revision(9))
    assert (again.digests(), again.document) == (first.digests(), first.document)


def test_applying_edits_is_pure_and_gives_what_preparing_them_gives(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    first = first_configuration(counting().graph, store, 2)
    edits = [Update("double", lambda row: {**row, "n": 2}), Update("count", count, migrate=lambda key, state: None)]
    stored = store_edits(first, edits, store)
    before = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    after = apply(first, edits, stored, Revision(2))
    assert same(apply(first, edits, stored, Revision(2)), after)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == before, "nothing was stored"
    assert after.migrations == {"count": (StateMigration(Revision(2), stored.migrations["count"]),)}
    assert (after.assignments, after.plan.numbers) == (first.assignments, first.plan.numbers)
    assert after.blobs["double"] != first.blobs["double"]
    prepared = prepare(first, edits, store, revision=Revision(2))
    assert same(prepared.after, after)
    with pytest.raises(FlowError, match="has no operator 'tripple'"):
        apply(first, [Update("tripple", count)], stored, Revision(2))


def test_records_and_manifests_name_the_configuration_of_their_revision(tmp_path: Path) -> None:
    changes = [
        ChangeAt.of(1, Update("double", lambda row: {**row, "n": 2 * row["n"]})),
        ChangeAt.of(2, Update("count", count), Update("double", lambda row: row)),
    ]
    ended = run_local(counting(), checkpoint=str(tmp_path), changes=changes)
    checkpoint = Checkpoint.of_any_flow(str(tmp_path))
    assert [str(record.outcome) for record in ended.history] == ["applied", "applied"]
    newest = checkpoint.newest_manifest()
    assert newest is not None
    owners = checkpoint.blobs.get(newest.assignments)
    for record in ended.history:
        assert record.configuration is not None
        found = read_configuration(checkpoint.blobs.get(record.configuration), record.revision, owners)
        for update in record.updates:
            assert found.blobs[update.operator] == update.function
        assert record.configuration in blobs_on_record(ended.history)
        assert all(checkpoint.blobs.has(digest) for digest in found.blobs.values()), "its functions are kept"
    assert newest.configuration == ended.history[-1].configuration
    assert configuration_of(newest, checkpoint.blobs).programs == newest.programs
    written = max((tmp_path / "changes").glob("*.json")).read_text().splitlines()[0]
    assert [edit["kind"] for edit in json.loads(written)["edits"]] == ["update", "update"]


def test_the_manifest_of_an_epoch_in_which_tasks_switched_names_the_configuration_that_it_ended_with(tmp_path: Path):
    for seed in range(50):  # until a change comes while tasks run
        folder = str(tmp_path / str(seed))
        change = ChangeAt.of(1, Update("double", lambda row: {**row, "n": 2 * row["n"]}))
        [record] = run_local(counting(), checkpoint=folder, seed=seed, changes=[change]).history
        if any(event.what == "switched" for event in record.events):
            break
    checkpoint = Checkpoint.of_any_flow(folder)
    before, ended = (checkpoint.manifest(Epoch(epoch)) for epoch in (0, 1))
    assert before is not None
    assert ended is not None
    assert (ended.revision, ended.configuration) == (record.revision, record.configuration)
    assert before.configuration != ended.configuration
    assert configuration_of(ended, checkpoint.blobs).programs == ended.programs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "has format 99, which is newer"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"wires": None}, "cannot be read: at wires"),
    ],
)
def test_a_document_that_another_midstream_wrote_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    first = first_configuration(counting().graph, BlobStore(str(tmp_path)), 2)
    data = json.dumps({**json.loads(first.document.data), **change}).encode()
    with pytest.raises(CheckpointError, match=message):
        read_configuration(data, Revision(1), first.owners.data)


def test_a_step_of_a_migration_changes_owners_and_nothing_else(tmp_path: Path) -> None:
    first = first_configuration(counting().graph, BlobStore(str(tmp_path)), 2)
    [stage] = first.assignments
    step = first.with_assignments({stage: Assignment(2, (1, *spread(2).owners[1:]))})
    assert (step.programs, step.document) == (first.programs, first.document)
    assert step.owners != first.owners
    assert step.digests() == first.digests(), "workers have nothing to forget, and nothing is swept"


def test_a_document_that_includes_the_assignments_can_still_be_read(tmp_path: Path) -> None:
    """Manifests of older versions do not name them."""
    store = BlobStore(str(tmp_path))
    first = first_configuration(counting().graph, store, 2)
    [stage] = first.assignments
    moved = {stage: Assignment(3, (2,) * 200 + (0,) * 56)}
    fields = {**json.loads(first.document.data), "assignments": {stage: moved[stage].to_document()}}
    older = json.dumps(fields).encode()
    assert same(read_configuration(older, first.revision), first.with_assignments(moved))
    with pytest.raises(CheckpointError, match="the field 'assignments' is missing"):
        read_configuration(first.document.data, first.revision)
