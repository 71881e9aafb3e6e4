"""The life of changes: requested, on trial, applied or rolled back; restarts and reverts."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream import Flow, ListSource, NoopSink, Update
from midstream.change.change import Change, TrialProgress
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.restart import Restart, drop_changes
from midstream.change.revert import undoing
from midstream.change.trial import LOSSES_BEFORE_BLAME, TRIAL_EPOCHS, Changes, Request, RunFailure
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import NOT_STORED, Outcome
from midstream.checkpoint.retention import KEPT_REVISIONS, blobs_on_record
from midstream.control.messages import ChangeNoted, Commit, TaskId
from midstream.errors import ChangeFailed, CheckpointError, FlowError
from midstream.flow.model import Graph
from midstream.ids import Epoch, PartitionId, Revision, Run, StageIndex
from midstream.metrics import OperatorStats
from midstream.planner.change_plan import Scheduler
from midstream.planner.programs import pack_blobs
from midstream.storage.blobs import Blob, BlobStore
from tests.restarts import restored

DDL = "k string, n int"


def one(row: Any) -> Any:
    return {**row, "n": 1}


def two(row: Any) -> Any:
    return {**row, "n": 2}


def three(row: Any) -> Any:
    return {**row, "n": 3}


def count(key: Any, row: Any, state: Any) -> Any:
    return row


def migrate(key: Any, state: Any) -> None:
    state.set({"n": state.get()})


def graph_without(operator: str) -> Graph:
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], DDL))
    for name in ("FM", "MC"):
        if name != operator:
            rows = rows.map(name, one)
    rows.key_by("key", "k").process("P", count).sink("out", NoopSink())
    return flow.graph


@cache
def packed() -> dict[str, Blob]:
    return dict(pack_blobs(graph_without("")))


class World:
    """A job's store and log, and the changes of the current driver."""

    def __init__(self, folder: Path) -> None:
        self.store = BlobStore(str(folder / "blobs"))
        self.log = ChangeLog(str(folder / "changes"))
        self.seconds = 0.0
        self.first = first_configuration(self.graph(), self.store, 2, packed())
        self.changes = self.driver(self.first)

    def graph(self, *, without: str = "") -> Graph:
        return graph_without(without)

    def driver(self, configuration: Configuration) -> Changes:
        return Changes(configuration, self.store, self.log, stopwatch=lambda: self.seconds, wall=lambda: self.seconds)

    def request(self, *updates: Update, scheduler: Scheduler = Scheduler.FRIES) -> Change:
        request = Request(tuple(updates), scheduler, by="ann@host")
        return self.changes.request(request, self.changes.check(request), preparation_ms=1.0)

    def commit(self, opened: Configuration, revision: int | None = None, *, met: Sequence[str] | None = None) -> None:
        """Commit an epoch that began with ``opened``; all or some operators have processed rows in it."""
        number = Revision(opened.revision if revision is None else revision)
        names = [op.name for op in opened.graph] if met is None else met
        stats = tuple(OperatorStats(name, rows_in=1) for name in names)
        self.changes.committed(Commit(Epoch(7), number, stats, 1, {}), opened)

    def fails(self, opened: Configuration | None = None, **facts: Any) -> bool:
        """Fail a run; return whether the epoch is run again."""
        return self.changes.failed(RunFailure("boom", **facts), opened or self.changes.configuration)

    def partly_committed(self, *updates: Update) -> tuple[Change, Configuration]:
        """A change that took effect within a committed epoch, and the configuration that the epoch began with."""
        before = self.changes.configuration
        change = self.request(*updates)
        self.commit(before, change.revision)
        return change, before

    def applied(self, *updates: Update) -> Change:
        change = self.request(*updates)
        self.commit(self.changes.configuration)
        assert change.outcome is Outcome.APPLIED
        return change

    def outcomes(self) -> list[str]:
        return [str(record.outcome) for record in self.log.records()]

    def restart(self, committed: int | None, *, graph: Any = None) -> Restart:
        """Start another driver, which continues from what the previous one left."""
        first = self.first if graph is None else first_configuration(graph, self.store, partitions=2)
        found = restored(first, self.store, self.log, None if committed is None else Revision(committed))
        self.changes = self.driver(found.configuration)
        return found

    def runs(self, operator: str, function: Any) -> bool:
        """Whether an operator runs this function in an epoch that begins now."""
        return bool(self.changes.configuration.graph.payloads[operator]({"n": 0}) == function({"n": 0}))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# ── requested ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_check_changes_nothing(world: World):
    world.changes.check(Request((Update("FM", two),), Scheduler.FRIES, "ann"))
    assert world.changes.configuration is world.first
    assert world.log.records() == []


