"""What users call to move state: what is refused, what is told, what is explained, and what a freeze promises."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from midstream import Assignment, Drain, Move, Outcome, Rebalance, Rescale, Update
from midstream.change import migration_explanation
from midstream.change.migrations import Migrations
from midstream.change.running_migration import PATIENCE
from midstream.change.trial import RunFailure
from midstream.errors import ChangeFailed, FlowError
from midstream.ids import Digest, Epoch
from midstream.planner.assignment import spread
from midstream.planner.reassignment import rescaled
from midstream.runtime.executor_warming import ExecutorWarming
from tests.migrated import BEGIN, SteppedJob, bin_of, numbered, stepped_job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SteppedJob]:
    with stepped_job(tmp_path) as found:
        found.run(2)
        yield found


def test_a_migration_reports_its_progress(job: SteppedJob):
    moving = [bin_of(user) for user in ("user 0", "user 2", "user 4", "user 6")]
    assert len(set(moving)) == 4
    migration = job.migrate(Move({number: 1 - number % 2 for number in moving}), strategy="fluid")
    assert migration.progress.is_waiting_for == "the next epoch"
    assert (migration.progress.bins, migration.progress.bins_done) == (4, 0)
    job.run(2)
    progress = migration.progress
    assert (progress.bins, progress.bins_done, progress.steps_done, progress.steps_left) == (4, 2, 2, 2)
    assert progress.share == 0.5
    assert 0 < progress.bytes_done < progress.bytes
    assert list(job.migrations) == [migration]
    assert job.migration(migration.number) is migration
    assert repr(migration) == "Migration(bins: pending, 2 of 4 bins)"
    job.run(2)
    assert migration.require(0).outcome is Outcome.APPLIED
    assert [(step.epoch, step.bins) for step in migration.steps] == [(2, 1), (3, 1), (4, 1), (5, 1)]
    assert all(step.bytes > 0 for step in migration.steps)
    assert migration.record.epoch == 2
    assert job.migrations == ()
    job.assert_gapless()


def test_waiting_threads_are_woken_by_a_step_and_by_the_end(job: SteppedJob):
    migration = job.rescale(3, strategy="fluid")
    seen: list[Any] = []
    waiting = threading.Thread(target=lambda: seen.append((migration.wait_step(1, 60), migration.wait(60))))
    waiting.start()
    job.run()
    migration.cancel()
    waiting.join(60)
    assert seen == [(True, Outcome.STOPPED)]
    with pytest.raises(ChangeFailed, match=r"migration 1 \(partitions\) is stopped: cancelled"):
        migration.require()


REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((Rescale(4, "by usr"),), {}, "has no stage 'by usr' behind an exchange; did you mean 'by user'"),
    ((Rescale(257),), {}, "partitions=257: give a whole number from 1 to 256, the number of bins"),
    ((Rescale(0),), {}, "partitions=0"),
    ((Rescale(2),), {}, "nothing is to be moved: every bin has that owner already ('by user' has 2 partitions)"),
    ((Move({0: 0}),), {}, "nothing is to be moved"),
    ((Move({0: 2}),), {}, "bin 0 cannot move to partition 2; the partitions are 0 to 1. Rescale makes more"),
    ((Move({300: 0}),), {}, "there is no bin 300 to move; the bins are 0 to 255"),
    ((spread(2),), {}, "nothing is to be moved"),
    (({"by usr": spread(3)},), {}, "has no stage 'by usr'"),
    (({"by user": 3},), {}, "the target of stage 'by user' must be an Assignment, found int"),
    (
        (spread(2, bins=128),),
        {},
        "stage 'by user' has 256 bins, and the assignment has 128; the number",
    ),
    ((), {}, "a migration needs something to move"),
    ((Update("count", numbered),), {}, "a migration moves bins, found Update"),
    ((Rescale(3),), {"strategy": "slow"}, "strategy 'slow' is not known; allowed: sudden, fluid, batched, budgeted"),
    ((Rescale(3),), {"budget": "much"}, "budget='much' is not what a step may cost"),
    ((Rescale(3),), {"budget": 0}, "budget=0 is not what a step may cost"),
    ((Rescale(3),), {"budget": "1 MB", "strategy": "fluid"}, "budget='1 MB' is for strategy='budgeted'"),
    ((Rescale(3),), {"at": 1}, "epoch 1 has begun already; the next one is epoch 2"),
    ((Rescale(3),), {"at": -1}, "at=-1 is not a moment"),
    ((Rescale(3),), {"at": "soon"}, "at='soon' is not a moment; give the number of an epoch, or a datetime"),
    ((Rebalance(by="luck"),), {}, "by='luck' is not measured; allowed: work, rows, bytes"),
    ((Rebalance("by usr"),), {}, "has no stage 'by usr'"),
    ((Drain("7"),), {}, "no partition runs on an executor '7'; those with partitions are 0"),
    ((Drain("0"),), {}, "executor '0' is the only one with partitions; add another one before it is drained"),
]


@pytest.mark.parametrize(("goals", "how", "message"), REFUSED)
def test_an_impossible_migration_is_refused_and_nothing_is_changed(job: SteppedJob, goals, how, message):
    before = job.owners()
    for ask in (job.migrate, job.explain_migration):
        with pytest.raises(FlowError) as refusal:
            ask(*goals, **how)
        assert message in str(refusal.value)
    job.run()
    assert job.owners() == before
    assert job.migrations == ()
    assert all(record.outcome is Outcome.REFUSED for record in job.history())


def test_a_second_migration_is_refused_or_waits_as_asked(job: SteppedJob):
    first = job.rescale(3, strategy="fluid")
    with pytest.raises(FlowError, match=r"refused while migration 1 \(partitions\) is in progress; wait for"):
        job.rescale(4)
    with pytest.raises(FlowError, match="a change that moves bins is refused while migration 1"):
        job.update(Rescale(4))
    second = job.rescale(4, strategy="sudden", queue=True)
    assert second.progress.is_waiting_for in ("migration 1", "the next epoch")
    job.run(2)
    assert first.progress.steps_done == 2
    first.cancel()
    job.run(2)
    assert second.outcome is Outcome.APPLIED
    assert job.owners().partitions == 4
    job.assert_gapless()


def test_a_change_that_moves_bins_keeps_migrations_away_until_it_is_settled(job: SteppedJob):
    change = job.update(Rescale(3), Update("count", numbered))
    with pytest.raises(FlowError, match="refused while a change that moves bins is in progress"):
        job.rescale(4)
    later = job.rescale(4, strategy="sudden", queue=True)
    job.run()
    assert change.outcome is Outcome.APPLIED
    job.run()
    assert later.outcome is Outcome.APPLIED
    assert job.owners().partitions == 4


def test_functions_change_during_a_migration_and_a_roll_back_keeps_what_has_moved(job: SteppedJob):
    migration = job.rescale(3, strategy="fluid")
    job.run(2)
    change = job.update(Update("count", lambda key, row, state: 1 // 0))
    job.run(2)
    assert change.outcome is Outcome.ROLLED_BACK
    assert migration.progress.steps_done == 4
    assert sum(old != new for old, new in zip(spread(2).owners, job.owners().owners, strict=True)) == 4
    job.assert_gapless()


def test_a_change_that_waits_takes_effect_with_the_owners_at_that_time(job: SteppedJob):
    migration = job.migrate(Move({0: 1, 2: 1, 4: 1}), strategy="fluid")
    first = job.update(Update("count", lambda key, row, state: numbered(key, row, state)))
    second = job.update(Update("count", lambda key, row, state: numbered(key, row, state)))
    job.run(4)
    assert [migration.outcome, first.outcome, second.outcome] == [Outcome.APPLIED] * 3
    assert job.owners().owners[:6] == (1, 1, 1, 1, 1, 1)
    job.assert_gapless()


# ── reverse ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_migration_that_has_ended_is_reversed_by_another_one(job: SteppedJob):
    there = job.rescale(3, strategy="sudden")
    job.run()
    back = there.reverse()
    assert back is not there
    assert back.record.note == f"back to before migration {there.number}"
    job.run()
    assert [there.outcome, back.outcome] == [Outcome.APPLIED] * 2
    assert job.owners() == spread(2)


def test_turning_round_twice_goes_forward_again(job: SteppedJob):
    migration = job.migrate(Move({0: 1, 2: 1, 4: 1}), strategy="fluid")
    job.run(2)
    assert migration.reverse() is migration
    job.run()
    migration.reverse()
    job.run(3)
    assert migration.outcome is Outcome.APPLIED
    assert job.owners().owners[:5] == (1, 1, 1, 1, 1)


def test_a_migration_that_has_not_begun_can_be_cancelled_but_not_reversed(job: SteppedJob):
    migration = job.rescale(3, at=40)
    with pytest.raises(FlowError, match="has not moved anything, so there is nothing to reverse; cancel it"):
        migration.reverse()
    migration.cancel()
    assert (migration.outcome, migration.error) == (Outcome.STOPPED, "cancelled before it began")
    migration.cancel()  # harmless


# ── ahead of time, and freezing ───────────────────────────────────────────────────────────────────────────────────


def test_a_migration_begins_with_the_first_epoch_whose_watermark_has_reached_its_time(job: SteppedJob):
    migration = job.migrate(Move({0: 1}), strategy="sudden", at=BEGIN + timedelta(minutes=5))
    assert migration.progress.is_waiting_for == "event time 2026-05-01 00:05:00+00:00"
    job.run(4)
    assert not migration.steps, "epochs 0 to 5 are committed, and the watermark is that of epoch 5"
    job.run()
    assert migration.wait(0) is Outcome.APPLIED
    assert [step.epoch for step in migration.steps] == [6]


def test_without_event_times_there_is_no_time_to_wait_for(tmp_path: Path):
    message = "no source of flow 'counts' has event times, so there is no watermark"
    with stepped_job(tmp_path, timed=False) as job, pytest.raises(FlowError, match=message):
        job.rescale(3, at=BEGIN)


def test_a_freeze_refuses_migrations_within_it_and_names_the_first_free_epoch(job: SteppedJob):
    """Epochs 2 to 6 are frozen (M7)."""
    assert job.freeze(5) == 7
    for ask in (lambda: job.rescale(3), lambda: job.rescale(3, at=6), lambda: job.update(Rescale(3))):
        with pytest.raises(FlowError, match="assignments are frozen, so that no bin moves before epoch 7, the first"):
            ask()
    later = job.rescale(3, at=7, strategy="sudden")
    job.run(5)
    assert job.owners() == spread(2)
    job.run()
    assert [step.epoch for step in later.steps] == [7]
    job.rescale(4)


def test_epochs_of_prepared_and_running_migrations_cannot_be_frozen(job: SteppedJob):
    with pytest.raises(FlowError, match=r"freeze\(0\): give the number of epochs"):
        job.freeze(0)
    prepared = job.rescale(3, at=5)
    assert job.freeze(3) == 5
    with pytest.raises(FlowError, match=r"cannot be frozen up to epoch 6: migration .* is prepared for epoch 5"):
        job.freeze(4)
    prepared.cancel()
    job.run(3)
    job.rescale(3)
    with pytest.raises(FlowError, match="cannot be frozen while migration"):
        job.freeze(4)


# ── goals and shares ──────────────────────────────────────────────────────────────────────────────────────────────


def test_shares_tell_what_each_partition_has(job: SteppedJob):
    [stage] = job.assignment()
    assert (stage.name, stage.owners, stage.assignment) == ("by user", spread(2).owners, spread(2))
    assert [share.bins for share in stage.partitions] == [128, 128]
    assert max(share.rows_per_s for share in stage.partitions) >= 0
    assert sum(share.bytes for share in stage.partitions) > 0


def test_rebalancing_evens_out_the_measured_bytes(job: SteppedJob):
    job.migrate(Assignment(2, (0,) * 256), strategy="sudden")
    job.run()
    heavy = job.assignment()[0].partitions
    assert heavy[1].bytes == 0
    migration = job.rebalance(measure="bytes", strategy="sudden")
    job.run()
    assert migration.outcome is Outcome.APPLIED
    shares = [share.bytes for share in job.assignment()[0].partitions]
    assert max(shares) / (sum(shares) / 2) <= 1.2
    job.assert_gapless()


def test_a_stage_that_was_not_measured_cannot_be_balanced(tmp_path: Path):
    message = "nothing to rebalance by rows: nothing has been measured yet for 'by user'"
    with stepped_job(tmp_path) as job, pytest.raises(FlowError, match=message):
        job.rebalance(measure="rows")


def test_stages_move_alone_or_together(tmp_path: Path):
    """Operators of a stage share its assignment; stages can be rescaled one by one (M4)."""
    with stepped_job(tmp_path, two=True) as job:
        job.run()
        job.rescale(3, stage="by length", strategy="sudden")
        job.run()
        assert (job.owners(1), job.owners(2)) == (spread(2), rescaled(spread(2), 3))
        job.rescale(4, strategy="batched")
        job.run(4)
        assert job.owners(1).partitions == job.owners(2).partitions == 4
        with pytest.raises(FlowError, match="an assignment is for one stage, and the flow has several: give a dict of"):
            job.migrate(spread(2))
        job.migrations[0].cancel()
        job.migrate({"by user": spread(2), "pass": spread(1)}, strategy="sudden")
        job.run()
        assert (job.owners(1), job.owners(2)) == (spread(2), spread(1))
        job.assert_gapless()


# ── explain ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_explanation_has_steps_bytes_time_and_the_moves_between_partitions(job: SteppedJob):
    explained = job.explain_migration(Rescale(4), strategy="batched", at=9)
    text = str(explained)
    assert "by user: 128 of 256 bins move, 2 → 4 partitions" in text
    assert "batched migration in 64 steps:" in text
    assert "moves 128 bins with about" in text
    assert "begins with epoch 9" in text
    assert "0          ████████████████████████   128  ████████████                64  gives 32 bins (" in text
    assert len(explained.steps) == 64
    assert explained.bytes > 0
    svg = explained.to_svg()
    assert svg.count("<path") == len(set(zip(spread(2).owners, rescaled(spread(2), 4).owners, strict=True)))
    assert "0 gives" in svg
    assert job.owners() == spread(2)
    assert job.history() == []


def test_a_budget_is_explained_by_the_steps_it_would_make(job: SteppedJob):
    one = job.explain_migration(Rescale(4), budget="1 MB")
    assert 1 < len(one.steps) < 20
    assert one.bins == 128


def test_what_is_to_be_loaded_ahead_is_explained_by_larger_steps(job: SteppedJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migration_explanation, "BYTES_PER_S", 1e5)
    ahead, cold = (job.explain_migration(Rescale(4), prewarm=prewarm) for prewarm in (True, False))
    assert len(ahead.steps) == 8
    assert len(cold.steps) > 100


def test_an_unexpectedly_long_epoch_is_followed_by_one_without_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From epoch 4 on everything takes nine times as long: that is no reason to move one bin at a time."""
    committed = Migrations.committed

    def slow_from_epoch_4(self: Migrations, epoch: Epoch, epoch_ms: float, read: int | None = None) -> None:
        committed(self, epoch, 900.0 if epoch >= 4 else 100.0, read)

    monkeypatch.setattr(Migrations, "committed", slow_from_epoch_4)
    with stepped_job(tmp_path) as job:
        job.run(2)
        migration = job.rescale(4)
        job.run(3)
        job.runtime._driver.migrations.begin(job.epoch, job.runtime._driver.committed)  # type: ignore[arg-type]
        assert migration.progress.is_waiting_for == "an epoch without moves, to compare"
        job.run(7)
        assert migration.outcome is Outcome.APPLIED
        assert [step.epoch for step in migration.steps] == [2, 3, 4, 6, 7, 8, 9, 10]
        assert sum(step.bins for step in migration.steps) == 128
        job.assert_gapless()


