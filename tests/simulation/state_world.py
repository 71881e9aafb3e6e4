"""A small world for state: a checkpoint location, hosts with bases, failing epochs, and a dict with the true state.

``world(rng, steps)`` does random things in random order and compares everything that can be read with the dict. All
thresholds are small, so that snapshots, merges and growth happen all the time.

``python -m tests.simulation.state_world --seeds 500`` takes a few minutes. A failing seed is printed, and can be
replayed alone: ``--start SEED --seeds 1``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from midstream.data.key_space import NARROW, KeySpace
from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.state import base as base_module
from midstream.state import file_index as index_module
from midstream.state import files as files_module
from midstream.state import lineage as lineage_module
from midstream.state import mapped as mapped_module
from midstream.state import task as task_module
from midstream.state.base import Base
from midstream.state.files import Author, FileRef, StateFiles
from midstream.state.garbage import garbage
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage, Rewrite
from midstream.state.task import TaskState

OPERATOR = "count"
SPACES = (KeySpace(1), KeySpace(16), KeySpace(256), KeySpace(4096))
KEPT = 3  # manifests from which a restart may continue

Truth = dict[bytes, bytes]


@contextmanager
def small_thresholds() -> Iterator[None]:
    with (
        patch.object(lineage_module, "MIN_ROWS", 12),
        patch.object(lineage_module, "MERGED_AT_ONCE", 3),
        patch.object(lineage_module, "MAX_ENTRIES", 6),
        patch.object(lineage_module, "SMALL_REWRITE", 30),
        patch.object(mapped_module, "FIRST_SIZE", 1 << 20),
        patch.object(base_module, "_TURN", 5),
        patch.object(base_module, "_LIGHT", 20_000),
        patch.object(files_module, "BLOCK", 30_000),
        patch.object(task_module, "HELD_BYTES", 2_000),
        patch.object(index_module, "BLOCK", 30_000),
    ):
        yield


class World:
    """Everything that outlives a task, and the events that affect it."""

    def __init__(self, rng: random.Random, folder: Path, hosts: int = 2, space: KeySpace = NARROW) -> None:
        self.rng = rng
        self.folder = folder
        self.space = space
        last = space.bins - 1
        self.bins = tuple(BinId(number) for number in sorted({0, min(7, last), min(8, last), last}))
        self.keys = sorted(
            space.prefix(number, namespace) + name
            for number in self.bins
            for namespace in (Namespace.VALUE, Namespace.LIST, Namespace.EVENT_TIMER)
            for name in (b"", b"\x00", b"a", b"ab", b"b")
        )
        self.files = StateFiles(str(folder / "checkpoint"), space=space)
        self.lineages = [Lineage.start(OPERATOR, space.bins)]
        self.truths: list[Truth] = [{}]
        self.bases: dict[int, Base] = {}
        self.hosts = hosts
        self.run = 0
        self.attempts = 0
        self.story: list[str] = []

    def live(self, steps: int) -> None:
        """Do ``steps`` random things, and check everything at the end."""
        things: list[Callable[[], None]] = [
            *[self.epoch] * 8,
            self.abandoned_epoch,
            self.commit_again,
            self.look,
            self.look_back,
            self.lose_base,
            self.stale_base,
            self.foreign_base,
            self.damaged_base,
            self.restart_worker,
            self.collect_garbage,
            *[self.prefetch] * 2,
            self.drop,
        ]
        with small_thresholds():
            try:
                for _ in range(steps):
                    thing = self.rng.choice(things)
                    self.story.append(thing.__name__)
                    thing()
                self.look()
                self.collect_garbage()
                self.look_back()
            finally:
                for base in self.bases.values():
                    base.close()

    # Events within an epoch

    def epoch(self) -> None:
        """Tasks change state, some of them more than once or in vain, and the epoch is committed."""
        deltas, rewrites, truth = self._run_tasks()
        epoch = Epoch(self.lineages[-1].epoch + 1)
        lineage = self.lineages[-1].after(epoch, deltas, rewrites)
        self.lineages.append(Lineage.decode(lineage.encode()))
        self.truths.append(truth)

    def abandoned_epoch(self) -> None:
        """The epoch is abandoned after any part of its work; it will run again."""
        self._run_tasks()
        self.run += 1

    def commit_again(self) -> None:
        """The driver dies between manifest and commit: the epoch runs again, with another outcome."""
        if len(self.lineages) < 2:
            return
        if self.rng.random() < 0.7:
            self.look()  # a base uses the manifest that is about to be replaced
        del self.lineages[-1], self.truths[-1]
        self.epoch()

    def _run_tasks(self) -> tuple[list[FileRef], list[Rewrite], Truth]:
        partitions = self.rng.randint(1, 3)
        owner = {number: self.rng.randrange(partitions) for number in self.bins}
        deltas: list[FileRef] = []
        rewrites: list[Rewrite] = []
        truth = dict(self.truths[-1])
        for partition in range(partitions):
            bins = [number for number in self.bins if owner[number] == partition]
            outcomes = [self._attempt(partition, bins) for _ in range(self.rng.choice([1, 1, 1, 2, 3]))]
            delta, wanted, changes = self.rng.choice(outcomes)
            if delta is not None:
                deltas.append(delta)
            rewrites += wanted
            for key, value in changes.items():
                if value is None:
                    truth.pop(key, None)
                else:
                    truth[key] = value
        return deltas, rewrites, truth

    def _attempt(
        self, partition: int, bins: list[BinId]
    ) -> tuple[FileRef | None, list[Rewrite], dict[bytes, bytes | None]]:
        self.attempts += 1
        epoch = Epoch(self.lineages[-1].epoch + 1)
        author = Author(OPERATOR, epoch, Run(self.run), PartitionId(partition), self.attempts)
        own = [key for key in self.keys if self.space.bin_of(key) in bins]
        seen = {key: value for key, value in self.truths[-1].items() if self.space.bin_of(key) in bins}
        changes: dict[bytes, bytes | None] = {}
        with TaskState(self._base(), self.lineages[-1], bins) as state:
            for _ in range(self.rng.randint(0, 4)):
                self._check(state, seen, own, bins)
                keys = self.rng.sample(own, min(len(own), self.rng.randint(0, 8)))
                values = [self._value() for _ in keys]
                if self.rng.random() < 0.3:
                    state.delete_many(keys)
                    changes.update(dict.fromkeys(keys))
                    for key in keys:
                        seen.pop(key, None)
                else:
                    state.put_many(keys, values)
                    changes.update(zip(keys, values, strict=True))
                    seen.update(zip(keys, values, strict=True))
            self._check(state, seen, own, bins)
            rewrites = state.write_rewrites(author)
            return state.write_delta(author), rewrites, changes

    def _value(self) -> bytes:
        return self.rng.choice([b"", b"%d" % self.rng.randrange(100), bytes(self.rng.choice([5000, 60_000]))])

    # Checks

    def _check(self, state: TaskState, seen: Truth, own: list[bytes], bins: list[BinId]) -> None:
        assert state.get_many(own) == [seen.get(key) for key in own], self.story
        for number in bins:
            namespace = self.rng.choice([Namespace.VALUE, Namespace.LIST, Namespace.EVENT_TIMER])
            start, stop = self.rng.choice([(b"", None), (b"a", None), (b"", b"ab"), (b"a", b"a"), (b"\x00", b"b")])
            prefix = self.space.prefix(number, namespace)
            expected = [
                (key, value)
                for key, value in sorted(seen.items())
                if key.startswith(prefix)
                and key[len(prefix) :] >= start
                and (stop is None or key[len(prefix) :] < stop)
            ]
            assert list(state.scan(number, namespace, start, stop)) == expected, self.story

    def look(self) -> None:
        """Any host sees the committed state."""
        self._look(self._base(), len(self.lineages) - 1)

    def look_back(self) -> None:
        """A new host can continue from every kept manifest."""
        for index in range(max(0, len(self.lineages) - KEPT), len(self.lineages)):
            folder = self.folder / "new host"
            base = Base(str(folder), OPERATOR, self.files)
            self._look(base, index)
            base.close()
            shutil.rmtree(folder)

    def _look(self, base: Base, index: int) -> None:
        lineage, truth = self.lineages[index], self.truths[index]
        with base.view(lineage, self.bins) as view:
            rows = view.table(self.bins)
            found = dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
            assert found == truth, self.story
            for number in self.bins:
                assert view.count(number) == sum(self.space.bin_of(key) == number for key in truth), self.story
        assert base.catch_up(lineage, self.bins) == 0

    # Events that affect bases and files

    def prefetch(self) -> None:
        """A host loads some bins ahead of time, in part or at a lineage that is older; sometimes it is killed at it."""
        base = self._base()
        lineage = self.rng.choice(self.lineages[-2:])
        left: Sequence[BinId] = self.rng.sample(self.bins, self.rng.randint(0, len(self.bins)))
        turns = self.rng.choice([1, 2, 5, 1000])
        with stopped_after(turns):
            for _ in range(self.rng.choice([1, 10])):
                left = base.prefetch(lineage, left, self.rng.choice([1, 1000, 1 << 20])).left

    def drop(self) -> None:
        """A host drops some bins; sometimes it is killed at it."""
        base = self._base()
        bins = self.rng.sample(self.bins, self.rng.randint(0, len(self.bins)))
        with stopped_after(self.rng.choice([1, 2, 1000])):
            base.drop(bins)
            assert not set(bins) & base.positions().keys(), self.story
            base.compact()

    def lose_base(self) -> None:
        """The folder vanishes, sometimes while in use."""
        host = self.rng.randrange(self.hosts)
        if self.rng.random() < 0.5 and host in self.bases:
            self.bases.pop(host).close()
        shutil.rmtree(self._folder(host), ignore_errors=True)

    def stale_base(self) -> None:
        """A host comes back with an old base."""
        host = self.rng.randrange(self.hosts)
        if host in self.bases:
            self.bases.pop(host).close()
        kept = self.folder / f"backup {host}"
        folder = self._folder(host)
        if kept.exists() and self.rng.random() < 0.5:
            shutil.rmtree(folder, ignore_errors=True)
            kept.rename(folder)
        elif folder.exists():
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)

    def foreign_base(self) -> None:
        """Another operator used the folder."""
        host = self.rng.randrange(self.hosts)
        if host in self.bases:
            self.bases.pop(host).close()
        Base(str(self._folder(host)), "another", self.files).close()

    def damaged_base(self) -> None:
        """The environment's file is truncated, or its beginning overwritten."""
        host = self.rng.randrange(self.hosts)
        if host in self.bases:
            self.bases.pop(host).close()
        for path in self._folder(host).glob("*/data.mdb"):
            if self.rng.random() < 0.5:
                with path.open("r+b") as file:
                    file.truncate(self.rng.choice([0, 10, 5000, path.stat().st_size - 1]))
            else:
                with path.open("r+b") as file:
                    file.write(self.rng.choice([bytes(8192), b"\xff" * 8192, b"not a database" * 600]))

    def restart_worker(self) -> None:
        """The process ends; the next one finds the base unchanged."""
        host = self.rng.randrange(self.hosts)
        if host in self.bases:
            self.bases.pop(host).close()

    def collect_garbage(self) -> None:
        """Files that no restart can need are removed."""
        kept = self.lineages[-KEPT:]
        self.files.remove(garbage(self.files.names(), kept, settled=kept[-1].epoch))
        needed = {entry.file.name for lineage in kept for entry in lineage.entries}
        left = set(self.files.names())
        assert needed <= left, self.story
        # Files that are neither needed nor garbage were written by an epoch that may still be running.
        assert all(f"/{kept[-1].epoch + 1:010d}-" in name for name in left - needed), self.story

    def _base(self) -> Base:
        host = self.rng.randrange(self.hosts)
        if host not in self.bases:
            self.bases[host] = Base(str(self._folder(host)), OPERATOR, self.files)
        return self.bases[host]

    def _folder(self, host: int) -> Path:
        return self.folder / f"host {host}"