def test_a_requested_change_is_on_trial_and_in_the_log(world: World):
    change = world.request(Update("FM", two))
    assert (change.revision, change.outcome, world.changes.on_trial) == (2, Outcome.PENDING, change)
    assert world.runs("FM", two)
    [record] = world.log.records()
    assert (record.number, record.revision, record.by, record.operators) == (1, 2, "ann@host", ("FM",))


def test_the_record_has_the_previous_function(world: World):
    world.request(Update("FM", two))
    [update] = world.log.records()[0].updates
    assert (update.label, update.before) == ("two", world.first.blobs["FM"])
    assert "return {**row, " in update.source


def test_a_second_change_waits(world: World):
    first = world.request(Update("FM", two))
    second = world.request(Update("MC", three))
    assert (second.revision, world.changes.on_trial) == (3, first)
    assert world.runs("MC", one)


def test_a_change_that_does_not_fit_is_recorded_as_refused(world: World):
    request = Request((Update("XX", two),), Scheduler.FRIES, "ann")
    with pytest.raises(FlowError) as caught:
        world.changes.check(request)
    world.changes.refuse(request, caught.value)
    [record] = world.log.records()
    assert (record.outcome, record.plan, record.revision) == (Outcome.REFUSED, "XX", 1)
    assert "no operator 'XX'" in str(record.error)


# ── applied ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_is_applied_when_an_epoch_that_began_under_it_is_committed(world: World):
    change = world.request(Update("FM", two))
    world.commit(world.changes.configuration)
    assert (change.outcome, world.changes.on_trial) == (Outcome.APPLIED, None)
    assert world.outcomes() == ["applied"]


def test_an_epoch_that_ran_partly_under_a_change_does_not_settle_it(world: World):
    change, _ = world.partly_committed(Update("FM", two))
    assert (change.outcome, world.changes.on_trial) == (Outcome.PENDING, change)


def test_an_epoch_without_the_change_does_not_settle_it(world: World):
    change = world.request(Update("FM", two), scheduler=Scheduler.EPOCH)
    world.commit(world.first)
    assert change.outcome is Outcome.PENDING


def test_when_a_change_is_settled_the_next_one_is_on_trial(world: World):
    world.request(Update("FM", two))
    second = world.request(Update("MC", three))
    world.commit(world.changes.configuration)
    assert world.changes.on_trial is second
    assert world.runs("FM", two)
    assert world.runs("MC", three)


def test_a_change_that_waits_is_planned_on_top_of_the_one_before(world: World):
    world.request(Update("FM", two))
    world.request(Update("FM", three))
    world.commit(world.changes.configuration)
    assert world.runs("FM", three)


# ── rolled back ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_that_fails_is_rolled_back_under_a_new_revision(world: World):
    change = world.request(Update("FM", two))
    assert world.fails()
    assert (change.outcome, world.changes.on_trial) == (Outcome.ROLLED_BACK, None)
    assert world.runs("FM", one)
    assert world.changes.configuration.revision == 3, "no revision is ever used twice"
    assert world.outcomes() == ["rolled back"]


def test_a_function_that_fails_under_the_change_rolls_it_back_wherever_the_run_began(world: World):
    before = world.changes.configuration
    change = world.request(Update("FM", two))
    assert world.fails(before, revisions=frozenset({change.revision}))
    assert change.outcome is Outcome.ROLLED_BACK