def test_a_migration_that_compares_epochs_can_be_turned_round_or_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    committed = Migrations.committed
    monkeypatch.setattr(
        Migrations,
        "committed",
        lambda self, epoch, epoch_ms, read=None: committed(self, epoch, 100.0 + 800.0 * (epoch == 3), read),
    )
    with stepped_job(tmp_path) as job:
        job.run(2)
        migration = job.rescale(4)
        job.run(2)
        job.runtime._driver.migrations.begin(job.epoch, job.runtime._driver.committed)  # type: ignore[arg-type]
        assert migration.progress.is_waiting_for == "an epoch without moves, to compare"
        migration.reverse()
        job.run(1)
        assert [(step.epoch, step.bins) for step in migration.steps] == [(2, 1), (3, 2), (4, 1)]
        migration.cancel()
        assert migration.outcome is Outcome.STOPPED
        job.run(1)
        job.assert_gapless()


@pytest.mark.parametrize(("prewarm", "fewest", "most"), [(True, 8, 8), (False, 40, 128)])
def test_what_any_step_takes_is_no_price_of_bins_that_are_loaded_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prewarm: bool, fewest: int, most: int
):
    """A step adds nearly the whole budget to its epoch, however many bins it moves."""
    committed = Migrations.committed

    def longer_with_a_step(self: Migrations, epoch: Epoch, epoch_ms: float, read: int | None = None) -> None:
        committed(self, epoch, 100.0 if self._step is None else 118.0, read)

    monkeypatch.setattr(Migrations, "committed", longer_with_a_step)
    with stepped_job(tmp_path) as job:
        job.run(2)
        migration = job.migrate(Rescale(4), prewarm=prewarm)
        job.run(50)
        if not migration.is_over:
            migration.cancel()
        assert fewest <= len(migration.steps) <= most
        assert migration.is_over
        job.assert_gapless()


