"""The part of its stage's state that each task is sent: that of its own bins, on which all that it does with state
depends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from midstream.data.key_space import KeySpace
from midstream.ids import BinId, Epoch, PartitionId
from midstream.planner.assignment import Assignment
from midstream.state.files import FileRef
from midstream.state.lineage import Lineage, Position, Rewrite
from midstream.state.lineage_shares import LineageShares


def file(name: str, bins: Sequence[int], counts: list[int], space: KeySpace) -> FileRef:
    digest = f"{name:0>16}".encode()[-16:]
    whole = f"count/0000000000-0-0-0-delta-{digest.hex()[:16]}.arrow"
    return FileRef(whole, 100, digest, sum(counts), space.pack(map(BinId, bins)), tuple(counts))


def grown(seed: int, bins: int, epochs: int) -> Lineage:
    """A history as tasks make it: owners of bins change, bins are rewritten alone and several deltas into one."""
    rng, space = random.Random(seed), KeySpace(bins)
    lineage = Lineage.start("count", bins)
    for epoch in range(epochs):
        tasks = rng.randint(1, 5)
        rewrites = []
        for task in range(tasks):
            own = [BinId(each) for each in range(bins) if each % tasks == task]
            rewrite = rng.random() < 0.3 and [each for each in own if rng.random() < 0.5]
            if rewrite and (replaced := lineage.files_of(rewrite)):
                kept = sorted(rng.sample(rewrite, rng.randint(1, len(rewrite))))
                ref = file(f"s{epoch}-{task}", kept, [rng.randint(1, 900) for _ in kept], space)
                digests = tuple(each.digest for each in replaced)
                rewrites.append(Rewrite(ref, space.pack(rewrite), digests, complete=True))
        deltas = []
        for task in range(tasks):
            touched = [each for each in range(bins) if each % tasks == task and rng.random() < 0.4]
            if touched:
                counts = [rng.choice((1, 5, 700)) for _ in touched]
                deltas.append(file(f"d{epoch}-{task}", touched, counts, space))
        lineage = lineage.after(Epoch(epoch), deltas, rewrites)
    return lineage


@pytest.mark.parametrize("seed", range(20))
def test_a_task_does_the_same_with_its_share_as_with_the_whole_lineage(seed: int):
    rng = random.Random(-seed)
    bins, partitions = rng.choice((16, 512)), rng.randint(1, 6)
    lineage = grown(seed, bins, epochs=rng.randint(1, 40))
    assignment = Assignment(partitions, tuple(rng.randrange(partitions) for _ in range(bins)))
    shares = LineageShares({"count": lineage.encode()}, assignment)
    for partition in map(PartitionId, range(partitions)):
        own = assignment.owned_by(partition)
        [(operator, data)] = shares.of(partition).items()
        share = Lineage.decode(data)
        assert (operator, share.operator, share.epoch) == ("count", "count", lineage.epoch)
        assert share.positions(own) == lineage.positions(own)
        some = rng.choice(own).__index__() if own else 0
        for held in ({}, {each: lineage.position(each) for each in own}, {BinId(some): Position(b"unknown")}):
            assert share.missing(held, own).clear == lineage.missing(held, own).clear
            mine, all_ = share.missing(held, own).apply, lineage.missing(held, own).apply
            assert [(step.file, step.positions) for step in mine] == [(step.file, step.positions) for step in all_]
        assert share.due_for_snapshot(own, touched=10) == lineage.due_for_snapshot(own, touched=10)
        epoch = Epoch(lineage.epoch + 1)
        assert share.due_for_merging(own, epoch, partition) == lineage.due_for_merging(own, epoch, partition)
        assert share.files_of(own) == lineage.files_of(own)