@pytest.mark.parametrize("scheduler", [Scheduler.FRIES, Scheduler.EPOCH])
@pytest.mark.parametrize("facts", [{"revisions": frozenset({Revision(1)})}, {"is_lost": True}, {}])
def test_a_run_that_failed_under_an_older_revision_is_repeated_entirely_under_the_change(
    world: World, scheduler: Scheduler, facts: dict[str, Any]
):
    change = world.request(Update("FM", two), scheduler=scheduler)
    assert world.fails(world.first, **facts)
    assert (change.outcome, world.changes.on_trial) == (Outcome.PENDING, change)
    assert world.runs("FM", two), "it may be the fix"
    assert world.fails(**facts | {"is_lost": False}), "and if it is not, it is rolled back"
    assert change.outcome is Outcome.ROLLED_BACK
    assert not world.fails(**facts), "then the job fails, as it would have without the change"


def test_a_lost_run_is_run_again_before_the_change_is_blamed(world: World):
    change = world.request(Update("FM", two))
    for _ in range(LOSSES_BEFORE_BLAME):
        assert world.fails(is_lost=True)
        assert change.outcome is Outcome.PENDING
    assert world.fails(is_lost=True)
    assert change.outcome is Outcome.ROLLED_BACK


def test_losses_are_counted_from_the_last_commit(world: World):
    change = world.request(Update("FM", two))
    for _ in range(3):
        for _ in range(LOSSES_BEFORE_BLAME):
            assert world.fails(is_lost=True)
        world.commit(world.changes.configuration, met=())
    assert change.outcome is Outcome.PENDING


def test_a_change_that_exceeds_its_time_limit_is_rolled_back_wherever_the_run_began(world: World):
    change = world.request(Update("FM", two))
    assert world.fails(world.first, is_overdue=True)
    assert change.outcome is Outcome.ROLLED_BACK


# ── how long a trial takes ────────────────────────────────────────────────────────────────────────────────────────


def test_a_trial_ends_when_every_updated_operator_has_processed_rows(world: World):
    change = world.request(Update("FM", two), Update("MC", three))
    assert change.trial == TrialProgress(0, TRIAL_EPOCHS, ("FM", "MC"))
    world.commit(world.changes.configuration, met=["FM"])
    assert change.trial == TrialProgress(1, TRIAL_EPOCHS, ("MC",))
    assert change.outcome is Outcome.PENDING
    world.commit(world.changes.configuration, met=["MC"])
    assert change.wait(0) is Outcome.APPLIED


def test_rows_of_an_epoch_that_began_before_the_change_do_not_count(world: World):
    change, _ = world.partly_committed(Update("FM", two))
    assert change.trial == TrialProgress(0, TRIAL_EPOCHS, ("FM",))


def test_a_trial_without_rows_ends_after_a_number_of_epochs(world: World):
    change = world.request(Update("FM", two))
    for _ in range(TRIAL_EPOCHS - 1):
        world.commit(world.changes.configuration, met=())
    assert change.outcome is Outcome.PENDING
    world.commit(world.changes.configuration, met=())
    assert change.wait(0) is Outcome.APPLIED


def test_a_change_that_waits_is_not_on_trial_yet(world: World):
    world.request(Update("FM", two))
    second = world.request(Update("MC", three))
    assert second.trial is None


def test_without_a_change_on_trial_a_failure_fails_the_job(world: World):
    world.applied(Update("FM", two))
    assert not world.fails()


def test_a_change_that_fails_after_a_commit_is_recorded_as_reverted(world: World):
    change, _ = world.partly_committed(Update("FM", two))
    assert world.fails()
    assert world.runs("FM", one)
    assert change.outcome is Outcome.REVERTED, "rows that met it are committed, so it was not rolled back"
    assert world.outcomes() == ["reverted"]


def test_a_change_cannot_be_rolled_back_after_migrated_state_was_committed(world: World):
    change, _ = world.partly_committed(Update("P", count, migrate=migrate))
    assert not world.fails()
    assert change.outcome is Outcome.PENDING


def test_a_migration_that_was_not_committed_can_be_rolled_back(world: World):
    world.request(Update("P", count, migrate=migrate))
    assert world.fails()
    assert world.changes.configuration.migrations == {}


def test_after_a_rollback_waiting_changes_are_planned_without_it(world: World):
    world.request(Update("FM", two))
    second = world.request(Update("MC", three))
    world.fails()
    assert (world.changes.on_trial, second.revision) == (second, 5)
    assert world.runs("FM", one)
    assert world.runs("MC", three)
    assert [record.revision for record in world.log.records()] == [2, 5]