# ── losses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_run_is_run_again_with_its_step_and_then_without(job: SteppedJob):
    """Three runs in a row are lost: twice the epoch runs again, then the step is undone."""
    migration = job.rescale(3, strategy="sudden")
    migrations = job.runtime._driver.migrations
    migrations.begin(job.epoch, job.runtime._driver.committed)  # type: ignore[arg-type]  # known by now
    stepped = job.owners()
    assert stepped.partitions == 3
    lost = RunFailure("an executor was lost", is_lost=True)
    assert not migrations.failed(RunFailure("a function failed"))
    for _ in range(2):
        assert [migrations.failed(lost), job.owners()] == [True, stepped]
        migrations.begin(job.epoch, job.runtime._driver.committed)  # type: ignore[arg-type]  # it runs again
        assert job.owners() == stepped
    assert [migrations.failed(lost), job.owners()] == [True, spread(2)]
    assert not migrations.failed(lost)
    assert migration.outcome is Outcome.STOPPED
    assert migration.error is not None
    assert "was undone because runs with it failed 3 times: an executor was lost" in migration.error
    job.run()
    job.assert_gapless()


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_assignments_stay_as_long_as_a_restart_may_need_them_and_steps_sweep_nothing(job: SteppedJob):
    checkpoint = job.runtime.checkpoint

    def named() -> list[Digest]:
        manifests = [checkpoint.manifest(Epoch(job.epoch - back)) for back in (1, 2)]
        return [each.assignments for each in manifests if each is not None]

    def stored() -> set[Digest]:
        return {digest for digest in checkpoint.blobs.digests() if b'"stages":' in checkpoint.blobs.get(digest)}

    live = job.runtime._driver.changes.live()
    job.migrate(Move(dict.fromkeys(range(0, 20, 2), 1)), strategy="fluid")
    for _ in range(10):
        job.run()
        assert {*named()} <= stored()
    assert len(stored()) > 9, "each step has written some"
    assert job.runtime._driver.changes.live() == live
    job.update(Update("count", lambda key, row, state: numbered(key, row, state)))
    job.run(15)
    assert stored() == {*named()}, "when something else is swept, they are swept as well"


