"""What a checkpoint says about itself and about each committed epoch: the identity of its job, and manifests."""

from __future__ import annotations

import msgspec

from midstream.engine.control_order import ControlReport
from midstream.ids import BINS, Digest, Epoch, Revision
from midstream.storage.table_files import SinkFile

__all__ = ["Identity", "Manifest"]


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The flow that owns a checkpoint, and the version of midstream that made it."""

    version: str
    job: str
    flow: str
    sources: tuple[str, ...]
    bins: int = BINS
    """Number of bins of the job's key spaces."""
    timeline: int = 0
    """How often the job was rewound. Local copies of state from before the last time do not count."""
    forked_from: str = ""
    """For a fork: the savepoint that it began with, in words."""
    log: int = 0
    """The number of the folder with Spark's log: a query with other sources gets one of its own."""

    @property
    def spark(self) -> str:
        """The name of the folder of Spark's log."""
        return "spark" if self.log == 0 else f"spark-{self.log}"

    @property
    def copies(self) -> str:
        """The name under which workers keep their copies of the job's state: those of another timeline may hold epochs
        that were taken back, and must not pass for newer ones with the same number."""
        return self.job if self.timeline == 0 else f"{self.job}-{self.timeline}"


class Manifest(msgspec.Struct, frozen=True):
    """The record of a committed epoch: enough for a restart to continue from it."""

    epoch: Epoch
    revision: Revision
    programs: tuple[Digest, ...]
    configuration: Digest
    """The document of the job's configuration: graph and functions."""
    committed_at: float
    rows: dict[str, tuple[int, int]]
    """Per operator: rows in, rows out."""
    lineages: dict[str, bytes] = {}
    """Per operator that keeps state: its encoded lineage."""
    event_times: dict[str, int] = {}
    """Per source: the latest event time seen, in microseconds."""
    offsets: str = ""
    """Identifies the rows of the epoch: a digest of their entry in Spark's log."""
    heard: dict[str, int] = {}
    """Per source: the clock of the last epoch in which it had rows, in microseconds."""
    watermark: int | None = None
    """The watermark after this epoch."""
    files: dict[str, tuple[SinkFile, ...]] = {}
    """Per file sink that got rows: its files, staged or in place already."""
    closing: bool = False
    """Whether this epoch closed all windows, so that no other epoch can follow."""
    assignments: Digest = Digest("")
    """The document with the owner of each bin of each stage; empty: it is part of the configuration's."""
    controls: dict[int, tuple[ControlReport, ...]] = {}
    """By number of a blocking control operation that is complete with this epoch: what its tasks reported."""

    def digests(self) -> frozenset[Digest]:
        """The documents and programs that it names."""
        return frozenset({self.configuration, *self.programs, self.assignments} - {""})