def test_a_waiting_change_that_no_longer_fits_is_refused_and_the_next_one_starts(world: World):
    other = "k string, m int"
    world.request(Update("MC", two, returns=other), Update("P", count))
    second = world.request(Update("MC", three, returns=other))  # fits, because P takes these columns by then
    third = world.request(Update("FM", three))
    world.fails()
    assert second.outcome is Outcome.REFUSED
    assert "Add an Update('P', …) to the change" in str(second.error)
    assert world.changes.on_trial is third
    assert world.outcomes() == ["rolled back", "refused", "pending"]


def test_revisions_never_go_back(world: World):
    seen = [world.changes.configuration.revision]
    for function in (two, three, two):
        world.request(Update("FM", function))
        seen.append(world.changes.configuration.revision)
        world.fails()
        seen.append(world.changes.configuration.revision)
    assert seen == sorted(set(seen))


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────


TASK = TaskId(Epoch(7), Run(0), StageIndex(0), PartitionId(1), 3)


def test_events_have_times_and_the_first_effect_sets_the_delay(world: World):
    change = world.request(Update("FM", two))
    for seconds, what, in_effect in ((0.25, "told", False), (0.5, "switched", True), (0.75, "switched", True)):
        world.seconds = seconds
        world.changes.noted(ChangeNoted(change.revision, TASK, what, ("FM",), in_effect))
    assert [(event.at_ms, event.what) for event in change.events] == [
        (250, "told"),
        (500, "switched"),
        (750, "switched"),
    ]
    assert (change.delay_ms, change.record.epoch) == (500, 7)


def test_no_event_from_concurrent_threads_is_lost(world: World):
    change = world.request(Update("FM", two))
    barrier = threading.Barrier(4)

    def tell(number: int) -> None:
        barrier.wait(60)
        for event in range(200):
            change.note(f"{number}.{event}")

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert {event.what for event in change.events} == {f"{n}.{e}" for n in range(4) for e in range(200)}


def test_events_of_another_revision_are_ignored(world: World):
    change = world.request(Update("FM", two))
    world.changes.noted(ChangeNoted(Revision(9), TASK, "switched", ("FM",), True))
    assert change.events == ()


def test_a_change_is_in_effect_when_an_epoch_begins_under_it(world: World):
    change = world.request(Update("FM", two))
    assert world.changes.opened(Epoch(8)) == change.revision
    assert (change.delay_ms, change.record.epoch) == (0, 8)


def test_nothing_is_on_trial_when_an_epoch_opens_without_a_change(world: World):
    assert world.changes.opened(Epoch(8)) is None


def test_a_committed_epoch_ended_with_the_change_that_the_commit_names(world: World):
    opened = world.changes.configuration
    change = world.request(Update("FM", two))
    told = Commit(Epoch(7), change.revision, (), 1, {})
    assert world.changes.run_of(told, opened).revision == 2
    assert world.changes.run_of(Commit(Epoch(7), opened.revision, (), 1, {}), opened) is opened


def test_waiting_ends_with_the_outcome(world: World):
    change = world.request(Update("FM", two))
    assert change.wait(timeout=0) is Outcome.PENDING
    with pytest.raises(ChangeFailed, match=r"the change to revision 2 \(FM\) is pending"):
        change.require(timeout=0)
    world.commit(world.changes.configuration)
    assert change.wait() is Outcome.APPLIED
    assert change.require() is change


def test_require_raises_with_the_reason_of_the_failure(world: World):
    change = world.request(Update("FM", two))
    world.fails()
    with pytest.raises(ChangeFailed, match="is rolled back: boom"):
        change.require()


# ── the job ends ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_the_job_ends_the_change_on_trial_stays_pending_and_waiting_ones_are_refused(world: World):
    first, second = world.request(Update("FM", two)), world.request(Update("MC", two))
    world.changes.abandon("stopped")
    assert (first.wait(), second.wait()) == (Outcome.PENDING, Outcome.REFUSED)
    assert world.outcomes() == ["pending", "refused"]
    on_trial, waiting = (record.error for record in world.log.records())
    assert on_trial == "stopped; the next start with the same checkpoint continues the change, unless changes='drop'"
    assert waiting == "stopped before it was this change's turn; request it again once the job runs"