# ── executors ─────────────────────────────────────────────────────────────────────────────────────────────────────


def executors(job: SteppedJob, stage: int = 1) -> list[str | None]:
    """Where the partitions of a stage ran."""
    return [share.executor for share in job.assignment()[stage - 1].partitions]


@pytest.mark.long
def test_a_drained_executor_owns_nothing_in_any_stage_and_the_rest_stays(tmp_path: Path):
    """Operators of all stages leave together (B1, B9)."""
    with stepped_job(tmp_path, two=True, partitions=6, executors=3, seed=1) as job:
        with pytest.raises(FlowError, match="it is not known which partitions run on executor '1'"):
            job.drain("1")
        job.run(3)
        leaving = next(name for name in executors(job) if name)
        before = [job.owners(stage) for stage in (1, 2)]
        gone = [{at for at, name in enumerate(executors(job, stage)) if name == leaving} for stage in (1, 2)]
        migration = job.drain(leaving, strategy="batched", prewarm=False)
        job.run(45)
        assert migration.outcome is Outcome.APPLIED
        for stage in (0, 1):
            after = job.owners(stage + 1)
            assert not gone[stage] & set(after.owners)
            pairs = zip(before[stage].owners, after.owners, strict=True)
            assert all(new == old for old, new in pairs if old not in gone[stage])
        with pytest.raises(FlowError, match=f"the partitions on executor '{leaving}' own nothing"):
            job.drain(leaving)
        job.assert_gapless()


