"""Only files that no restart needs are removed, and a failure to remove them never stops a job."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from midstream import Flow, ListSource, MemorySink, Update, agg
from midstream.checkpoint.committed_state import CommittedState
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.journals import KEPT_JOURNALS
from midstream.checkpoint.location import KEPT_MANIFESTS, Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.checkpoint.sweeper import RETRY_EVERY, Sweeper, SweepThread
from midstream.data.times import Watermarks
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run
from midstream.metrics import SweepStats
from midstream.state.files import Author, FileKind, FileRef, table_of
from midstream.state.lineage import Lineage
from midstream.storage.blobs import Blob
from midstream.testing import ChangeAt, Faults, run_local

EPOCHS = 120


def counting(out: Any, epochs: int = EPOCHS) -> Flow:
    flow = Flow("counting")
    words = flow.source("words", ListSource([[{"word": w} for w in "abcde"]] * epochs, "word string"))
    words.map("m", plain).key_by("by word", "word").aggregate("count", n=agg.count()).sink("out", out)
    return flow


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return row


@pytest.mark.long
def test_only_files_of_the_last_two_committed_states_are_left(tmp_path: Path) -> None:
    out = MemorySink()
    flow = counting(out)
    # Attempts that die leave files that no manifest refers to; full sweeps find them.
    run_local(flow, checkpoint=str(tmp_path), faults=Faults(crash=0.05, speculate=0.05))

    checkpoint = Checkpoint.of_any_flow(str(tmp_path))
    manifests = [checkpoint.manifest(epoch) for epoch in (EPOCHS - 2, EPOCHS - 1)]  # type: ignore[arg-type]
    needed = {name for manifest in manifests for name in CommittedState.of(flow.graph, manifest).files()}
    left = set(checkpoint.states.names())
    assert needed <= left
    swept = {name for name in left - needed if int(name.split("/")[1][:10]) < EPOCHS - 21}
    assert swept == set(), "old orphans are gone"
    assert len(left) < EPOCHS
    assert sorted(int(path.name) for path in (tmp_path / "epochs").iterdir()) == list(
        range(EPOCHS - KEPT_MANIFESTS, EPOCHS)
    )
    assert {row["word"]: row["n"] for row in read_state(str(tmp_path), "count").to_pylist()} == dict.fromkeys(
        "abcde", EPOCHS
    )


# ── files that cannot be removed ──────────────────────────────────────────────────────────────────────────────────


class Stubborn(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """A store that may refuse to remove files, like one with a retention policy."""

    protocol = "stubborn"
    cachable = False
    refuses: ClassVar[Callable[[str], bool]] = staticmethod(lambda path: False)

    def rm_file(self, path: str) -> None:
        if type(self).refuses(path):
            raise PermissionError(13, "the policy forbids it", path)
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.rm_file(path)


fsspec.register_implementation("stubborn", Stubborn, clobber=True)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    yield
    Stubborn.refuses = staticmethod(lambda path: False)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def refuse(path: str) -> bool:
    return True


def updates(count: int) -> list[ChangeAt]:
    def update(number: int) -> Update:
        return Update("m", lambda row: {**row, "word": row["word"]} if number else row)

    return [ChangeAt.of(number, update(number)) for number in range(1, count + 1)]


def names_below(folder: str) -> set[str]:
    return {path.split("/job/", 1)[1] for path in MemoryFileSystem.store if f"/job/{folder}/" in path}


@pytest.mark.parametrize("lifted_at", [45, None])
def test_a_job_continues_if_nothing_can_be_removed(lifted_at: int | None, caplog: pytest.LogCaptureFixture):
    counts: dict[int, pa.Table] = {}

    def keep(table: pa.Table, epoch: int) -> None:
        if epoch == lifted_at:
            Stubborn.refuses = staticmethod(lambda path: False)
        counts[epoch] = table

    Stubborn.refuses = staticmethod(refuse)
    flow = counting(keep, 60)
    with caplog.at_level(logging.INFO, "midstream"):
        run = run_local(flow, checkpoint="stubborn://job", changes=updates(15))
    last = {row["word"]: row["n"] for row in counts[59].to_pylist()}
    assert (len(counts), last) == (60, dict.fromkeys("abcde", 60)), "epochs continued"
    assert len([record for record in run.history if record.outcome == "applied"]) == 15

    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for state files, one for blobs; not one per epoch"
    assert all("could not be removed" in record.message and "policy forbids" in record.message for record in warnings)
    sweep = run.metrics.sweep
    assert sweep.failed > 10
    assert "policy forbids it" in str(sweep.error)

    checkpoint = Checkpoint.of_any_flow("stubborn://job")
    kept = [CommittedState.of(flow.graph, checkpoint.manifest(Epoch(epoch))) for epoch in (58, 59)]
    needed = {f"state/{name}" for committed in kept for name in committed.files()}
    blobs = len(names_below("blobs"))
    if lifted_at is None:
        assert sweep.overdue > 10
        assert sweep.removed == 0
        assert blobs > 30, "each change has stored a function and programs"
    else:
        assert sweep.overdue == 0, "all were tried again"
        assert names_below("state") == needed
        assert blobs < 25
        assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [
            "the files that could not be removed from 'stubborn://job' are now removed"
        ]


class World:
    """A checkpoint, and the committed states of a job that writes one state file in each epoch and merges none."""

    def __init__(self, folder: Path) -> None:
        flow = counting(MemorySink(), 1)
        self.checkpoint = Checkpoint.look(str(folder), flow.graph)
        self.checkpoint.claim()
        self.sweeper = Sweeper(self.checkpoint)
        self.files: list[FileRef] = []

    def write(self, epoch: int) -> str:
        author = Author("count", Epoch(epoch), Run(0), PartitionId(0), 0)
        ref = self.checkpoint.states.write(table_of([bytes([epoch, 0])], [b"1"]), FileKind.DELTA, author)
        self.files.append(ref)
        return ref.name

    def commit(
        self, epoch: int, *needed: int, live: frozenset[Any] = frozenset(), samples: tuple[str, ...] = ()
    ) -> None:
        """Commit a state that refers to the files written in some epochs."""
        lineage = Lineage.start("count")
        for number in needed:
            [ref] = [ref for ref in self.files if ref.epoch == number]
            lineage = lineage.after(Epoch(number), [ref])
        committed = CommittedState(Epoch(epoch), {"count": lineage}, Watermarks({}))
        self.sweeper.after(committed, live=live, samples=samples)

    def left(self) -> list[int]:
        return [int(name.split("/")[1][:10]) for name in self.checkpoint.states.names()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.checkpoint.release()


def test_a_file_that_cannot_be_removed_is_counted_and_removed_later(world: World, tmp_path: Path):
    for epoch in range(3):
        world.write(epoch)
    path = tmp_path / "state" / world.files[0].name
    world.commit(0, 0)
    world.sweeper.sweep()
    world.commit(1, 1)
    world.sweeper.sweep()
    path.unlink()
    path.mkdir()
    (path / "something").touch()
    world.commit(2, 2)
    world.sweeper.sweep()
    stats = world.sweeper.stats
    assert (stats.removed, stats.failed, stats.overdue) == (0, 1, 1)
    assert path.name in str(stats.error)
    assert path.is_dir()

    shutil.rmtree(path)
    path.touch()
    for _ in range(RETRY_EVERY):
        world.sweeper.sweep()
    stats = world.sweeper.stats
    assert (stats.removed, stats.failed, stats.overdue) == (1, 1, 0)
    assert not path.exists()
    assert world.left() == [1, 2]


def test_files_of_the_last_two_committed_states_and_running_tasks_stay(world: World):
    for epoch in range(5):
        world.write(epoch)
    world.commit(0, 0)
    world.commit(1, 0, 1)
    world.sweeper.sweep()
    assert world.left() == [0, 1, 2, 3, 4], "the others are of later epochs, which are still running"
    world.commit(2, 2)
    world.sweeper.sweep()
    assert world.left() == [0, 1, 2, 3, 4], "a crash may go back to epoch 1"
    world.commit(3, 3)
    world.sweeper.sweep()
    assert world.left() == [2, 3, 4]


def test_files_of_the_newest_epoch_stay_even_if_nothing_refers_to_them(world: World):
    # Until Spark has moved on, the newest epoch may run again, and attempts may still be writing.
    for epoch in range(3):
        world.write(epoch)
    world.commit(0, 0)
    world.commit(1, 0)
    world.sweeper.sweep()
    assert world.left() == [0, 1, 2], "1 is a file of an attempt that does not count"
    world.commit(2, 0)
    for _ in range(2):  # a new driver looks through the folder, and finds what no manifest refers to
        world.sweeper = Sweeper(world.checkpoint)
        world.commit(1, 0)
        world.commit(2, 0)
        world.sweeper.sweep()
    assert world.left() == [0, 2], "2 may still be needed"


def test_files_stay_while_functions_are_tried_on_them(world: World):
    names = [world.write(epoch) for epoch in range(4)]
    world.commit(0, 0, samples=(names[0],))
    world.sweeper.sweep()
    with world.sweeper.holding([names[0]]):
        for epoch in (1, 2, 3):
            world.commit(epoch, epoch, samples=(names[1],))
            world.sweeper.sweep()
        assert world.left() == [0, 1, 2, 3], "0 is held, 1 is the newest sample"
    world.sweeper.sweep()
    assert world.left() == [1, 2, 3]
    world.commit(3, 3, samples=(names[3],))
    world.sweeper.sweep()
    assert world.left() == [3]


def test_old_manifests_and_journals_are_removed_and_recent_ones_kept(world: World, tmp_path: Path):
    for epoch in range(KEPT_MANIFESTS + 5):
        world.checkpoint.commit(Manifest(Epoch(epoch), Revision(1), (), Digest(""), 0.0, {}))
        world.checkpoint.journals.keep(Epoch(epoch), Run(0), b"x")
    world.sweeper.after_failure()
    world.commit(KEPT_MANIFESTS + 4)
    world.sweeper.sweep()
    assert sorted(int(path.name) for path in (tmp_path / "epochs").iterdir()) == list(range(5, KEPT_MANIFESTS + 5))
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        f"{epoch:010d}.0" for epoch in range(KEPT_MANIFESTS + 5 - KEPT_JOURNALS, KEPT_MANIFESTS + 5)
    ]


def test_a_folder_that_cannot_be_listed_is_listed_later(world: World, tmp_path: Path):
    (tmp_path / "changes").rmdir()
    (tmp_path / "changes").write_text("not a folder")
    garbage = world.checkpoint.blobs.put(Blob.of(b"garbage"))
    world.commit(0)
    world.sweeper.sweep()
    assert (world.sweeper.stats.failed, world.sweeper.stats.overdue) == (1, 1)
    assert garbage in world.checkpoint.blobs.digests(), "without the records it is unknown which ones are needed"
    (tmp_path / "changes").unlink()
    for _ in range(RETRY_EVERY):
        world.sweeper.sweep()
    assert world.sweeper.stats == SweepStats(1, 1, 0, world.sweeper.stats.error)
    assert world.checkpoint.blobs.digests() == set()


def test_blobs_are_removed_unless_in_use_or_about_to_be(world: World, tmp_path: Path):
    blobs = world.checkpoint.blobs
    run, manifest, old, prepared = (blobs.put(Blob.of(data)) for data in (b"run", b"manifest", b"old", b"prepared"))
    document = blobs.put(Blob.of(b"document"))
    (tmp_path / "blobs" / old[:2] / f"{old}.123.tmp").write_bytes(b"half")
    world.checkpoint.commit(Manifest(Epoch(0), Revision(1), (manifest,), document, 0.0, {}))
    with blobs.holds.preparing():
        blobs.put(Blob.of(b"prepared"))  # it existed before
        world.commit(0, live=frozenset({run}))
        assert world.sweeper.sweep(), "some were removed"
        assert blobs.digests() == {run, manifest, document, prepared}
        assert not world.sweeper.sweep()
    world.commit(1, live=frozenset({run}))
    assert world.sweeper.sweep(), "the preparation led to no record"
    assert blobs.digests() == {run, manifest, document}
    assert not list((tmp_path / "blobs").rglob("*.tmp"))


def test_background_sweeping_blocks_nothing_and_ends_with_the_job():
    is_removing, may_go_on = threading.Event(), threading.Event()

    def block(path: str) -> bool:
        is_removing.set()
        assert may_go_on.wait(60)
        return False

    location = Checkpoint.look("stubborn://job", counting(MemorySink(), 1).graph)
    location.claim()
    stale = location.blobs.put(Blob.of(b"stale"))
    sweeper = Sweeper(location)
    thread = SweepThread(sweeper)
    Stubborn.refuses = staticmethod(block)
    sweeper.after(CommittedState(Epoch(0), {}, Watermarks({})), live=frozenset())
    thread.wake()
    assert is_removing.wait(60)
    for epoch in range(1, 4):  # epochs are committed while a file is being removed
        sweeper.after(CommittedState(Epoch(epoch), {}, Watermarks({})), live=frozenset())
        thread.wake()
    assert sweeper.stats.removed == 0
    may_go_on.set()
    thread.close()
    assert stale not in location.blobs.digests()
    assert [each.name for each in threading.enumerate() if each.name == "midstream-sweeper"] == []
