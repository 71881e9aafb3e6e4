"""The files of a :class:`~midstream.FileSink`: how staged files become visible, and how small ones are merged.

Tasks stage files (:mod:`midstream.storage.table_files`); an epoch's manifest names those that count. *After* the
manifest is written they are renamed to their places: so a reader never sees rows of an epoch that is not committed, and
a restart finishes what a crash interrupted, because the newest manifest still names the files.

``_committed.json`` in the sink's folder contains the epoch up to which all files are in place, ``_merge.json`` the
merge in progress. :func:`committed_files` uses both. Readers that only list the folder may see a part of the newest
epoch, or the rows of a merge twice, during the milliseconds that renames and removals take. A restart repairs either.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import posixpath
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as papq

from midstream.errors import CheckpointError
from midstream.flow.spec import SinkTable
from midstream.storage import disk
from midstream.storage.blobs import filesystem_of, is_local, make_folder, move_file, remove_file, write_atomically
from midstream.storage.documents import read_struct, write_struct
from midstream.storage.table_files import EPOCH_FIELD, STAGED, SinkFile, epochs_of, file_name
from midstream.storage.table_format import FileFormat, TableFormat

__all__ = ["COMMITTED", "MERGING", "SinkFolder", "SinkFolders", "committed_files", "merges_of"]

COMMITTED = "_committed.json"
MERGING = "_merge.json"

MERGE_FILES = 32
"""The number of small files in a folder that are merged into one."""
SMALL_BYTES = 16 << 20
MERGED_BYTES = 128 << 20

_log = logging.getLogger("midstream")


class Committed(msgspec.Struct, frozen=True):
    """The content of ``_committed.json``: the newest epoch with rows for the sink whose files are all in place."""

    epoch: int = -1


class Merge(msgspec.Struct, frozen=True):
    """The content of ``_merge.json`` during a merge: ``staged`` is renamed to ``name``, then ``replaces`` are removed.

    All paths are below the sink's folder.
    """

    staged: str
    name: str
    replaces: tuple[str, ...]


D = TypeVar("D", Committed, Merge)


class SinkFolder:
    """The folder of a file sink, as used by its job.

    One thread publishes while another one may merge. Neither waits for the other, because a merge never touches the
    newest epoch, the only one that may be published again.
    """

    def __init__(
        self, table: SinkTable, *, durable: bool = True, at: Callable[[str], None] = lambda step: None
    ) -> None:
        self.location = table.location
        self._format: TableFormat = table.format
        self._merges = table.merge
        self._fs, self._root = filesystem_of(table.location)
        self._durable = durable
        self._at = at
        self._committed: Committed | None = None
        self._unmerged = 0
        """The number of files published since the last search for files to merge."""
        self._schemas: dict[str, pa.Schema] = {}

    @property
    def epoch(self) -> int:
        """The newest epoch whose files are all in place; -1 before the first."""
        if self._committed is None:
            self._committed = _read(self._fs, self._root, COMMITTED, Committed) or Committed()
        return self._committed.epoch

    def publish(self, epoch: int, files: Sequence[SinkFile]) -> None:
        """Put the files of a committed epoch in place. Harmless when repeated, also after a restart.

        Replaces an epoch that was published before: that one was planned again, for other rows.
        """
        unsynced = disk.Unsynced()
        self.place(epoch, files, unsynced)
        unsynced.sync()
        if files and epoch > self.epoch:
            self.note(epoch)

    def place(self, epoch: int, files: Sequence[SinkFile], unsynced: disk.Unsynced) -> None:
        """The first half of :meth:`publish`. The new names are in ``unsynced``, to be synced before :meth:`note`.

        The old names need not be: one that a loss of power brings back is swept at the next start.
        """
        if epoch <= self.epoch:
            self._remove_files(lambda span: span == (epoch, epoch), {file.name for file in files})
        for file in files:
            self._move(file.staged, file.name, unsynced)
            self._at("file in place")
        self._unmerged += len(files)

    def note(self, epoch: int) -> None:
        """The second half: record that all files up to an epoch are in place."""
        committed = Committed(epoch)
        self._write(COMMITTED, committed)
        self._committed = committed

    def recover(self, epoch: int, files: Sequence[SinkFile]) -> None:
        """Finish what the previous driver process left undone; ``epoch`` is the newest committed one.

        Files of later epochs, in place or staged, belong to runs that were never committed, and are removed. Files that
        are neither staged nor in place were removed by someone else; the job continues without them.
        """
        self._finish_merge()
        if self.epoch > epoch:  # a power failure has lost the newest manifests
            self._remove_files(lambda span: span[0] > epoch)
            self.note(epoch)
        found = [file for file in files if self._is_there(file.staged) or self._is_there(file.name)]
        if len(found) < len(files) and self.epoch < epoch:
            _log.warning(
                "%d file(s) of the committed epoch %d were removed from %r; the job continues without them",
                len(files) - len(found),
                epoch,
                self.location,
            )
        self.publish(epoch, found)
        self.sweep()

    def rewind(self, epoch: int) -> None:
        """Take back the rows of all later epochs. Harmless when repeated; no job may be running.

        Files that a merge made of rows from both sides are written again, with the earlier rows only.
        """
        self._finish_merge()
        for name, _ in _tables(self._fs, self._root):
            first, last = epochs_of(name) or (0, 0)
            if first <= epoch < last:
                self._cut(name, first, epoch)
        if self.epoch > epoch:
            self.note(epoch)
        self._at("rewind noted")
        self._remove_files(lambda span: span[0] > epoch)
        self.sweep()

    def _cut(self, name: str, first: int, epoch: int) -> None:
        """Replace a file by one with its rows up to an epoch, as a merge of a single file."""
        with papq.ParquetFile(self._path(name), filesystem=self._fs) as file:
            self._schemas[name] = file.schema_arrow
        unique = hashlib.sha256(name.encode()).hexdigest()[:8]
        cut = file_name(first, epoch, f"cut{unique}", 0, ".parquet")
        merge = Merge(
            staged=posixpath.join(STAGED, f"cut-{unique}.parquet"),
            name=posixpath.join(posixpath.dirname(name), cut),
            replaces=(name,),
        )
        self._write_merged(merge, until=epoch)
        self._at("cut staged")
        self._write(MERGING, merge)
        self._at("cut decided")
        self._finish_merge()

    def sweep(self, before: int | None = None) -> None:
        """Remove staged files: all, or those of epochs ``before`` one. No running task may still be writing them."""
        for info in self._listed(posixpath.join(self._root, STAGED)):
            epoch = posixpath.basename(info.path).split("-")[0]
            if before is None or (epoch.isdigit() and int(epoch) < before):
                with contextlib.suppress(OSError):
                    remove_file(self._fs, info.path)

    def tidy(self) -> None:
        """Merge small files while there are enough of them, and remove what failed attempts have staged. Never raises.

        Called by one thread, while epochs run. Lists the folder only if many files were added since the last time.
        """
        if self._unmerged < MERGE_FILES:
            return
        self._unmerged = 0
        try:
            self.sweep(before=self.epoch)
            while self._merges and self.merge():
                pass
        except Exception as error:  # a store's client may raise anything, and the job must not fail
            _log.warning("small files in %r are not merged for now: %s", self.location, error)

    def merge(self) -> bool:
        """Merge some small Parquet files of one schema, if there are enough of them; return whether that was done.

        Epochs keep their order, and so do the rows of an epoch's file. Text files are never merged.
        """
        sizes = {name: size for name, size in _tables(self._fs, self._root) if _is_before(name, self.epoch)}
        self._schemas = {name: schema for name, schema in self._schemas.items() if name in sizes}
        names = next(filter(None, map(self._alike, merges_of(sizes))), None)
        if names is None:
            return False
        spans = [epochs_of(name) or (0, 0) for name in names]
        unique = uuid.uuid4().hex
        merged = file_name(spans[0][0], max(last for _, last in spans), f"merged{unique[:8]}", 0, ".parquet")
        merge = Merge(
            staged=posixpath.join(STAGED, f"merge-{unique}.parquet"),
            name=posixpath.join(posixpath.dirname(names[0]), merged),
            replaces=tuple(names),
        )
        self._write_merged(merge)
        self._at("merge staged")
        self._write(MERGING, merge)
        self._at("merge decided")
        self._finish_merge()
        return True

    def _alike(self, names: Sequence[str]) -> list[str] | None:
        """The first consecutive files that have one schema, if there are enough of them."""
        run: list[str] = []
        for name in names:
            if name not in self._schemas:
                with papq.ParquetFile(self._path(name), filesystem=self._fs) as file:
                    self._schemas[name] = file.schema_arrow
            if run and not self._schemas[name].equals(self._schemas[run[0]]):
                if len(run) >= MERGE_FILES:
                    return run
                run = []
            run.append(name)
        return run if len(run) >= MERGE_FILES else None

    def _write_merged(self, merge: Merge, until: int | None = None) -> None:
        path = self._path(merge.staged)
        make_folder(self._fs, posixpath.dirname(path), durable=self._durable)
        format = self._format
        with (
            self._fs.open_output_stream(path, compression=None) as out,
            papq.ParquetWriter(
                out,
                self._schemas[merge.replaces[0]],
                compression=format.compression,
                compression_level=format.compression_level,
            ) as writer,
        ):
            for name in merge.replaces:
                with papq.ParquetFile(self._path(name), filesystem=self._fs) as file:
                    for batch in file.iter_batches():
                        if until is not None:
                            batch = batch.filter(pc.less_equal(batch.column(EPOCH_FIELD.name), until))
                        writer.write_batch(batch, format.rows_per_group)
        if is_local(self._fs) and self._durable:
            disk.sync_file(path)

    def _finish_merge(self) -> None:
        merge = _read(self._fs, self._root, MERGING, Merge)
        if merge is None:
            return
        is_whole = self._is_there(merge.staged) or self._is_there(merge.name)
        if is_whole:  # otherwise someone removed it, and the files that it would replace must stay
            self._move(merge.staged, merge.name)
        for name in (*(merge.replaces if is_whole else ()), MERGING):
            self._at("merge in place")
            with contextlib.suppress(FileNotFoundError):
                remove_file(self._fs, self._path(name))

    def _remove_files(self, is_meant: Callable[[tuple[int, int]], bool], kept: Collection[str] = ()) -> None:
        for name, _ in _tables(self._fs, self._root):
            span = epochs_of(name)
            if span is not None and is_meant(span) and name not in kept:
                remove_file(self._fs, self._path(name))

    def _move(self, staged: str, name: str, unsynced: disk.Unsynced | None = None) -> None:
        """Put a file in place. With ``unsynced`` its new name is not synced yet, else both names are."""
        source, target = self._path(staged), self._path(name)
        try:
            make_folder(self._fs, posixpath.dirname(target), durable=self._durable)
            move_file(self._fs, source, target, durable=self._durable and unsynced is None)
            if unsynced is not None and self._durable and is_local(self._fs):
                unsynced.add_names(posixpath.dirname(target))
        except OSError as error:
            if self._is_there(name):
                return  # an earlier call moved it
            raise CheckpointError(
                f"the file {name!r} of a committed epoch cannot be put in place in {self.location!r}: {error}. The "
                f"epoch stays committed; a restart tries again"
            ) from error

    def _is_there(self, name: str) -> bool:
        return bool(self._fs.get_file_info(self._path(name)).type == pafs.FileType.File)

    def _write(self, name: str, content: msgspec.Struct) -> None:
        write_atomically(self._fs, self._path(name), write_struct(content), durable=self._durable)

    def _listed(self, folder: str) -> list[pafs.FileInfo]:
        return list(self._fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)


class SinkFolders:
    """The folders of all file sinks of a flow. Files are grouped by the location of their folder.

    The script may have changed since a manifest was written: a sink may have another folder now, or be gone.
    """

    def __init__(self, tables: Iterable[SinkTable], *, durable: bool, at: Callable[[str], None]) -> None:
        self._durable, self._at = durable, at
        self._folders = {table.location: self._folder(table) for table in tables}

    def _folder(self, table: SinkTable) -> SinkFolder:
        return SinkFolder(table, durable=self._durable, at=self._at)

    def add(self, tables: Iterable[SinkTable]) -> None:
        """A change has given the flow more sinks."""
        for table in tables:
            if table.location not in self._folders:
                self._folders[table.location] = self._folder(table)

    def publish(self, epoch: int, files: Mapping[str, Sequence[SinkFile]]) -> None:
        """Put the files of a committed epoch in place: those of all sinks at once, which costs as much as one sink."""
        unsynced = disk.Unsynced()
        folders = dict(self._folders)
        for location, folder in folders.items():
            folder.place(epoch, files.get(location, ()), unsynced)
        unsynced.sync()
        written = [folder for location, folder in folders.items() if files.get(location) and epoch > folder.epoch]
        disk.at_once([partial(folder.note, epoch) for folder in written])

    def recover(self, epoch: int, files: Mapping[str, Sequence[SinkFile]]) -> None:
        """See :meth:`SinkFolder.recover`; includes the folders of sinks that the flow no longer has."""
        for location in {**self._folders, **files}:
            folder = self._folders.get(location) or self._folder(SinkTable(location, TableFormat(FileFormat.PARQUET)))
            folder.recover(epoch, files.get(location, ()))

    def tidy(self) -> None:
        """See :meth:`SinkFolder.tidy`."""
        for folder in list(self._folders.values()):
            folder.tidy()


def committed_files(path: str) -> list[str]:
    """The files of a :class:`~midstream.FileSink` that hold committed epochs, each row exactly once.

    For readers that must not see a part of an epoch: pass the list to ``spark.read.parquet(*files)``, to pandas, or to
    DuckDB. ``path`` is that of the sink.

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
    while True:  # ends unless files are added faster than they can be listed
        names = [name for name, _ in _tables(fs, root)]
        known = _read(fs, root, COMMITTED, Committed) or Committed(), _read(fs, root, MERGING, Merge)
        if known == before:
            break
        before = known
    committed, merge = known
    replaced = merge.replaces if merge is not None and merge.name in names else ()
    prefix = path.rstrip("/")
    found = (name for name in sorted(names) if _is_before(name, committed.epoch + 1) and name not in replaced)
    return [posixpath.join(prefix, name) for name in found]