class Killed(Exception):
    """The process is killed between two turns of its work in the background."""


@contextmanager
def stopped_after(turns: int) -> Iterator[None]:
    left = [turns]
    real = Base._in_turn

    def in_turn(self: Base, change: Any, room: int = 0) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return real(self, change, room)

    with patch.object(Base, "_in_turn", in_turn), suppress(Killed):
        yield


def world(rng: random.Random, steps: int, space: KeySpace | None = None) -> World:
    """A world after random events; without a space it is chosen at random."""
    with tempfile.TemporaryDirectory() as folder:
        lived = World(rng, Path(folder), space=rng.choice(SPACES) if space is None else space)
        lived.live(steps)
    return lived


def main() -> int:
    """Run seeds one after the other; the exit code tells whether one failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=500, help="how many seeds to run (default: %(default)s)")
    options.add_argument("--start", type=int, default=0, help="the first seed (default: %(default)s)")
    options.add_argument("--steps", type=int, default=60, help="events per seed (default: %(default)s)")
    args = options.parse_args()
    for seed in range(args.start, args.start + args.seeds):
        try:
            world(random.Random(seed), args.steps)
        except Exception:
            print(f"\nseed {seed} failed; again: python -m tests.simulation.state_world --start {seed} --seeds 1")
            traceback.print_exc(file=sys.stdout)
            return 1
    print(f"{args.seeds} seeds passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