@pytest.mark.long
@pytest.mark.parametrize("partitions", [4, 3])
def test_a_prewarmed_step_reads_only_what_has_changed_since(tmp_path: Path, partitions: int):
    """Cold, the step reads all state of the bins; prewarmed, what the last epoch has changed (M13)."""
    read = {}
    for prewarm in (False, True):
        folder = tmp_path / str(prewarm)
        with stepped_job(folder, partitions=3, executors=3, seed=4) as job:
            job.run(20)
            target = job.owners().owners
            goal = Assignment(3, tuple((owner + 1) % 3 for owner in target)) if partitions == 3 else Rescale(partitions)
            migration = job.migrate(goal, strategy="sudden", prewarm=prewarm)
            job.run(14)
            assert migration.outcome is Outcome.APPLIED
            [step] = migration.steps
            assert step.read is not None
            read[prewarm] = step.read
            assert (step.waited > 0) is prewarm
            job.run(2)
            job.assert_gapless()
    assert read[True] < 0.5 * read[False], read


@pytest.mark.long
@pytest.mark.parametrize(("loads", "waits"), [(25, 25), (0, PATIENCE)])
def test_a_step_waits_as_long_as_bins_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: int, waits: int
):
    """One bin an epoch is loaded, until all are; or none at all."""
    left = iter(range(loads, -1, -1)) if loads else itertools.repeat(3)
    now: list[int] = []

    def are_warm(*_: Any) -> bool:
        now[:] = [next(left)]
        return now == [0]

    with stepped_job(tmp_path, partitions=2, executors=2, seed=4) as job:
        job.run(4)
        monkeypatch.setattr(ExecutorWarming, "are_warm", are_warm)
        monkeypatch.setattr(ExecutorWarming, "cold", lambda *_: now[0])
        migration = job.migrate(Assignment(2, tuple(1 - each for each in job.owners().owners)), strategy="sudden")
        job.run(waits + 2)
        assert migration.outcome is Outcome.APPLIED
        assert [step.waited for step in migration.steps] == [waits]
        job.assert_gapless()
