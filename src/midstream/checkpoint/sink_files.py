"""The files of a :class:`~midstream.FileSink`: how staged files become visible, and how small ones are merged.

Tasks stage files (:mod:`midstream.storage.table_files`); an epoch's manifest names those that count. *After* the
manifest is written they are renamed to their places: so a reader never sees rows of an epoch that is not committed, and
a restart finishes what a crash interrupted, because the manifest still names the files.

``_committed.json`` in the sink's folder says up to which epoch all files are in place, and which merge is under way.
:func:`committed_files` goes by it. Readers that only list the folder may see a part of the newest epoch, or the rows of
a merge twice, for the milliseconds that renaming takes.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import pyarrow.fs as pafs
import pyarrow.parquet as papq

from midstream.errors import CheckpointError
from midstream.storage import disk
from midstream.storage.blobs import filesystem_of, is_local, remove_file, write_atomically
from midstream.storage.table_files import STAGED, SinkFile, epochs_of, file_name

__all__ = ["COMMITTED", "SinkFolder", "SinkFolders", "committed_files", "merge_of"]

COMMITTED = "_committed.json"
FORMAT = 1

MERGE_FILES = 32
"""Small files of one folder that are merged at once."""
SMALL_BYTES = 16 << 20
MERGED_BYTES = 128 << 20


class Merge(msgspec.Struct, frozen=True):
    """A merge that is decided: ``staged`` becomes ``name``, then ``replaces`` go. All are below the sink's folder."""

    staged: str
    name: str
    replaces: tuple[str, ...]


class Committed(msgspec.Struct, frozen=True):
    """What ``_committed.json`` holds."""

    epoch: int = -1
    merge: Merge | None = None
    format: int = FORMAT


class SinkFolder:
    """The folder of a file sink, as its job sees it. May be used by several threads."""

    def __init__(self, location: str, *, durable: bool = True) -> None:
        self.location = location
        self._fs, self._root = filesystem_of(location)
        self._durable = durable
        self._guard = threading.Lock()
        self._committed: Committed | None = None

    @property
    def epoch(self) -> int:
        """The newest epoch whose files are all in place; -1 before the first."""
        return self._known().epoch

    def publish(self, epoch: int, files: Iterable[SinkFile]) -> None:
        """Put the files of a committed epoch in place. Harmless when repeated, also by another life of the driver."""
        with self._guard:
            found = tuple(files)
            for file in found:
                self._move(file.staged, file.name)
            if found and epoch > self._known().epoch:
                self._note(Committed(epoch, self._known().merge))

    def recover(self, epoch: int, files: Iterable[SinkFile]) -> None:
        """After a start: finish what the last life of the driver left undone. ``epoch`` is the newest committed one.

        Files that are staged and not among ``files`` belong to runs that were never committed. They go.
        """
        with self._guard:
            self._finish_merge()
        self.publish(epoch, files)
        self.sweep()

    def sweep(self) -> None:
        """Remove all staged files. Only while no task of the job runs and no merge is under way."""
        for info in self._listed(posixpath.join(self._root, STAGED)):
            with contextlib.suppress(OSError):
                remove_file(self._fs, info.path)

    def merge(self) -> bool:
        """Merge some small Parquet files into one, if there are enough of them; whether it did.

        Rows keep their order within an epoch's file and the epochs theirs. Text files are never merged.
        """
        with self._guard:
            known = self._known()
        names = merge_of({name: size for name, size in _tables(self._fs, self._root) if _is_complete(name, known)})
        if names is None:
            return False
        spans = [epochs_of(name) or (0, 0) for name in names]
        merged = file_name(spans[0][0], max(last for _, last in spans), "merged", 0, ".parquet")
        merge = Merge(
            staged=posixpath.join(STAGED, f"merge-{uuid.uuid4().hex}.parquet"),
            name=posixpath.join(posixpath.dirname(names[0]), merged),
            replaces=tuple(names),
        )
        self._write_merged(merge)
        with self._guard:
            self._note(Committed(self._known().epoch, merge))
            self._finish_merge()
        return True

    def _write_merged(self, merge: Merge) -> None:
        path = self._path(merge.staged)
        self._make_folder(posixpath.dirname(path))
        first = papq.ParquetFile(self._path(merge.replaces[0]), filesystem=self._fs)
        codec = first.metadata.row_group(0).column(0).compression.lower() if first.metadata.num_row_groups else "snappy"
        codec = {"uncompressed": "none"}.get(codec, codec)
        with (
            self._fs.open_output_stream(path) as out,
            papq.ParquetWriter(out, first.schema_arrow, compression=codec) as writer,
        ):
            for name in merge.replaces:
                with papq.ParquetFile(self._path(name), filesystem=self._fs) as file:
                    for batch in file.iter_batches():
                        writer.write_batch(batch.cast(first.schema_arrow))
        if is_local(self._fs) and self._durable:
            disk.sync_file(path)

    def _finish_merge(self) -> None:
        merge = self._known().merge
        if merge is None:
            return
        self._move(merge.staged, merge.name)
        for name in merge.replaces:
            with contextlib.suppress(FileNotFoundError):
                remove_file(self._fs, self._path(name))
        self._note(Committed(self._known().epoch))

    def _move(self, staged: str, name: str) -> None:
        source, target = self._path(staged), self._path(name)
        try:
            self._make_folder(posixpath.dirname(target))
            if is_local(self._fs):
                disk.rename_file(source, target, durable=self._durable)
            else:
                self._fs.move(source, target)
        except OSError as error:
            if self._fs.get_file_info(target).type == pafs.FileType.File:
                return  # it was moved before
            raise CheckpointError(
                f"the file {name!r} of a committed epoch cannot be put in place in {self.location!r}: {error}. The "
                f"epoch stays committed; a restart tries again"
            ) from error

    def _make_folder(self, path: str) -> None:
        if is_local(self._fs):
            disk.make_folder(path, durable=self._durable)
        else:
            self._fs.create_dir(path, recursive=True)

    def _known(self) -> Committed:
        if self._committed is None:
            self._committed = _read(self._fs, self._root)
        return self._committed

    def _note(self, committed: Committed) -> None:
        write_atomically(self._fs, self._path(COMMITTED), msgspec.json.encode(committed), durable=self._durable)
        self._committed = committed

    def _listed(self, folder: str) -> list[pafs.FileInfo]:
        return list(self._fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)


