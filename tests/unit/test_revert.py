"""Reverts: of a running job with changes in progress, and of a stopped job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream import Flow, ListSource, NoopSink, Update
from midstream.change.change import Change
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.restart import drop_changes, restart_of
from midstream.change.revert import TakenBack, taken_back, undoing
from midstream.change.trial import Request
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.data.schema import to_ddl
from midstream.errors import CheckpointError, FlowError
from midstream.flow.functions import pack
from midstream.ids import Digest, Revision
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore
from tests.unit.test_trial import DDL, World, migrate, one, three, two

MORE = "k string, n int, m int"


def wider(row: Any) -> Any:
    return {**row, "m": 4}


def count_again(key: Any, row: Any, state: Any) -> Any:
    return row


def count_third(key: Any, row: Any, state: Any) -> Any:
    return {**row}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def revert(world: World, revision: int, scheduler: Scheduler = Scheduler.EPOCH, **migrations: Any) -> Change:
    undone = undoing(world.log.records(), Revision(revision), world.changes.newest(), world.store, migrations)
    request = Request(undone.updates, scheduler, "ann@host", undone.stored, back_to=undone)
    return world.changes.request(request, world.changes.check(request), preparation_ms=1.0)


def fail(world: World) -> None:
    """The change on trial fails in its epoch."""
    assert world.fails()


def succeed(world: World) -> None:
    """An epoch under the change on trial is committed."""
    world.commit(world.changes.configuration)


def columns(configuration: Configuration, operator: str) -> str:
    return to_ddl(configuration.graph[operator].schema)


def take_back(
    world: World, revision: int, committed: int | None, migrates: dict[str, Digest] | None = None
) -> TakenBack:
    """Revert as ``midstream revert`` does: decide, then write the records."""
    number = None if committed is None else Revision(committed)
    found = taken_back(
        world.log.records(),
        Revision(revision),
        number,
        world.store,
        migrates or {},
        by="bob@host",
        now=5.0,
        how="offline",
    )
    for record in found.changed:
        world.log.keep(record)
    return found


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_revert_removes_columns_that_a_later_change_added(world: World):
    world.applied(Update("FM", two))
    world.applied(Update("FM", wider, returns=MORE))
    revert(world, 1)
    assert columns(world.changes.configuration, "FM") == to_ddl(world.first.graph["FM"].schema)
    assert world.runs("FM", one)


def test_a_revert_may_remove_columns_that_no_function_was_written_for(world: World):
    """Operators downstream were never updated: they do not need the columns that were added in the meantime."""
    world.applied(Update("FM", wider, returns=MORE))
    world.applied(Update("FM", two, returns=DDL))
    assert world.runs("FM", two)
    revert(world, 2)
    revert_to_first = revert(world, 1)
    for _ in range(2):
        succeed(world)
    assert revert_to_first.outcome is Outcome.APPLIED
    assert world.changes.configuration.graph.written_for == {}


def test_after_a_restart_a_revert_may_remove_columns_too(world: World):
    world.applied(Update("MC", two))
    world.applied(Update("FM", wider, returns=MORE))
    world.restart(committed=3)
    revert(world, 2)
    assert columns(world.changes.configuration, "FM") == columns(world.first, "FM")


def test_a_revert_may_not_remove_columns_that_a_newer_function_needs(world: World):
    world.applied(Update("FM", wider, returns=MORE))
    world.applied(Update("MC", wider, returns=MORE))
    for _ in range(2):
        with pytest.raises(FlowError, match=r"Add an Update\('MC', …\) to the change that can take them; it needs 'm'"):
            world.request(Update("FM", two, returns=DDL))
        world.restart(committed=3)


# ── with changes in progress ──────────────────────────────────────────────────────────────────────────────────────


def test_a_revert_waits_for_the_change_on_trial_and_undoes_it(world: World):
    first = world.request(Update("FM", two))
    back = revert(world, 1)
    assert world.changes.on_trial is first
    succeed(world)
    assert (first.outcome, world.changes.on_trial) == (Outcome.APPLIED, back)
    assert world.runs("FM", one)
    succeed(world)
    assert [(record.revision, str(record.outcome)) for record in world.log.records()] == [
        (2, "applied"),
        (3, "applied"),
    ]


def test_a_revert_is_refused_if_the_change_on_trial_is_rolled_back(world: World):
    world.request(Update("FM", two))
    back = revert(world, 1)
    fail(world)
    assert (back.outcome, world.changes.on_trial) == (Outcome.REFUSED, None)
    assert "there is nothing to revert" in str(back.error)
    assert world.runs("FM", one)


def test_a_revert_undoes_only_the_changes_that_are_left(world: World):
    world.applied(Update("MC", three))
    world.request(Update("FM", wider, returns=MORE))
    back = revert(world, 1)
    assert set(back.record.operators) == {"MC", "FM"}
    fail(world)
    assert world.changes.on_trial is back
    assert set(back.record.operators) == {"MC"}
    assert world.runs("MC", one)
    assert columns(world.changes.configuration, "FM") == columns(world.first, "FM")


def test_state_that_was_not_migrated_after_all_is_not_migrated_back(world: World):
    world.applied(Update("P", count_again))
    world.request(Update("P", count_third, migrate=migrate))
    back = revert(world, 1, P=migrate)
    fail(world)
    assert world.changes.on_trial is back
    assert world.changes.configuration.migrations == {}
    assert back.record.updates[0].migrate is None


def test_a_migration_from_a_layout_that_never_existed_is_refused(world: World):
    world.applied(Update("P", count_again, migrate=migrate))
    world.request(Update("P", count_third, migrate=migrate))
    back = revert(world, 1, P=migrate)
    fail(world)
    assert back.outcome is Outcome.REFUSED
    assert "the state of 'P' is in the layout of revision 2" in str(back.error)


def test_a_revert_that_relied_on_a_failed_one_is_refused(world: World):
    """The first revert would have migrated the state back, so the second had no migration; then the first failed."""
    world.applied(Update("P", count_again, migrate=migrate))
    revert(world, 1, P=migrate)
    world.request(Update("FM", two))
    second = revert(world, 1)
    fail(world)
    succeed(world)
    assert second.outcome is Outcome.REFUSED
    assert "the state of 'P' is in the layout of revision 2" in str(second.error)


def test_a_revert_to_a_pending_change_works_if_it_is_applied(world: World):
    world.request(Update("FM", two))
    world.request(Update("FM", three))
    back = revert(world, 2)
    for _ in range(3):
        succeed(world)
    assert back.outcome is Outcome.APPLIED
    assert world.runs("FM", two)


def test_a_revert_to_a_pending_change_is_refused_if_it_is_rolled_back(world: World):
    world.request(Update("FM", two))
    world.request(Update("FM", three))
    back = revert(world, 2)
    fail(world)
    succeed(world)
    assert back.outcome is Outcome.REFUSED
    assert "there is no revision 2 to go back to: that change (FM) was rolled back" in str(back.error)
    assert world.runs("FM", three)


def test_a_revert_follows_a_change_that_got_another_revision(world: World):
    world.request(Update("FM", two))
    meant = world.request(Update("MC", two))
    world.request(Update("MC", three))
    back = revert(world, meant.revision)
    fail(world)
    assert meant.revision != 3
    for _ in range(3):
        succeed(world)
    assert back.outcome is Outcome.APPLIED
    assert world.runs("MC", two)
    assert world.runs("FM", one)


def test_a_revert_to_the_change_on_trial_is_refused(world: World):
    world.request(Update("FM", two))
    with pytest.raises(FlowError, match="the job runs what it ran at revision 2; there is nothing to revert"):
        revert(world, 2)
    with pytest.raises(FlowError, match=r"the job has run 1 \(the script\), 2 \(FM: two, pending\)"):
        revert(world, 7)


# ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_state_that_was_migrated_back_once_needs_no_other_migration(world: World):
    world.applied(Update("P", count_again, migrate=migrate))
    revert(world, 1, P=migrate)
    succeed(world)
    world.applied(Update("P", count_third))
    revert(world, 1)
    assert [step.revision for step in world.changes.configuration.migrations["P"]] == [2, 3]


# ── what is no longer stored ──────────────────────────────────────────────────────────────────────────────────────


def test_a_function_that_is_no_longer_stored_is_reported_with_the_reachable_revisions(world: World, tmp_path: Path):
    world.applied(Update("FM", two))
    world.applied(Update("FM", three))
    digest = world.first.blobs["FM"]
    (tmp_path / "blobs" / digest[:2] / digest).unlink()
    says = r"what 'FM' ran at revision 1 is no longer stored.*can go back to 2 \(FM: two\), 3 \(FM: three\);"
    with pytest.raises(FlowError, match=says):
        revert(world, 1)
    with pytest.raises(FlowError, match=says):
        take_back(world, 1, committed=3)
    assert revert(world, 2).revision == 4


# ── a restart loads what it runs, and nothing else ────────────────────────────────────────────────────────────────


class Gone:
    """A function whose module is gone when it is loaded, if ``is_gone`` is set."""

    is_gone = False

    def __call__(self, row: Any) -> Any:
        return {**row, "n": 5}

    def __reduce__(self) -> Any:
        return _load_gone, ()


def _load_gone() -> Gone:
    if Gone.is_gone:
        raise ModuleNotFoundError("No module named 'old_model'")
    return Gone()


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Any:
    # By reference, as from an installed module: what is loaded is this class.
    monkeypatch.setattr("midstream.flow.functions._users_modules", list)
    return lambda: monkeypatch.setattr(Gone, "is_gone", True)


def test_a_superseded_function_is_not_loaded(world: World, gone: Any):
    world.applied(Update("FM", Gone()))
    world.applied(Update("FM", two))
    gone()
    found = world.restart(committed=3)
    assert world.runs("FM", two)
    assert len(found.messages) == 1
    assert "operator 'FM' runs two, to which ann@host changed it (revision 3)" in found.messages[0]
    assert [record.revision for record in world.log.records()] == [2, 3]


def test_a_reverted_function_is_not_loaded(world: World, gone: Any):
    world.applied(Update("FM", Gone()))
    revert(world, 1)
    succeed(world)
    gone()
    found = world.restart(committed=3)
    assert world.runs("FM", one)
    assert found.messages == (), "it runs what the script says"


def test_migrations_are_chained_without_being_loaded(world: World):
    world.applied(Update("P", count_again, migrate=migrate))
    [record] = world.log.records()
    step = record.updates[0].migrate
    assert step is not None
    Path(world.store.location, step[:2], step).write_bytes(b"no pickle")
    [found] = world.restart(committed=2).configuration.migrations["P"]
    assert (found.revision, found.function) == (2, step)


def test_a_newest_function_that_cannot_be_loaded_is_reported_with_the_remedies(world: World, gone: Any):
    world.applied(Update("FM", two))
    world.applied(Update("FM", Gone()))
    gone()
    with pytest.raises(CheckpointError) as caught:
        world.restart(committed=3)
    for part in (
        "operator 'FM' was changed while the job ran, to Gone, which can no longer be loaded: ModuleNotFoundError",
        "flow.start(…, revert_to=2)",
        "'midstream revert CHECKPOINT 2'",
        "1 (the script), 2 (FM: two)",
        "changes='drop'",
    ):
        assert part in str(caught.value)


# ── a job that does not run ───────────────────────────────────────────────────────────────────────────────────────


def test_an_offline_revert_does_not_load_functions(world: World, gone: Any):
    world.applied(Update("FM", two))
    world.applied(Update("FM", Gone()), Update("MC", wider, returns=MORE))
    gone()
    found = take_back(world, 2, committed=3).record
    assert found is not None
    assert (found.revision, found.outcome, found.by, found.note) == (
        4,
        Outcome.APPLIED,
        "bob@host",
        "back to revision 2, offline",
    )
    restarted = world.restart(committed=3)
    assert (restarted.configuration.revision, restarted.pending) == (4, None)
    assert world.runs("FM", two)
    assert world.runs("MC", one)
    assert columns(restarted.configuration, "MC") == columns(world.first, "MC")
    assert "operator 'FM' runs two, to which bob@host changed it (revision 4)" in restarted.messages[0]
    assert len(restarted.messages) == 1, "MC runs what the script says"
    world.applied(Update("MC", three))
    revert(world, 4)
    assert world.runs("MC", one)


def test_a_repeated_offline_revert_does_nothing(world: World):
    world.applied(Update("FM", two))
    assert take_back(world, 1, committed=2).record is not None
    assert take_back(world, 1, committed=2).record is None
    assert len(world.log.records()) == 2
    assert take_back(world, 2, committed=2).record is not None
    world.restart(committed=2)
    assert world.runs("FM", two)


def test_an_offline_revert_rolls_back_the_change_on_trial_and_refuses_waiting_ones(world: World):
    world.applied(Update("FM", two))
    world.request(Update("FM", three))
    world.request(Update("MC", three))
    found = take_back(world, 2, committed=2)
    assert found.record is not None
    assert (found.record.revision, found.record.updates) == (5, ())
    assert world.outcomes() == ["applied", "rolled back", "refused", "applied"]
    assert world.log.records()[1].error == "bob@host reverted it: back to revision 2, offline"
    restarted = world.restart(committed=2)
    assert restarted.pending is None
    assert world.runs("FM", two)
    assert world.runs("MC", one)


def test_an_offline_revert_undoes_a_partly_committed_change(world: World):
    world.partly_committed(Update("FM", two))
    take_back(world, 1, committed=2)
    assert world.outcomes() == ["applied", "applied"]
    assert world.restart(committed=2).configuration.revision == 3
    assert world.runs("FM", one)


def test_an_offline_revert_of_migrated_state_needs_a_migration(world: World):
    world.partly_committed(Update("P", count_again, migrate=migrate))
    before = world.log.records()
    with pytest.raises(FlowError, match=r"the state of 'P' was migrated by revision 2.*--migrate P=MODULE:FUNCTION"):
        take_back(world, 1, committed=2)
    assert world.log.records() == before
    step = world.store.put(pack(migrate, "P"))
    take_back(world, 1, committed=2, migrates={"P": step})
    found = world.restart(committed=2).configuration.migrations["P"]
    assert [each.revision for each in found] == [2, 3]
    assert found[-1].function == step


def test_an_offline_revert_of_an_uncommitted_migration_needs_none(world: World):
    world.request(Update("P", count_again, migrate=migrate))
    take_back(world, 1, committed=1)
    assert world.outcomes() == ["rolled back", "applied"]
    assert world.restart(committed=1).configuration.migrations == {}


def test_an_offline_revert_to_an_uncommitted_change_is_refused(world: World):
    world.request(Update("FM", two))
    with pytest.raises(FlowError, match=r"no revision 2 to go back to: that change \(FM\) was rolled back"):
        take_back(world, 2, committed=1)
    assert world.outcomes() == ["pending"]


@pytest.mark.parametrize("revision", [0, 3, 9])
def test_an_unknown_revision_is_reported_with_the_known_ones(world: World, revision: int):
    world.applied(Update("FM", two))
    with pytest.raises(FlowError, match=r"the job has run 1 \(the script\), 2 \(FM: two\)"):
        take_back(world, revision, committed=2)


def test_an_offline_revert_can_go_back_to_a_drop_but_not_past_it(world: World):
    world.applied(Update("FM", two))
    drop_changes(world.first, world.log, Revision(2), by="ann@host", now=0.0)
    world.restart(committed=2)
    world.applied(Update("FM", three))
    with pytest.raises(FlowError, match=r"It can go back to 3 \(the script, by changes='drop'\), 4 \(FM: three\)"):
        take_back(world, 2, committed=4)
    take_back(world, 3, committed=4)
    world.restart(committed=4)
    assert world.runs("FM", one)


def test_a_drop_keeps_the_migration_of_a_partly_committed_change(world: World):
    """Keys that it migrated stay, and no function could distinguish them from the others."""
    world.partly_committed(Update("P", count_again, migrate=migrate))
    drop_changes(world.first, world.log, Revision(2), by="ann@host", now=0.0)
    found = world.restart(committed=2)
    assert [each.revision for each in found.configuration.migrations["P"]] == [2]
    assert world.outcomes() == ["applied", "applied"]


def test_a_change_that_waited_is_not_taken_for_an_old_one(world: World):
    """Its revision may be lower than that of the change before it, which was prepared again."""
    world.request(Update("FM", two))
    world.request(Update("MC", two))
    world.request(Update("MC", three))
    waiting = world.log.records()[2]
    fail(world)
    on_trial = world.log.records()[1]
    assert (on_trial.revision, waiting.revision) == (6, 4)
    succeed(world)
    # The driver died meanwhile; the change on trial may be recorded as applied or not.
    for before_it in (on_trial, world.log.records()[1]):
        world.log.keep(before_it)
        world.log.keep(waiting)
        world.restart(committed=6)
        assert str(world.log.records()[2].outcome) == "refused"
        assert not world.runs("MC", three)


def test_waiting_changes_never_include_a_failed_one(world: World):
    world.request(Update("FM", two))
    world.request(Update("MC", two))
    last = world.request(Update("FM", three))
    fail(world)
    assert last.outcome is Outcome.PENDING
    assert world.log.records()[2].updates[0].before == world.first.blobs["FM"]
    assert [record.revision for record in world.log.records()] == [2, 6, 7]


def test_a_message_lists_a_limited_number_of_revisions(world: World):
    for _ in range(14):
        world.applied(Update("FM", two))
    with pytest.raises(FlowError) as caught:
        take_back(world, 99, committed=15)
    assert "the job has run 1 (the script), …, 6 (FM: two), 7" in str(caught.value)


def test_a_decision_that_cannot_be_loaded_changes_no_record(world: World, gone: Any):
    world.applied(Update("FM", Gone()))
    world.applied(Update("FM", two))
    gone()
    records = world.log.records()
    found = taken_back(records, Revision(2), Revision(3), world.store, {}, by="bob", now=0.0, how="at a start")
    with pytest.raises(CheckpointError, match="which can no longer be loaded"):
        restart_of(world.first, world.store, found.records, Revision(3))
    assert world.log.records() == records


# ── operators whose columns follow from their inputs ──────────────────────────────────────────────────────────────


def test_columns_of_operators_that_declare_none_follow(tmp_path: Path):
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], DDL)).map("M", one)
    rows.filter("F", lambda row: True).sink("out", NoopSink())
    store, log = BlobStore(str(tmp_path / "blobs")), ChangeLog(str(tmp_path / "changes"))
    first = first_configuration(flow.graph, store, 2)
    world = World(tmp_path / "other")
    world.store, world.log, world.first = store, log, first
    world.changes = world.driver(first)
    both = (Update("M", wider, returns=MORE), Update("F", lambda row: row["m"] > 0))
    world.request(*both, scheduler=Scheduler.EPOCH)
    succeed(world)
    changed = world.restart(committed=2).configuration
    assert columns(changed, "F") == columns(changed, "M") != columns(first, "F")
    revert(world, 1)
    assert columns(world.changes.configuration, "F") == columns(first, "F")


def test_records_of_an_older_version_can_be_read(world: World):
    """They have the columns of every operator, but not those that its function takes."""
    world.applied(Update("FM", two))
    [record] = world.log.records()
    old = msgspec.to_builtins(record)
    del old["edits"][0]["takes"]
    world.log.keep(msgspec.convert(old, ChangeRecord))
    world.restart(committed=2)
    assert world.runs("FM", two)
    revert(world, 1)
    assert world.runs("FM", one)
