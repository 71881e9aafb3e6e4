"""The counterpart of Spark's log of offsets: which of its own epochs each source has given. It survives the driver.

A hand-over to other sources goes through the checkpoint, with the code that Spark's log uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from midstream.checkpoint.location import Checkpoint
from midstream.flow.model import Graph
from midstream.ids import Epoch
from midstream.runtime.local.data import LocalData, cut_epochs

__all__ = ["SourceLog"]

_HEAD = "v1\n{}\n"
_NOTHING = "-"


class SourceLog:
    """The log of one run on the local runtime, in which every source begins at its first epoch."""

    def __init__(self, graph: Graph, checkpoint: Checkpoint) -> None:
        self.reading = graph
        """The flow whose sources are read."""
        self.number = checkpoint.identity.log
        """The number of the log; each hand-over makes another one."""
        self._checkpoint = checkpoint
        self._read: dict[Epoch, dict[str, int]] = {}
        """By epoch: how many of its own epochs each source has given by the end of it."""
        self._kept: dict[str, bytes] = {}
        """The positions of sources that were removed, as files."""
        self._cuts: dict[str, tuple[object, list[LocalData]]] = {}
        """By source: what it reads, and its epochs."""

    def rows(self, epoch: Epoch) -> Mapping[str, LocalData] | None:
        """The rows of an epoch by source, the same each time; None if all sources have ended before it."""
        before = self._read.get(Epoch(epoch - 1), {})
        cuts = {name: self._epochs(name) for name in self.reading.sources}
        if epoch not in self._read:
            if all(before.get(name, 0) >= len(epochs) for name, epochs in cuts.items()):
                return None
            self._read[epoch] = {name: min(before.get(name, 0) + 1, len(epochs)) for name, epochs in cuts.items()}
        after = self._read[epoch]
        return {
            name: epochs[before.get(name, 0)] if after[name] > before.get(name, 0) else LocalData([[]])
            for name, epochs in cuts.items()
        }

    def __iter__(self) -> Iterator[tuple[Epoch, Mapping[str, LocalData]]]:
        """The epochs that are to be run, each with its rows, until all sources have ended."""
        while (rows := self.rows(epoch := self._next())) is not None:
            yield epoch, rows

    def nothing(self) -> Mapping[str, LocalData]:
        """No rows of any source."""
        return {name: LocalData([[]]) for name in self.reading.sources}

    def settle(self, graph: Graph) -> None:
        """A driver starts: make sure that the sources of its flow are read, whatever the last driver has done."""
        if self._checkpoint.identity.log != self.number:
            self._load()
        if tuple(sorted(graph.sources)) != self._checkpoint.identity.sources:
            self.exchange(graph)
        self.reading = graph

    def exchange(self, graph: Graph, at: Callable[[str], None] = lambda step: None) -> None:
        """Read the sources of a flow from now on, after the newest epoch. A driver may die at any step."""
        newest = self._newest()
        for epoch in (Epoch(newest - 1), newest):
            if epoch >= 0:
                self._checkpoint.spark_files.write({f"offsets/{epoch}": self._entry(epoch)})
        self._checkpoint.spark_files.write(self._kept)
        self._checkpoint.change_sources(graph.sources, at)
        self._load()
        self.reading = graph

    def _load(self) -> None:
        """Continue from the log in the checkpoint, where it is no longer needed."""
        files = self._checkpoint.spark_files.needed_after(self._newest())
        names = self._checkpoint.identity.sources
        self._read = {
            Epoch(int(name.removeprefix("offsets/"))): dict(
                zip(names, map(_number, data.split(b"\n")[2:]), strict=True)
            )
            for name, data in files.items()
            if name.startswith("offsets/")
        }
        self._kept = {name: data for name, data in files.items() if name.startswith("kept/")}
        self.number = self._checkpoint.identity.log
        self._checkpoint.spark_files.remove()

    def _entry(self, epoch: Epoch) -> bytes:
        read = self._read.get(epoch, {})
        lines = [str(read.get(name) or _NOTHING) for name in self._checkpoint.identity.sources]
        return (_HEAD + "\n".join(lines)).encode()

    def _newest(self) -> Epoch:
        newest = self._checkpoint.newest_manifest()
        return Epoch(-1) if newest is None else newest.epoch

    def _next(self) -> Epoch:
        return Epoch(self._newest() + 1)

    def _epochs(self, name: str) -> list[LocalData]:
        stream = self.reading.payloads[name]
        if name not in self._cuts or self._cuts[name][0] is not stream:
            self._cuts[name] = (stream, [LocalData(epoch) for epoch in cut_epochs(name, stream)])
        return self._cuts[name][1]


def _number(line: bytes) -> int:
    return 0 if line == _NOTHING.encode() else int(line)
