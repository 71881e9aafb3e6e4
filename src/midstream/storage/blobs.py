"""The blob store: functions, tables and stage programs in the checkpoint location, named by their content.

The driver writes a blob once, and each worker process fetches it once. The content under a name never changes, so
caches need no invalidation, and damage is detected on reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from midstream.errors import CheckpointError
from midstream.ids import Digest
from midstream.storage import disk
from midstream.storage.fsspec_bridge import FsspecHandler, open_fsspec
from midstream.storage.holds import Holds, Mark

ASIDE = ".torn"
"""Suffix of files that were set aside."""

_NAME = re.compile(r"[0-9a-f]{64}(\.\d+\.tmp)?")


@dataclass(frozen=True)
class Blob:
    """Bytes and their name."""

    digest: Digest
    data: bytes

    @classmethod
    def of(cls, data: bytes) -> Blob:
        """A blob named by its content.

        >>> Blob.of(b"x").digest[:8]
        '2d711642'
        """
        return cls(Digest(hashlib.sha256(data).hexdigest()), data)


def filesystem_of(location: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI, and the path on it.

    Plain paths are local. A URI is pyarrow's if pyarrow knows its scheme; otherwise fsspec's, if fsspec is installed.

    >>> filesystem_of("file:///data/job")[1]
    '/data/job'
    """
    if not _is_uri(location):
        return pafs.LocalFileSystem(), os.path.abspath(location)
    # Hadoop calls it s3a, Arrow calls it s3.
    uri = f"s3://{location.removeprefix('s3a://')}" if location.startswith("s3a://") else location
    try:
        fs, path = pafs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        unknown = error
    except Exception as error:
        raise CheckpointError(f"cannot reach {location!r}: {error}") from error
    else:
        _require_no_options(location)
        return fs, path
    try:
        return open_fsspec(location)
    except Exception as error:
        raise CheckpointError(
            f'cannot reach {location!r}: pyarrow says "{unknown}", fsspec says "{error}". Use a local path, or a file '
            f"system that pyarrow.fs or fsspec knows; found {urlsplit(location).scheme!r}"
            f"{_advice(error)}"
        ) from error


def _require_no_options(location: str) -> None:
    """Refuse options in a location: they would be lost in the names of folders below it, and in the one Spark gets."""
    path, asked, options = location.partition("?")
    if asked:
        raise CheckpointError(
            f"{location!r}: a location cannot have options, but this has {options!r} after a '?'. Use {path!r}, and "
            f"set options by environment variables or by the storage's own configuration (e.g. AWS_REGION)"
        )


def _advice(error: Exception) -> str:
    if not isinstance(error, ImportError):
        return ""
    if error.name == "fsspec":
        wanted = "pip install 'midstream[fsspec]' and the package of the file system"
    else:
        wanted = "pip install the package that it names"
    return f". To use it, {wanted}, for the driver and all executors"


def is_plain_path(location: str) -> bool:
    """Whether a location is a path of this machine, and not a URI.

    >>> is_plain_path("data/out"), is_plain_path("s3://bucket/out")
    (True, False)
    """
    return not _is_uri(location)


def _is_uri(location: str) -> bool:
    return ":" in location.split("/")[0]


def below(location: str, name: str) -> str:
    """A path below a location. In a chain of fsspec file systems, the first link has the path.

    >>> below("hdfs://cluster/job", "blobs"), below("dir://job::memory://base", "blobs")
    ('hdfs://cluster/job/blobs', 'dir://job/blobs::memory://base')
    """
    first, chain, rest = location.partition("::")
    if _is_uri(location) and "://" in rest:
        return posixpath.join(first, name) + chain + rest
    return posixpath.join(location, name)


def spark_path(location: str) -> str:
    """The location for Spark: plain paths are marked as local, whatever the cluster's default file system is.

    >>> spark_path("hdfs://cluster/job"), spark_path("/data/my job")
    ('hdfs://cluster/job', 'file:///data/my job')
    """
    return location if _is_uri(location) else f"file://{os.path.abspath(location)}"


