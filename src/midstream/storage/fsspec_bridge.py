"""Presents fsspec file systems as pyarrow's, for locations that pyarrow does not support itself.

A checkpoint needs little from a file system, and this module ensures it:

- *Readers see all of a file or nothing.* If the file system has a rename, a temporary file is written and renamed. If
  its "move" is a copy and a removal, it has no rename; such stores only show complete objects, so the file is written
  under its own name, in one request if the store supports that.
- *Writes of others are visible.* fsspec may cache listings; the caches are dropped before every access.
- *Errors are* :class:`OSError`, whatever the store's client raises.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

__all__ = ["FsspecHandler", "open_fsspec"]


def open_fsspec(location: str) -> tuple[pafs.FileSystem, str]:
    """The fsspec file system of a location, and the path on it.

    Raises :class:`ImportError` if fsspec or the file system's package is not installed, :class:`ValueError` if the
    scheme is unknown or the file system cannot hold a checkpoint, and whatever the file system raises.
    """
    import fsspec
    from fsspec.implementations.cached import CachingFileSystem
    from fsspec.implementations.local import LocalFileSystem

    first, chain, _ = location.partition("::")
    if chain and "://" not in first:
        raise ValueError(f"in a chain the first link must have the path, as in '{first}://folder::…'")
    fs, path = fsspec.core.url_to_fs(location)
    if isinstance(fs, LocalFileSystem):
        return pafs.LocalFileSystem(), path  # the same files, but these can be locked
    if isinstance(_innermost(fs), CachingFileSystem):
        raise ValueError(f"{type(fs).__name__} may answer from its cache, so that writes of others are not seen")
    return pafs.PyFileSystem(FsspecHandler(fs)), path.rstrip("/") or path


def _innermost(fs: Any) -> Any:
    """The file system that does the work, behind those that present a folder as a file system."""
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return fs


class FsspecHandler(pafs.FSSpecHandler):  # type: ignore[misc]  # pyarrow has no annotations
    """pyarrow's file system interface, implemented with an fsspec file system."""

    def __init__(self, fs: Any) -> None:
        from fsspec import AbstractFileSystem

        super().__init__(fs)
        move = _innermost(fs).mv
        self.renames = getattr(move, "__func__", move) is not AbstractFileSystem.mv
        """Whether a file can be renamed without being copied."""

    def get_file_info(self, paths: Sequence[str]) -> Any:
        """Information about some paths."""
        with self._fresh():
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        """Information about the files in a folder."""
        with self._fresh():
            return super().get_file_info_selector(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder, unless it exists."""
        with self._fresh():
            super().create_dir(path, recursive)

    def delete_dir(self, path: str) -> None:
        """Remove a folder and everything in it."""
        with self._fresh():
            super().delete_dir(path)

    def delete_file(self, path: str) -> None:
        """Remove a file."""
        with self._fresh():
            super().delete_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        """Write a file."""
        with self._fresh():
            return super().open_output_stream(path, metadata)

    def open_input_stream(self, path: str) -> Any:
        """The content of a file. It is read at once: files are always read whole, and errors can only be translated
        here.
        """
        with self._fresh():
            return pa.PythonFile(io.BytesIO(self.fs.cat_file(path)), mode="r")

    def open_input_file(self, path: str) -> Any:
        """The content of a file, with random access."""
        return self.open_input_stream(path)

    def put(self, path: str, data: Any) -> None:
        """Write a whole file under its own name. Stores without a rename do not need its folder to exist."""
        with self._fresh():
            self.fs.pipe_file(path, bytes(data))

    def move(self, src: str, dest: str) -> None:
        """Rename a file, replacing one that may exist.

        Not all renames replace: some raise, and WebHDFS's silently does nothing. In that case the old file is removed
        first. A crash in between leaves neither file; for an epoch's manifest that means that the epoch runs again, as
        it was about to.
        """
        with self._fresh():
            try:
                self.fs.mv(src, dest)
            except Exception:
                if not self._exists(dest):
                    raise
            if self._exists(src):
                if self._exists(dest):
                    self.fs.rm_file(dest)
                self.fs.mv(src, dest)
            if not self._exists(dest):
                raise FileNotFoundError(f"{dest!r} does not exist after {src!r} was renamed to it")

    def _exists(self, path: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(path))

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        """Bypass fsspec's caches, and raise the errors that pyarrow's own file systems would raise."""
        self.fs.invalidate_cache()
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
