"""Runs a keyed operator over epochs like a job: partitions own bins, rows come in slices, deltas are committed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from midstream.data.times import EpochTimes
from midstream.engine.aggregation import blocks, partials
from midstream.engine.steps import OperatorInTask
from midstream.ids import BINS, BinId, Epoch, PartitionId, Run
from midstream.state.base import Base
from midstream.state.files import Author, StateFiles
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState

Make = Callable[[TaskState, EpochTimes], OperatorInTask]
Emitted = dict[str, list[dict[str, Any]]]


class Epochs:
    """The committed state of one operator, and the epochs that advance it."""

    def __init__(self, partitions: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = StateFiles(f"{self._folder.name}/checkpoint")
        self._bases = 0
        self._base = self._new_base()
        self.partitions = partitions
        self.lineage = Lineage.start("op")
        self.epoch = 0

    def partition_of(self, bin_id: int) -> int:
        return bin_id * self.partitions // BINS

    def restart(self) -> None:
        """Restart on another host: only the committed files are left."""
        self._base.close()
        self._base = self._new_base()

    def run(self, make: Make, slices: Mapping[int, Sequence[pa.RecordBatch]], times: EpochTimes) -> list[Emitted]:
        """Run one epoch; return the output of each partition, by branch."""
        emitted, deltas, rewrites = [], [], []
        for partition in range(self.partitions):
            author = Author("op", Epoch(self.epoch), Run(0), PartitionId(partition), 0)
            bins = [BinId(number) for number in range(BINS) if self.partition_of(number) == partition]
            with TaskState(self._base, self.lineage, bins) as state:
                emitted.append(rows_of(make(state, times), slices.get(partition, [])))
                delta = state.write_delta(author)
                deltas += [] if delta is None else [delta]
                rewrites += state.write_rewrites(author)
        self.lineage = self.lineage.after(Epoch(self.epoch), deltas, rewrites)
        self.epoch += 1
        return emitted

    def stored(self) -> dict[bytes, bytes]:
        """All committed rows."""
        with self._base.view(self.lineage, [BinId(number) for number in range(BINS)]) as view:
            table = view.table(BinId(number) for number in range(BINS))
        return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))

    def close(self) -> None:
        self._base.close()
        self._folder.cleanup()

    def _new_base(self) -> Base:
        self._bases += 1
        return Base(f"{self._folder.name}/base-{self._bases}", "op", self._files)


def rows_of(operator: OperatorInTask, slices: Sequence[pa.RecordBatch]) -> Emitted:
    """The output of an operator during slices, and at the end."""
    emitted: Emitted = {}
    for results in _results(operator, slices):
        for branch, batch in results.items():
            emitted.setdefault(branch, []).extend(batch.to_pylist())
    return emitted


def _results(operator: OperatorInTask, slices: Sequence[pa.RecordBatch]) -> Iterator[Mapping[str, pa.RecordBatch]]:
    for batch in slices:
        yield operator.entries[0](batch)
    if operator.finish is not None:
        yield from operator.finish()


@contextmanager
def epochs(partitions: int = 1) -> Iterator[Epochs]:
    """An operator without state."""
    made = Epochs(partitions)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def small_blocks(rows: int = 3) -> Iterator[None]:
    """Use blocks and tallies so small that a test's epochs have many of them."""
    with (
        patch.object(blocks, "BLOCK", rows),
        patch.object(partials, "_COMPACT_BYTES", 0),
        patch.object(partials, "_COMPACT_LEAST", 2),
    ):
        yield


def cut(batch: pa.RecordBatch, sizes: Sequence[int]) -> list[pa.RecordBatch]:
    """The batch in slices of these sizes, and the rest."""
    slices, at = [], 0
    for size in sizes:
        slices.append(batch.slice(at, size))
        at += slices[-1].num_rows
    return [*slices, batch.slice(at)]