def test_when_the_job_ends_a_partly_committed_change_is_still_on_trial(world: World):
    change, _ = world.partly_committed(Update("FM", two))
    world.changes.abandon("stopped")
    assert change.wait() is Outcome.PENDING
    assert world.outcomes() == ["pending"]


def test_a_job_may_end_without_changes(world: World):
    world.changes.abandon("stopped")
    assert world.outcomes() == []


# ── a restart ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_changes_the_script_runs(world: World):
    for committed in (None, 1):
        found = world.restart(committed)
        assert (found.configuration, found.pending, found.messages) == (world.first, None, ())


def test_after_a_restart_applied_changes_are_in_force_and_reported(world: World):
    world.applied(Update("FM", two))
    world.applied(Update("MC", three))
    found = world.restart(committed=3)
    assert (found.configuration.revision, found.pending) == (3, None)
    assert world.runs("FM", two)
    assert world.runs("MC", three)
    assert found.messages == (
        "operator 'FM' runs two, to which ann@host changed it (revision 2), not what the script says: put that into "
        "the script, or start with changes='drop' to go by the script",
        "operator 'MC' runs three, to which ann@host changed it (revision 3), not what the script says: put that into "
        "the script, or start with changes='drop' to go by the script",
    )


def test_a_restored_configuration_is_the_one_that_ran(world: World):
    world.applied(Update("FM", two), Update("P", count, migrate=migrate))
    ran = world.changes.configuration
    found = world.restart(committed=2).configuration
    assert (found.programs, found.blobs, found.migrations) == (ran.programs, ran.blobs, ran.migrations)


def test_after_a_restart_rolled_back_and_refused_changes_are_not_in_force(world: World):
    world.request(Update("FM", two))
    world.request(Update("MC", two))
    world.fails()
    world.fails()
    assert world.outcomes() == ["rolled back", "rolled back"]
    found = world.restart(committed=1)
    assert world.runs("FM", one)
    assert found.pending is None


def test_a_revision_that_a_rollback_made_is_not_used_again(world: World):
    world.request(Update("FM", two))
    world.fails()
    world.restart(committed=3)
    assert world.changes.configuration.revision == 3
    assert world.request(Update("FM", two)).revision == 4


def test_a_change_that_no_epoch_has_seen_goes_on_trial_again(world: World):
    world.request(Update("FM", two))
    found = world.restart(committed=1)
    assert found.pending is not None
    assert found.messages == (
        "operator 'FM' runs two from the first epoch of this start: ann@host had requested it (revision 2), and it was "
        "on trial when the driver ended; start with changes='drop' to leave it out",
    )
    assert world.runs("FM", one), "until it is resumed"
    change = world.changes.resume(found.pending)
    assert (change.revision, world.changes.on_trial) == (2, change)
    assert world.runs("FM", two)
    assert world.fails(), "and can be rolled back"
    assert world.outcomes() == ["rolled back"]


def test_a_restart_reports_once_per_operator_what_it_runs(world: World):
    world.applied(Update("FM", two), Update("MC", two))
    world.request(Update("FM", three))
    found = world.restart(committed=2)
    assert found.pending is not None
    world.changes.resume(found.pending)
    said = {
        message.split("'")[1]: message.split(" runs ")[1].partition(" ")[0].strip(",") for message in found.messages
    }
    assert (said, len(found.messages)) == ({"FM": "three", "MC": "two"}, 2)
    assert world.runs("FM", three)
    assert world.runs("MC", two)


def test_a_restart_is_silent_about_an_operator_that_is_back_at_the_script(world: World):
    world.applied(Update("FM", two))
    world.applied(Update("FM", one))
    assert world.restart(committed=3).messages == ()


def test_a_restart_announces_only_the_part_of_a_change_that_continues(world: World):
    world.request(Update("FM", two), Update("MC", three))
    found = world.restart(committed=1, graph=world.graph(without="FM"))
    [message] = found.messages
    assert message.startswith("operator 'MC' runs three from the first epoch of this start")