class SinkFolders:
    """The folders of all file sinks of a flow, by sink."""

    def __init__(self, locations: Mapping[str, str], *, durable: bool) -> None:
        self.folders = {sink: SinkFolder(location, durable=durable) for sink, location in locations.items()}

    def publish(self, epoch: int, files: Mapping[str, Sequence[SinkFile]]) -> None:
        """Put the files of a committed epoch in place. Sinks that the flow no longer has keep what they had."""
        for sink, written in files.items():
            if sink in self.folders:
                self.folders[sink].publish(epoch, written)

    def recover(self, epoch: int, files: Mapping[str, Sequence[SinkFile]]) -> None:
        """After a start, see :meth:`SinkFolder.recover`."""
        for sink, folder in self.folders.items():
            folder.recover(epoch, files.get(sink, ()))


def committed_files(path: str) -> list[str]:
    """The files of a :class:`~midstream.FileSink` that hold committed epochs, each row exactly once.

    For readers that must not see a part of an epoch: hand the list to ``spark.read.parquet(*files)``, to pandas, or to
    DuckDB. Give the folder as in the sink.

    >>> import tempfile
    >>> from midstream import FileSink, Flow, ListSource
    >>> from midstream.testing import run_local
    >>> folder = tempfile.mkdtemp() + "/out"
    >>> flow = Flow("numbers")
    >>> flow.source("in", ListSource([[{"n": 1}], [{"n": 2}]], "n int")).sink("out", FileSink(folder))
    >>> _ = run_local(flow)
    >>> import pyarrow.dataset as ds
    >>> sorted(ds.dataset(committed_files(folder)).to_table().to_pylist(), key=lambda row: row["n"])
    [{'n': 1, 'epoch': 0}, {'n': 2, 'epoch': 1}]
    """
    fs, root = filesystem_of(path)
    before = None
    while True:  # ends unless files come faster than they can be listed
        names = [name for name, _ in _tables(fs, root)]
        known = _read(fs, root)
        if known == before:
            break
        before = known
    prefix = path.rstrip("/")
    return [posixpath.join(prefix, name) for name in sorted(names) if _is_complete(name, known, frozenset(names))]


def merge_of(sizes: dict[str, int]) -> list[str] | None:
    """Which files to merge, given the sizes of all: neighbours in time, in one folder; None if it does not pay yet.

    >>> small = {file_name(e, e, 0, 0, ".parquet"): 1000 for e in range(MERGE_FILES)}
    >>> len(merge_of(small) or ()), merge_of(dict(list(small.items())[1:]))
    (32, None)
    """
    folders: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if name.endswith(".parquet"):
            folders.setdefault(posixpath.dirname(name), []).append(name)
    for names in folders.values():
        for run in _small_runs(names, sizes):
            if len(run) >= MERGE_FILES:
                return run
    return None


def _small_runs(names: Sequence[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    run: list[str] = []
    total = 0
    for name in names:
        if sizes[name] >= SMALL_BYTES or total + sizes[name] > MERGED_BYTES:
            yield run
            run, total = [], 0
        if sizes[name] < SMALL_BYTES:
            run.append(name)
            total += sizes[name]
    yield run


def _is_complete(name: str, known: Committed, names: frozenset[str] = frozenset()) -> bool:
    span = epochs_of(name)
    if span is None or span[1] > known.epoch:
        return False
    return known.merge is None or known.merge.name not in names or name not in known.merge.replaces


def _tables(fs: pafs.FileSystem, root: str) -> list[tuple[str, int]]:
    """The files of the table below a folder, with their sizes; names are below it."""
    found = fs.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
    names = ((posixpath.relpath(info.path, root), int(info.size or 0)) for info in found)
    return [(name, size) for name, size in names if epochs_of(name) is not None and not name.startswith("_")]


def _read(fs: pafs.FileSystem, root: str) -> Committed:
    path = posixpath.join(root, COMMITTED)
    try:
        with fs.open_input_stream(path) as stream:
            found = msgspec.json.decode(stream.read(), type=Committed)
    except FileNotFoundError:
        return Committed()
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{COMMITTED} in {root!r} is damaged: {error}") from error
    if found.format > FORMAT:
        raise CheckpointError(
            f"{COMMITTED} in {root!r} has format {found.format}; this midstream reads up to {FORMAT}. Upgrade midstream"
        )
    return found