def merges_of(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Groups of files worth merging, given the sizes of all: enough small files of one folder, adjacent in time.

    >>> small = {file_name(e, e, 0, 0, ".parquet"): 1000 for e in range(MERGE_FILES)}
    >>> [len(names) for names in merges_of(small)], list(merges_of(dict(list(small.items())[1:])))
    ([32], [])
    """
    folders: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if name.endswith(".parquet"):
            folders.setdefault(posixpath.dirname(name), []).append(name)
    for names in folders.values():
        yield from (run for run in _small_runs(names, sizes) if len(run) >= MERGE_FILES)


def _small_runs(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
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


def _is_before(name: str, epoch: int) -> bool:
    span = epochs_of(name)
    return span is not None and span[1] < epoch


def _tables(fs: pafs.FileSystem, root: str) -> list[tuple[str, int]]:
    """The files of the table in a folder, with their sizes; names are relative to it."""
    found = fs.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
    names = ((posixpath.relpath(info.path, root), int(info.size or 0)) for info in found)
    return [(name, size) for name, size in names if epochs_of(name) is not None and not name.startswith("_")]


def _read(fs: pafs.FileSystem, root: str, name: str, kind: type[D]) -> D | None:
    """One of the two documents in a sink's folder; None if it is not there."""
    try:
        with fs.open_input_stream(posixpath.join(root, name)) as stream:
            data = bytes(stream.read())
    except FileNotFoundError:
        return None
    return read_struct(data, kind, f"{name} in {root!r}")