def test_a_pending_change_goes_on_trial_again_even_without_committed_epochs(world: World):
    world.request(Update("FM", two))
    assert world.restart(committed=None).pending is not None


def test_after_a_restart_waiting_changes_are_refused(world: World):
    world.request(Update("FM", two))
    world.request(Update("MC", two))
    found = world.restart(committed=1)
    assert found.pending is not None
    assert found.pending.record.operators == ("FM",)
    assert world.outcomes() == ["pending", "refused"]
    waiting = world.log.records()[1].error
    assert waiting == "the driver ended before it was this change's turn; request it again once the job runs"


def test_a_partly_committed_change_is_on_trial_again_under_its_own_revision(world: World):
    world.partly_committed(Update("FM", two))
    found = world.restart(committed=2)
    assert found.pending is not None
    world.changes.resume(found.pending)
    assert world.runs("FM", two)
    assert world.changes.configuration.revision == 2, "rows were committed under it, and keys migrated"
    assert world.fails(), "as it could before the driver died"
    assert world.runs("FM", one)
    assert world.changes.configuration.revision == 3


def test_after_a_restart_migrated_state_still_prevents_a_rollback(world: World):
    world.partly_committed(Update("P", count, migrate=migrate))
    found = world.restart(committed=2)
    assert found.pending is not None
    world.changes.resume(found.pending)
    assert [each.revision for each in world.changes.configuration.migrations["P"]] == [2]
    assert not world.fails()


def test_a_pending_change_older_than_the_committed_revision_counts_as_applied(world: World):
    change = world.applied(Update("FM", two))
    # The driver died before it could record that, twice.
    world.log.keep(msgspec.structs.replace(change.record, outcome=Outcome.PENDING))
    world.request(Update("MC", three))
    found = world.restart(committed=3)
    assert world.outcomes() == ["applied", "pending"]
    assert found.pending is not None
    assert world.runs("FM", two)


def test_changes_of_operators_that_the_script_dropped_are_left_out(world: World):
    world.applied(Update("FM", two), Update("MC", three))
    found = world.restart(committed=2, graph=world.graph(without="FM"))
    assert world.runs("MC", three)
    assert "FM" not in found.configuration.graph


def test_a_pending_change_without_remaining_operators_is_refused(world: World):
    world.request(Update("FM", two))
    found = world.restart(committed=1, graph=world.graph(without="FM"))
    assert found.pending is None
    assert world.log.records()[0].error == "the flow lacks its operators now"


def test_the_revision_of_a_refused_pending_change_is_not_used_again(world: World):
    world.partly_committed(Update("FM", two))
    found = world.restart(committed=2, graph=world.graph(without="FM"))
    assert (found.pending, found.configuration.revision) == (None, 2)


def test_a_function_that_cannot_be_loaded_says_what_to_do(world: World):
    world.applied(Update("FM", two))
    [record] = world.log.records()
    damaged = world.store.put(Blob.of(b"no pickle"))
    update = msgspec.structs.replace(record.updates[0], function=damaged)
    world.log.keep(msgspec.structs.replace(record, edits=(update,)))
    with pytest.raises(
        CheckpointError, match="'FM' was changed while the job ran, to two, which can no longer be loaded"
    ):
        world.restart(committed=2)


def test_a_change_that_no_longer_fits_the_script_says_what_to_do(world: World):
    world.applied(Update("FM", two, returns="k string, n int, m int"), Update("MC", two))
    flow = Flow("f")
    rows = flow.source("in", ListSource([[]], DDL)).map("FM", one)
    rows.key_by("key", "k").process("P", count).union("MC", rows).sink("out", NoopSink())
    with pytest.raises(CheckpointError, match=r"no longer fit the flow: .* changes='drop'"):
        world.restart(committed=2, graph=flow.graph)


def test_a_transform_whose_function_could_not_be_stored_runs_the_scripts(world: World):
    world.applied(Update("FM", two))
    [record] = world.log.records()
    update = msgspec.structs.replace(record.updates[0], function=NOT_STORED)
    world.log.keep(msgspec.structs.replace(record, edits=(update,)))
    found = world.restart(committed=2)
    assert found.messages == (
        "transform 'FM' runs what the script says: the function to which ann@host changed it (revision 2) could not be "
        "stored; request the change again, or put it into the script",
    )
    assert found.configuration.revision == 2


