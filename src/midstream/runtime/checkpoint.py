"""The checkpoint location: whose it is, and what each committed epoch was.

Layout::

    midstream.json        identity: which flow, which sources, which job; written once
    blobs/ab/ab12…        functions, tables and stage programs, by digest
    epochs/0000000007     manifest of epoch 7, written before Spark commits the batch
    journal/0000000008.0  journal of a run of epoch 8 that failed; the newest few are kept
    spark/                Spark's own checkpoint: offsets and commits
"""

from __future__ import annotations

import posixpath
import uuid

import msgspec
import pyarrow.fs as pafs

from midstream.engine.blobs import BlobStore, filesystem_of, spark_path, write_atomically
from midstream.errors import CheckpointError
from midstream.flow.model import Graph, Source
from midstream.ids import Digest, Epoch, Revision, Run
from midstream.version import __version__

FORMAT = 1
KEPT_MANIFESTS = 100
KEPT_JOURNALS = 20


class Identity(msgspec.Struct, frozen=True):
    """Whose checkpoint this is."""

    format: int
    version: str
    job: str
    flow: str
    sources: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a committed epoch was: enough to say from where a restart goes on."""

    epoch: Epoch
    revision: Revision
    programs: tuple[Digest, ...]
    bins: tuple[int, ...]
    committed_at: float
    rows: dict[str, tuple[int, int]]
    """Per operator: rows in, rows out."""


class Checkpoint:
    """The checkpoint location of one flow. :meth:`look` reads and refuses; :meth:`claim` is what first writes.

    Spark numbers a query's sources by position, so a flow whose sources changed cannot go on from old offsets: it is
    refused, as is a flow of another name. Everything else about a flow may change between two lives of a job.
    """

    def __init__(self, location: str, identity: Identity) -> None:
        self.location = location
        self.identity = identity
        self._fs, self._root = filesystem_of(location)
        # Workers have a working directory of their own, so a relative path must not reach them.
        shared = self._root if isinstance(self._fs, pafs.LocalFileSystem) else location
        self.blobs = BlobStore(posixpath.join(shared, "blobs"))

    @property
    def spark_location(self) -> str:
        """Where Spark keeps its own checkpoint."""
        return posixpath.join(spark_path(self.location), "spark")

    @classmethod
    def look(cls, location: str, graph: Graph) -> Checkpoint:
        """The checkpoint of a flow: the one that is there, or a new one for an empty or missing folder."""
        fs, root = filesystem_of(location)
        sources = tuple(sorted(op.name for op in graph.of(Source)))
        path = posixpath.join(root, "midstream.json")
        try:
            found = _read_identity(fs, path, location)
            if found is None:
                _require_empty(fs, root, location)
                found = Identity(FORMAT, __version__, uuid.uuid4().hex, graph.name, sources)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be used: {error}") from error
        _require_same(found, graph.name, sources, location)
        return cls(location, found)

    def claim(self) -> None:
        """Make the location this flow's own. Does nothing if it is already."""
        path = posixpath.join(self._root, "midstream.json")
        if self._fs.get_file_info(path).type == pafs.FileType.NotFound:
            write_atomically(self._fs, path, msgspec.json.encode(self.identity))

    def commit(self, manifest: Manifest) -> None:
        """Write an epoch's manifest; from here on the epoch's results count. Old manifests are removed."""
        write_atomically(self._fs, self._manifest_path(manifest.epoch), msgspec.json.encode(manifest))
        stale = self._manifest_path(Epoch(manifest.epoch - KEPT_MANIFESTS))
        if manifest.epoch >= KEPT_MANIFESTS and self._fs.get_file_info(stale).type != pafs.FileType.NotFound:
            self._fs.delete_file(stale)

    def manifest(self, epoch: Epoch) -> Manifest | None:
        """The manifest of an epoch, if it was committed and not yet removed."""
        path = self._manifest_path(epoch)
        if self._fs.get_file_info(path).type == pafs.FileType.NotFound:
            return None
        with self._fs.open_input_stream(path) as stream:
            return msgspec.json.decode(stream.read(), type=Manifest)

    def keep_journal(self, epoch: Epoch, run: Run, data: bytes) -> str:
        """Keep the journal of a run that failed; returns where. Old ones are removed."""
        folder = posixpath.join(self._root, "journal")
        path = posixpath.join(folder, f"{epoch:010d}.{run}")
        write_atomically(self._fs, path, data)
        kept = sorted(self._fs.get_file_info(pafs.FileSelector(folder)), key=lambda info: info.mtime_ns or 0)
        for stale in kept[:-KEPT_JOURNALS]:
            self._fs.delete_file(stale.path)
        return path

    def _manifest_path(self, epoch: Epoch) -> str:
        return posixpath.join(self._root, "epochs", f"{epoch:010d}")


def _read_identity(fs: pafs.FileSystem, path: str, location: str) -> Identity | None:
    if fs.get_file_info(path).type == pafs.FileType.NotFound:
        return None
    with fs.open_input_stream(path) as stream:
        data = stream.read()
    try:
        return msgspec.json.decode(data, type=Identity)
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"the checkpoint {location!r} is damaged, or was written by another version: midstream.json says {error}"
        ) from error


def _require_empty(fs: pafs.FileSystem, root: str, location: str) -> None:
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"the checkpoint {location!r} is a file; give a folder")
    if info.type == pafs.FileType.NotFound:
        return
    held = sorted(posixpath.basename(entry.path) for entry in fs.get_file_info(pafs.FileSelector(root)))
    if held:
        raise CheckpointError(
            f"the checkpoint {location!r} holds other things ({', '.join(held[:5])}{', …' if len(held) > 5 else ''}) "
            f"and no midstream.json; give an empty folder, or the checkpoint of this flow"
        )


def _require_same(found: Identity, flow: str, sources: tuple[str, ...], location: str) -> None:
    if found.format != FORMAT:
        raise CheckpointError(
            f"the checkpoint {location!r} has format {found.format} (midstream {found.version}); this midstream "
            f"{__version__} reads format {FORMAT}"
        )
    if found.flow != flow:
        raise CheckpointError(
            f"the checkpoint {location!r} belongs to the flow {found.flow!r}, not to {flow!r}; give each flow a "
            f"checkpoint of its own"
        )
    if found.sources != sources:
        raise CheckpointError(
            f"the checkpoint {location!r} was made with the sources {', '.join(found.sources)}; the flow now has "
            f"{', '.join(sources)}. Offsets cannot be matched to other sources: use a new checkpoint, or the "
            f"old sources"
        )