def write_atomically(
    fs: pafs.FileSystem, path: str, data: bytes | pa.Buffer, *, durable: bool = True, checked: bool = False
) -> None:
    """Write a file so that readers see all of it or nothing.

    ``durable``: on a local disk, the file is on disk before this returns. Other file systems have their own rules.
    ``checked``: it is a new file, and its readers check its content, so a power loss meanwhile may leave a torn one.
    """
    handler = fs.handler if isinstance(fs, pafs.PyFileSystem) else None
    try:
        if is_local(fs):
            disk.write_file(path, data, durable=durable, checked=checked)
        elif isinstance(handler, FsspecHandler) and not handler.renames:
            handler.put(path, data)
        else:
            _write_and_rename(fs, path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path!r}: {error}") from error


def _write_and_rename(fs: pafs.FileSystem, path: str, data: bytes | pa.Buffer) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fs.create_dir(posixpath.dirname(path), recursive=True)
        with fs.open_output_stream(temporary) as out:
            out.write(data)
        fs.move(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            fs.delete_file(temporary)
        raise


def remove_file(fs: pafs.FileSystem, path: str) -> None:
    """Remove a file. On a local disk, a machine crash may bring it back, which must not matter."""
    if is_local(fs):
        disk.remove_file(path)
    else:
        fs.delete_file(path)


def make_folder(fs: pafs.FileSystem, path: str, *, durable: bool) -> None:
    """Create a folder and its parents, unless they exist. ``durable`` is for a local disk."""
    if is_local(fs):
        disk.make_folder(path, durable=durable)
    else:
        fs.create_dir(path, recursive=True)


def move_file(fs: pafs.FileSystem, path: str, other: str, *, durable: bool) -> None:
    """Rename a file, also into another folder, which must exist. ``durable`` is for a local disk."""
    if is_local(fs):
        disk.rename_file(path, other, durable=durable)
    else:
        fs.move(path, other)


def copy_file(fs: pafs.FileSystem, path: str, other_fs: pafs.FileSystem, other: str, *, durable: bool) -> None:
    """Copy a file that never changes, also to another file system; on one local disk it only gets a second name.

    The copy is whole or not there; an earlier one is replaced.
    """
    make_folder(other_fs, posixpath.dirname(other), durable=durable)
    if is_local(fs) and is_local(other_fs) and disk.link_file(path, other, durable=durable):
        return
    with fs.open_input_file(path) as source:
        write_atomically(other_fs, other, source.read_buffer(), durable=durable)


def set_aside(fs: pafs.FileSystem, path: str, *, durable: bool = True) -> str:
    """Rename a file that is no longer of use, so that it is ignored but can be examined; return the new name."""
    other = f"{path}{ASIDE}"
    try:
        move_file(fs, path, other, durable=durable)
    except OSError as error:
        raise CheckpointError(f"cannot rename {path!r} to {other!r}: {error}") from error
    return other


def is_local(fs: pafs.FileSystem) -> bool:
    """Whether this is the local file system."""
    return isinstance(fs, pafs.LocalFileSystem)


class Together:
    """The blobs of one :meth:`BlobStore.together`."""

    def __init__(self, sync: Callable[[Collection[Digest]], None]) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self._sync = sync
        self._error: CheckpointError | None = None

    def sync(self) -> None:
        """Have them on disk when this returns. For any thread, once no more are put."""
        if self._error is not None:  # the system reports an error once
            raise self._error
        try:
            self._sync(self.blobs)
        except CheckpointError as error:
            self._error = error
            raise


class BlobStore:
    """Blobs below one folder. With ``durable``, a blob on a local disk survives a power loss once it is put, or once
    the :meth:`together` ends in which it was.

    >>> import tempfile
    >>> store = BlobStore(tempfile.mkdtemp())
    >>> digest = store.put(Blob.of(b"model"))
    >>> store.get(digest)
    b'model'
    """

    def __init__(self, location: str, *, durable: bool = True) -> None:
        self.location = location
        self._durable = durable
        self.holds = Holds()
        """Protects blobs that are about to be referenced from removal."""
        self._fs, self._root = filesystem_of(location)
        self._settled: set[Digest] = set()
        """Blobs that are complete and on disk: this process has written or compared, and synced them."""
        self._here = threading.local()
        """``together``: what this thread's :meth:`together` has put."""
        self._writing = threading.Lock()  # two changes prepared at the same time may have the same blob

    def put(self, blob: Blob) -> Digest:
        """Store a blob, unless it is already there. A blob that a crash left incomplete is written again."""
        self.holds.touch(blob.digest)
        path = self._path(blob.digest)
        with self._writing:
            if not self._holds(path, blob):
                self._settled.discard(blob.digest)  # it was removed since
                write_atomically(self._fs, path, blob.data, durable=False)
        group: Together | None = getattr(self._here, "together", None)
        if group is None:
            self._settle([blob.digest])
        else:
            group.blobs[blob.digest] = blob.data
        return blob.digest

    @contextlib.contextmanager
    def together(self) -> Iterator[Together]:
        """Inside, the blobs that this thread puts are not synced one by one, but all at once when the block ends.

        Until then they stay in memory, so :meth:`get` need not read what was just made.
        """
        outer: Together | None = getattr(self._here, "together", None)
        if outer is not None:  # it ends later
            yield outer
            return
        group = Together(self._settle)
        self._here.together = group
        try:
            yield group
        finally:
            self._here.together = None
        group.sync()

    def _settle(self, digests: Collection[Digest]) -> None:
        """Sync blobs. Not only those just written: a process that was killed may have left one that is not synced."""
        if self._durable and is_local(self._fs):
            unsynced = disk.Unsynced()
            for digest in digests:
                if digest not in self._settled:
                    unsynced.add_file(self._path(digest))
            try:
                if unsynced:
                    make_folder(self._fs, self._root, durable=True)  # once
                unsynced.sync()
            except OSError as error:
                raise CheckpointError(f"cannot sync blobs in {self.location!r}: {error}") from error
        self._settled.update(digests)

    def _holds(self, path: str, blob: Blob) -> bool:
        """Whether a complete blob is there.

        An incomplete file may have the right size and be full of zeros. On storage other than a local disk, reading the
        content would cost a download, and object stores only show complete objects.
        """
        info = self._fs.get_file_info(path)
        if info.type == pafs.FileType.NotFound or info.size != len(blob.data):
            return False
        if blob.digest in self._settled or not is_local(self._fs):
            return True
        with self._fs.open_input_stream(path) as stream:
            return bytes(stream.read()) == blob.data

    def has(self, digest: Digest) -> bool:
        """Whether a blob is in the store."""
        return bool(self._fs.get_file_info(self._path(digest)).type == pafs.FileType.File)

    def get(self, digest: Digest) -> bytes:
        """Fetch a blob and check that its content matches its name."""
        if self.holds.is_preparing:
            self.holds.touch(digest)
        group: Together | None = getattr(self._here, "together", None)
        if group is not None and digest in group.blobs:
            return group.blobs[digest]
        path = self._path(digest)
        try:
            with self._fs.open_input_stream(path) as stream:
                data = bytes(stream.read())
        except OSError as error:
            raise CheckpointError(
                f"blob {digest} cannot be read from {self.location!r}: {error}. The checkpoint location must be "
                f"storage that the driver and all executors share",
                file=digest,
            ) from error
        if Blob.of(data).digest != digest:
            raise CheckpointError(
                f"blob {digest} in {self.location!r} is damaged: its {len(data)} bytes do not match its name. Restore "
                f"the file from a copy. If there is none, remove it: if it belongs to the script, the next start "
                f"writes it again; if it belongs to a change made while the job ran, start with changes='drop'"
            )
        return data

    def copy(self, digest: Digest, to: BlobStore) -> None:
        """Copy a blob to another store, unless it is there."""
        if not to.has(digest):
            copy_file(self._fs, self._path(digest), to._fs, to._path(digest), durable=to._durable)

    def digests(self) -> frozenset[Digest]:
        """The digests of all blobs in the store."""
        return frozenset(Digest(name) for name in self._names() if not name.endswith(".tmp"))

    def garbage(self, live: Collection[Digest]) -> list[str]:
        """The names of files with none of these blobs, including temporary files that were never completed."""
        return [name for name in self._names() if name not in live]

    def remove(self, name: str, mark: Mark) -> bool:
        """Remove a file that :meth:`garbage` returned, unless its blob has been touched since the mark.

        Returns whether it was removed. Raises :class:`OSError` if it cannot be removed.
        """
        return self.holds.remove(Digest(name.split(".")[0]), mark, partial(self._delete, name))

    def _names(self) -> list[str]:
        selector = pafs.FileSelector(self._root, allow_not_found=True, recursive=True)
        found = (posixpath.basename(info.path) for info in self._fs.get_file_info(selector) if info.is_file)
        return sorted(name for name in found if _NAME.fullmatch(name))

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove_file(self._fs, posixpath.join(self._root, name[:2], name))

    def _path(self, digest: Digest) -> str:
        return posixpath.join(self._root, digest[:2], digest)
