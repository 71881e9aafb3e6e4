"""The blob store: functions, tables and stage programs, named by their content, in the checkpoint location.

Written once by the driver, fetched once per worker process. A blob never changes under its name, so caches need no
invalidation, and one that was damaged is noticed when it is read.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from midstream.errors import CheckpointError
from midstream.flow.functions import Blob
from midstream.ids import Digest


def filesystem_of(location: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI, and the path on it. Plain paths are local.

    >>> filesystem_of("file:///data/job")[1]
    '/data/job'
    """
    if ":" not in location.split("/")[0]:
        return pafs.LocalFileSystem(), os.path.abspath(location)
    try:
        fs, path = pafs.FileSystem.from_uri(location)
        return fs, path
    except Exception as error:
        scheme = urlsplit(location).scheme
        raise CheckpointError(
            f"cannot reach {location!r}: {error}. Local paths and the file systems that pyarrow.fs knows can be used "
            f"({scheme!r} was asked for)"
        ) from error


def spark_path(location: str) -> str:
    """The location as Spark must be told it: plain paths are local, whatever the cluster's default file system is.

    >>> spark_path("hdfs://cluster/job"), spark_path("/data/my job")
    ('hdfs://cluster/job', 'file:///data/my job')
    """
    return location if ":" in location.split("/")[0] else f"file://{os.path.abspath(location)}"


def write_atomically(fs: pafs.FileSystem, path: str, data: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fs.create_dir(posixpath.dirname(path), recursive=True)
        with fs.open_output_stream(temporary) as out:
            out.write(data)
        fs.move(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fs.delete_file(temporary)
        raise CheckpointError(f"cannot write {path!r}: {error}") from error


class BlobStore:
    """Blobs below one folder.

    >>> import tempfile
    >>> store = BlobStore(tempfile.mkdtemp())
    >>> digest = store.put(Blob.of(b"model"))
    >>> store.get(digest)
    b'model'
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._fs, self._root = filesystem_of(location)

    def put(self, blob: Blob) -> Digest:
        """Keep a blob; does nothing if it is there already."""
        path = self._path(blob.digest)
        if self._fs.get_file_info(path).type == pafs.FileType.NotFound:
            write_atomically(self._fs, path, blob.data)
        return blob.digest

    def get(self, digest: Digest) -> bytes:
        """Fetch a blob and check that it is what its name says."""
        path = self._path(digest)
        try:
            with self._fs.open_input_stream(path) as stream:
                data = bytes(stream.read())
        except OSError as error:
            raise CheckpointError(
                f"blob {digest[:12]}… cannot be read from {self.location!r}: {error}. The checkpoint location must be "
                f"storage that the driver and all executors share"
            ) from error
        if Blob.of(data).digest != digest:
            raise CheckpointError(
                f"blob {digest[:12]}… in {self.location!r} is damaged: its {len(data)} bytes do not match its name"
            )
        return data

    def _path(self, digest: Digest) -> str:
        return posixpath.join(self._root, digest[:2], digest)
