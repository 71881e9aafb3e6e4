"""Loading ahead, message by message: whom the coordinator asks, and what a worker does with what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lmdb
import pytest

from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal, read, replay
from midstream.control.messages import (
    Commit,
    EpochOpened,
    EpochSealed,
    Event,
    Instruction,
    Prefetch,
    Prefetched,
    PrefetchNoted,
    PrefetchRequest,
    PrefetchWanted,
    Received,
    Send,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.control.prefetching import SILENT_EPOCHS
from midstream.engine.clock import ManualClock
from midstream.ids import BinId, Digest, Epoch, ExecutorId, PartitionId, Revision, Run, StageIndex
from midstream.runtime.prefetcher import Portion, Prefetcher
from midstream.state import access as access_module
from midstream.state.access import StateAccess
from midstream.state.files import Author, FileKind, StateFiles, table_of
from midstream.state.lineage import Lineage

STAGE = StageIndex(1)
COUNT = Lineage.start("count")
A, B = ExecutorId("a"), ExecutorId("b")
WANTED = PrefetchRequest(A, STAGE, (BinId(3), BinId(5)), bytes_per_s=1_000)


def opened(epoch: int = 7, prefetch: Sequence[PrefetchRequest] = (), places: bool = True) -> EpochOpened:
    return EpochOpened(
        Epoch(epoch),
        Run(0),
        Revision(1),
        (Digest("p0"), Digest("p1")),
        {STAGE: 2},
        lineages={STAGE: {"count": b"after %d" % (epoch - 1)}},
        prefetch=tuple(prefetch),
        places={STAGE: {PartitionId(0): A, PartitionId(1): B, PartitionId(2): A}} if places else None,
    )


def worker(executor: ExecutorId, pid: int = 1) -> WorkerId:
    return WorkerId("host", pid, executor)


def joined(who: WorkerId) -> Received:
    return Received(b"%d" % who.pid, WorkerJoined(who))


def orders(instructions: Sequence[Instruction]) -> list[tuple[bytes, Epoch]]:
    """To whom prefetches were sent, and for which state."""
    return [
        (each.peer, each.message.epoch)
        for each in instructions
        if isinstance(each, Send) and isinstance(each.message, Prefetch)
    ]


# ── the coordinator ───────────────────────────────────────────────────────────────────────────────────────────────


def test_one_worker_of_the_executor_is_asked_and_again_with_each_epoch():
    coordinator = Coordinator()
    for who in (worker(A, 1), worker(A, 2), worker(B, 3)):
        coordinator.handle(joined(who))
    assert orders(coordinator.handle(opened(7))) == []
    assert orders(coordinator.handle(PrefetchWanted((WANTED,)))) == [(b"1", 6)]
    coordinator.handle(EpochSealed(Epoch(7), Run(0)))
    assert orders(coordinator.handle(opened(8, [WANTED]))) == [(b"1", 7)]
    assert orders(coordinator.handle(PrefetchWanted(()))) == []


def begins(coordinator: Coordinator, epoch: int, who: WorkerId) -> list[tuple[bytes, Epoch]]:
    """A task of this epoch begins in a worker."""
    task = TaskId(Epoch(epoch), Run(0), STAGE, PartitionId(0), who.pid)
    return orders(coordinator.handle(Received(b"client", TaskStarted(task, who))))


def test_the_same_worker_is_asked_as_long_as_tasks_run_in_it():
    """Two workers of an executor would take the bins from each other; seen: a minute for 160 MB, many of them twice."""
    coordinator = Coordinator()
    coordinator.handle(opened(6))
    for pid in (1, 2):
        coordinator.handle(joined(worker(A, pid)))
    coordinator.handle(EpochSealed(Epoch(6), Run(0)))
    asked = []
    for epoch in range(7, 17):
        asked += orders(coordinator.handle(opened(epoch, [WANTED])))
        for pid in (2, 1, 2) if epoch % 2 else (2,):
            asked += begins(coordinator, epoch, worker(A, pid))
        coordinator.handle(EpochSealed(Epoch(epoch), Run(0)))
    assert asked == [(b"1", Epoch(epoch - 1)) for epoch in range(7, 17)]


def test_a_worker_in_which_no_task_runs_any_more_is_replaced():
    coordinator = Coordinator()
    coordinator.handle(joined(worker(A, 1)))
    coordinator.handle(joined(worker(A, 2)))
    asked = []
    for epoch in range(7, 7 + SILENT_EPOCHS + 3):
        asked.append(orders(coordinator.handle(opened(epoch, [WANTED]))))
        asked.append(begins(coordinator, epoch, worker(A, 1 if epoch == 7 else 2)))
        coordinator.handle(EpochSealed(Epoch(epoch), Run(0)))
    silent = [[(b"1", Epoch(epoch - 1))] for epoch in range(7, 7 + SILENT_EPOCHS + 2)]
    last = 7 + SILENT_EPOCHS + 1
    assert asked[0::2] == [*silent, [(b"2", Epoch(last))]]
    assert asked[1::2] == [*([[]] * (SILENT_EPOCHS + 1)), [(b"2", Epoch(last - 1))], []]


def test_an_executor_that_joins_later_is_asked_then():
    coordinator = Coordinator()
    coordinator.handle(opened(7, [WANTED]))
    assert orders(coordinator.handle(joined(worker(B, 1)))) == []
    assert orders(coordinator.handle(joined(worker(A, 2)))) == [(b"2", 6)]
    assert orders(coordinator.handle(joined(worker(A, 3)))) == [], "one of its workers is enough"
    coordinator.handle(Received(b"3", WorkerReleased(worker(A, 3))))
    assert coordinator.executors == {A, B}
    coordinator.handle(Received(b"2", WorkerReleased(worker(A, 2))))
    assert coordinator.executors == {B}


def test_reports_go_to_the_driver_in_any_state():
    report = Prefetched(worker(A), STAGE, Epoch(6), (BinId(3),))
    assert Coordinator().handle(Received(b"1", report)) == [PrefetchNoted(report)]


def test_a_task_is_told_what_ran_beside_it_and_what_its_executor_awaits():
    coordinator = Coordinator()
    coordinator.handle(opened(7, [WANTED]))
    task = TaskId(Epoch(7), Run(0), STAGE, PartitionId(2), 1)

    def order(who: WorkerId | None) -> TaskOrder:
        [sent] = coordinator.handle(Received(b"client", TaskStarted(task, who)))
        assert isinstance(sent, Send)
        assert isinstance(sent.message, TaskOrder)
        return sent.message

    assert (order(worker(A)).beside, order(worker(A)).awaited) == ((0, 2), (3, 5))
    assert (order(worker(B)).beside, order(worker(B)).awaited) == ((1,), ())
    assert order(worker(A)).beside is None, "once for each worker and epoch is enough"
    assert order(WorkerId("host", 1)).beside is None, "nobody knows where it runs"
    assert order(None).beside is None
    coordinator.handle(PrefetchWanted(()))
    assert order(worker(A)).awaited == ()


def test_a_journal_with_prefetches_replays_to_the_same_commit():
    task = TaskId(Epoch(7), Run(0), StageIndex(0), PartitionId(0), 1)
    events: list[Event] = [
        opened(7, [WANTED]),
        joined(worker(A)),
        PrefetchWanted(()),
        Received(b"1", TaskStarted(task, worker(A))),
        Received(b"1", Prefetched(worker(A), STAGE, Epoch(6), (BinId(3),), 10, 0.5, "disk full")),
        Received(b"1", TaskFinished(task, (), {}, {}, {}, state_read=70)),
    ]
    journal, coordinator = Journal(), Coordinator()
    for event in events:
        journal.append(event)
        coordinator.handle(event)
    replayed = replay(read(journal.to_bytes()))
    sealed = EpochSealed(Epoch(7), Run(0))
    [commit] = coordinator.handle(sealed)
    assert [commit] == replayed.handle(sealed)
    assert isinstance(commit, Commit)
    assert (commit.places, commit.state_read) == ({0: {0: A}}, 70)


# ── a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class World:
    """A checkpoint with some epochs of changes to four bins, and an executor without any."""

    def __init__(self, folder: Path) -> None:
        self.files = StateFiles(str(folder / "state"))
        self.state = StateAccess("job", str(folder / "state"), str(folder / "local"))
        self.prefetcher = Prefetcher(self.state, worker(A), ManualClock())
        self.lineages = [Lineage.start("count")]
        for epoch in range(4):
            keys = [bytes([number, 0]) + b"k%03d" % key for number in (1, 3, 5, 7) for key in range(50)]
            author = Author("count", Epoch(epoch), Run(0), PartitionId(0), attempt=0)
            delta = self.files.write(table_of(keys, [b"%d" % epoch] * len(keys)), FileKind.DELTA, author)
            self.lineages.append(self.lineages[-1].after(Epoch(epoch), [delta]))

    def message(self, epoch: int, bins: Sequence[int] = (3, 5)) -> Prefetch:
        lineage = self.lineages[epoch + 1]
        return Prefetch(STAGE, Epoch(epoch), {"count": lineage.encode()}, tuple(map(BinId, bins)), 1_000)

    def work(self) -> list[Prefetched]:
        """All there is to do; the reports."""
        done = iter(self.prefetcher.step, None)
        return [each for each in done if isinstance(each, Prefetched)]

    def at(self, epoch: int) -> frozenset[BinId]:
        return self.state.has(self.lineages[epoch + 1], map(BinId, (1, 3, 5, 7)))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_worker_loads_what_it_is_asked_for_and_then_only_what_is_new(world: World):
    world.prefetcher.take(world.message(2))
    [first] = world.work()
    assert (first.bins, first.epoch, first.error) == ((3, 5), 2, None)
    assert world.state.held(Lineage.start("count")) == {3, 5}
    world.prefetcher.take(world.message(3))
    world.prefetcher.take(world.message(3))
    [second] = world.work()
    assert second.bins == (3, 5)
    assert second.bytes * 3 == pytest.approx(first.bytes, rel=0.05), "one delta, after three"
    world.prefetcher.take(world.message(3))
    [third] = world.work()
    assert (third.bins, third.bytes) == ((3, 5), 0), "asked twice, it has nothing to do"


def test_a_message_about_older_state_than_tasks_use_changes_nothing(world: World):
    with world.state.open(world.lineages[4], [BinId(3)]):
        world.prefetcher.task_begins(Epoch(4))
    world.prefetcher.take(world.message(1))
    assert world.work() == []
    assert world.at(3) == {3}


def test_waiting_messages_are_dropped_when_a_task_begins_with_newer_state(world: World):
    world.prefetcher.take(world.message(1))
    world.prefetcher.task_begins(Epoch(4))
    assert world.work() == []


def test_a_later_message_replaces_what_is_being_loaded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_module, "PORTION_BYTES", 1)  # one bin at a time
    world.prefetcher.take(world.message(1))
    assert isinstance(world.prefetcher.step(), Portion)
    world.prefetcher.take(world.message(3))
    broken_off, done = world.work()
    assert (broken_off.epoch, broken_off.bins) == (1, (3,))
    assert (done.epoch, done.bins) == (3, (3, 5))


def test_bins_that_tasks_take_over_meanwhile_are_left_to_them(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_module, "PORTION_BYTES", 1)
    world.prefetcher.take(world.message(1))
    assert isinstance(world.prefetcher.step(), Portion)
    world.state.open(world.lineages[4], [BinId(5)]).close()  # a task of another process, which is further
    world.work()
    assert world.at(3) == {5}, "it was not taken back"
    assert world.at(1) == {3}


def test_after_an_error_is_reported_the_next_message_is_served(world: World):
    [path] = Path(world.files.location).rglob(f"*{world.lineages[3].entries[-1].file.digest[:8].hex()}*")
    data = path.read_bytes()
    path.unlink()
    world.prefetcher.take(world.message(2))
    [report] = world.work()
    assert report.bins == ()
    assert report.error is not None
    assert "is missing from" in report.error
    path.write_bytes(data)
    world.prefetcher.take(world.message(3))
    assert [(each.bins, each.error) for each in world.work()] == [((3, 5), None)]


@pytest.mark.parametrize("what", ["prefetch", "drop", "has"])
def test_an_unknown_error_of_the_database_does_not_end_the_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
):
    def fail(*_: object) -> None:
        raise lmdb.DiskError("no")

    world.prefetcher.take(world.message(2))
    world.work()
    with monkeypatch.context() as patch:
        patch.setattr(StateAccess, what, fail)
        world.prefetcher.take(world.message(3))
        world.prefetcher.free(world.lineages[4], [BinId(7)])
        errors = [each.error for each in world.work()]
    assert errors == {"prefetch": ["DiskError: no"], "drop": [None], "has": []}[what]
    assert [each.levelname for each in caplog.records] == ([] if what == "prefetch" else ["WARNING"])
    world.prefetcher.take(world.message(3))
    assert [(each.bins, each.error) for each in world.work()] == [((3, 5), None)]


def test_bases_are_closed_only_between_portions(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_module, "PORTION_BYTES", 1)
    world.prefetcher.take(world.message(2))
    assert isinstance(world.prefetcher.step(), Portion)
    with world.prefetcher.resting() as rests:
        assert rests
        world.state.close()
        with world.prefetcher.resting() as rests:
            assert not rests
    assert [each.bins for each in world.work()] == [(3, 5)], "it opens them again"


def test_bins_are_freed_one_by_one_when_nothing_is_to_be_loaded(world: World):
    world.prefetcher.take(world.message(3, bins=(1, 3, 5)))
    world.work()
    world.prefetcher.free(world.lineages[4], [BinId(1), BinId(3), BinId(5)])
    assert world.prefetcher.step() == Portion(0, 1)
    assert world.at(3) == {3, 5}
    world.prefetcher.take(world.message(3, bins=(7,)))
    assert isinstance(world.prefetcher.step(), Portion)
    assert world.at(3) == {3, 5, 7}, "what somebody waits for comes first"
    assert [each.bins for each in world.work()] == [(7,)]
    assert world.at(3) == {7}
    assert not world.prefetcher.has_work.is_set()


def test_bins_that_are_needed_again_before_they_are_freed_stay(world: World):
    """Freed all the same, they would be read again by the task that needs them."""
    world.prefetcher.take(world.message(3, bins=(1, 3, 5, 7)))
    world.work()
    world.prefetcher.free(world.lineages[4], [BinId(1), BinId(3), BinId(5), BinId(7)])
    assert world.prefetcher.step() == Portion(0, 1)
    world.prefetcher.keep("another", [BinId(3), BinId(7)])
    world.prefetcher.keep(world.lineages[4].operator, [BinId(1), BinId(5), BinId(7)])
    world.work()
    assert world.at(3) == {5, 7}
    assert not world.prefetcher.has_work.is_set()


def test_a_bin_that_cannot_be_freed_is_logged_and_the_others_are_freed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    world.prefetcher.take(world.message(3))
    world.work()
    drop = StateAccess.drop

    def refused(state: StateAccess, lineage: Lineage, bins: Sequence[BinId]) -> None:
        if 3 in bins:
            raise OSError("the disk is read-only")
        drop(state, lineage, bins)

    monkeypatch.setattr(StateAccess, "drop", refused)
    world.prefetcher.free(world.lineages[4], [BinId(3), BinId(5)])
    assert world.work() == []
    assert world.at(3) == {3}
    assert "bin 3 of 'count', which no partition here owns, stays: the disk is read-only" in caplog.text