# ── changes='drop' ────────────────────────────────────────────────────────────────────────────────────────────────


def drop(world: World, committed: int) -> None:
    drop_changes(world.first, world.log, Revision(committed), by="ann@host", now=0.0)


def test_dropping_goes_back_to_the_script_under_a_new_revision(world: World):
    world.applied(Update("FM", two))
    drop(world, committed=2)
    found = world.restart(committed=2)
    assert world.runs("FM", one)
    assert (found.configuration.revision, found.messages) == (3, ())


def test_changes_after_a_drop_are_in_force(world: World):
    world.applied(Update("FM", two))
    drop(world, committed=2)
    world.restart(committed=2)
    world.applied(Update("MC", three))
    world.restart(committed=4)
    assert world.runs("FM", one)
    assert world.runs("MC", three)


def test_a_drop_keeps_migrations(world: World):
    world.applied(Update("P", count, migrate=migrate))
    drop(world, committed=2)
    assert [each.revision for each in world.restart(committed=2).configuration.migrations["P"]] == [2]


def test_there_is_nothing_to_drop_without_changes(world: World):
    drop(world, committed=1)
    assert world.log.records() == []


def test_a_pending_change_is_dropped_too(world: World):
    world.request(Update("FM", two))
    drop(world, committed=1)
    found = world.restart(committed=1)
    assert world.runs("FM", one)
    assert found.pending is None
    assert world.outcomes() == ["rolled back", "applied"]


# ── reverts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def undo(world: World, revision: int, **migrations: Any) -> list[Update]:
    records = world.log.records()
    found = undoing(records, Revision(revision), world.changes.configuration, world.store, migrations)
    assert set(found.stored) == {update.operator for update in found.updates}
    return list(found.updates)


def test_a_revert_undoes_all_later_changes(world: World):
    world.applied(Update("FM", two))
    world.applied(Update("FM", three), Update("MC", three))
    assert {update.operator: update.function({"n": 0}) for update in undo(world, 1)} == {"FM": {"n": 1}, "MC": {"n": 1}}
    assert {update.operator: update.function({"n": 0}) for update in undo(world, 2)} == {"FM": {"n": 2}, "MC": {"n": 1}}


def test_a_revert_restores_columns(world: World):
    world.applied(Update("FM", two, returns="k string, n int, m int"), Update("MC", two))
    assert {update.operator: update.returns for update in undo(world, 1)} == {"FM": DDL, "MC": None}


def test_a_revert_can_be_requested_and_restores_the_functions(world: World):
    world.applied(Update("FM", two))
    found = undoing(world.log.records(), Revision(1), world.changes.configuration, world.store)
    request = Request(found.updates, Scheduler.FRIES, "ann", found.stored)
    prepared = world.changes.check(request)
    assert prepared.after.programs == world.first.programs


def refusal(world: World, revision: int, **migrations: Any) -> str:
    with pytest.raises(FlowError) as caught:
        undo(world, revision, **migrations)
    return str(caught.value)


def test_a_revert_goes_only_to_revisions_that_the_job_has_run(world: World):
    world.applied(Update("FM", two))
    world.request(Update("FM", three))
    world.fails()
    assert refusal(world, 3) == (
        "there is no revision 3 to go back to: that change (FM) was rolled back. The job has run 1 (the script), "
        "2 (FM: two)"
    )
    assert refusal(world, 9) == "there is no revision 9 to go back to; the job has run 1 (the script), 2 (FM: two)"


def test_a_revert_without_anything_to_undo_is_refused(world: World):
    world.applied(Update("FM", two))
    assert "the job runs what it ran at revision 2; there is nothing to revert" in refusal(world, 2)


def test_a_revert_of_migrated_state_needs_a_migration(world: World):
    world.applied(Update("P", count, migrate=migrate))
    assert "the state of 'P' was migrated by revision 2, so its old function could not read it" in refusal(world, 1)
    [update] = undo(world, 1, P=migrate)
    assert update.migrate is migrate


def test_a_revert_refuses_migrations_of_operators_that_it_does_not_affect(world: World):
    world.applied(Update("FM", two))
    assert refusal(world, 1, MC=migrate) == "migrate= names MC; the revert affects FM"


def test_a_revert_cannot_go_back_past_a_drop(world: World):
    world.applied(Update("FM", two))
    drop(world, committed=2)
    world.restart(committed=2)
    world.applied(Update("FM", three))
    assert "was started with changes='drop' after revision 1" in refusal(world, 1)


def sweep(world: World) -> None:
    """Remove all blobs that nothing refers to."""
    live = {*world.changes.live(), *blobs_on_record(world.log.records())}
    for name in world.store.garbage(live):
        assert world.store.remove(name, world.store.holds.mark())


def marking(n: int) -> Any:
    return lambda row: {**row, "n": n}


def migrating(n: int) -> Any:
    return lambda key, state: state.set(n)


def test_a_revert_to_removed_functions_is_refused_and_names_the_reachable_revisions(world: World):
    for n in range(KEPT_REVISIONS + 3):
        world.applied(Update("FM", marking(n)))
    sweep(world)
    records, newest = world.log.records(), KEPT_REVISIONS + 4
    with pytest.raises(
        FlowError, match=r"what 'FM' ran at revision 2 is no longer stored: only .* The job can go back to "
    ):
        undoing(records, Revision(2), world.changes.configuration, world.store)
    oldest = Revision(newest - KEPT_REVISIONS)
    [update] = undoing(records, oldest, world.changes.configuration, world.store).updates
    assert update.function({"n": 0}) == marking(oldest - 2)({"n": 0})


def test_a_restart_needs_no_removed_blob_and_has_all_migrations(world: World):
    for n in range(KEPT_REVISIONS + 2):
        world.applied(Update("FM", marking(n)), Update("P", count, migrate=migrating(n)))
    world.applied(Update("MC", two))
    sweep(world)
    before = world.changes.configuration
    found = world.restart(before.revision)
    assert (found.configuration.programs, found.configuration.revision) == (before.programs, before.revision)
    assert [step.revision for step in found.configuration.migrations["P"]] == list(range(2, KEPT_REVISIONS + 4))
    assert len(found.messages) == 2, "one for each operator that does not run what the script says"
    sweep(world)
    assert world.changes.configuration.digests() <= world.store.digests()


def test_columns_that_a_superseded_update_declared_stay(world: World):
    world.applied(Update("MC", lambda row: {**row, "extra": 1}, returns=f"{DDL}, extra int"))
    world.applied(Update("MC", lambda row: {**row, "extra": 2}))
    before = world.changes.configuration
    assert world.restart(before.revision).configuration.programs == before.programs


class Model:
    def __call__(self, row: Any) -> Any:
        return row


def test_a_change_that_has_ended_keeps_no_function_alive(world: World):
    models, changes = [Model() for _ in range(3)], []
    gone = [weakref.ref(model) for model in models]
    while models:
        changes.append(world.applied(Update("FM", models.pop(0))))
        assert changes[-1].plan.updated == ("FM",), "its plan can still be read"
    changes.append(world.request(Update("FM", two)))
    gc.collect()
    assert [model() is None for model in gone] == [True, True, False], "the newest may come back"
    world.fails()
    assert changes[-1].plan.updated == ("FM",)


def test_live_blobs_are_those_of_the_current_previous_and_waiting_configurations(world: World):
    first = world.changes.configuration
    assert world.changes.live() == first.digests()
    change = world.request(Update("FM", two))
    second = change.prepared.after
    assert world.changes.live() == first.digests() | second.digests()
    waiting = world.request(Update("MC", three))
    third = waiting.prepared.after
    assert world.changes.live() == first.digests() | second.digests() | third.digests()
    world.commit(second)
    assert world.changes.live() == second.digests() | third.digests()
    world.commit(third)
    assert world.changes.live() == third.digests()


def test_a_revert_to_a_function_that_was_not_stored_is_refused(world: World):
    world.applied(Update("FM", two))
    [record] = world.log.records()
    update = msgspec.structs.replace(record.updates[0], before=NOT_STORED)
    world.log.keep(msgspec.structs.replace(record, edits=(update,)))
    assert "had a function at revision 1 that is not stored" in refusal(world, 1)
