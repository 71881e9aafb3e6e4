"""File systems of fsspec as pyarrow's, for locations that pyarrow has no file system of its own for.

What a checkpoint needs of a file system is little, and this makes sure of it:

- *A reader sees all of a file or nothing.* A file system with a rename gets a temporary file that is then renamed. One
  whose "move" is a copy and a removal has no rename; such stores show an object when it is whole, so the file is
  written under its own name, in one request where the store has one for that.
- *What others wrote is seen.* fsspec may remember listings; they are forgotten before every look.
- *Errors are* :class:`OSError`, whatever the client of a store raises.
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
    """The file system of a location as fsspec knows it, and the path on it.

    Raises :class:`ImportError` when fsspec or the package of the file system is not installed, :class:`ValueError` when
    nobody knows the scheme or the file system cannot hold a checkpoint, and whatever the file system raises.
    """
    import fsspec
    from fsspec.implementations.cached import CachingFileSystem
    from fsspec.implementations.local import LocalFileSystem

    first, chain, _ = location.partition("::")
    if chain and "://" not in first:
        raise ValueError(f"in a chain the first link must have the path, as in '{first}://folder::…'")
    fs, path = fsspec.core.url_to_fs(location)
    if isinstance(fs, LocalFileSystem):
        return pafs.LocalFileSystem(), path  # the same files, and these can be locked
    if isinstance(_innermost(fs), CachingFileSystem):
        raise ValueError(f"{type(fs).__name__} may answer from its cache, so that what others write is not seen")
    return pafs.PyFileSystem(FsspecHandler(fs)), path.rstrip("/") or path


def _innermost(fs: Any) -> Any:
    """The file system that does the work, of folders made to look like file systems."""
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return fs


class FsspecHandler(pafs.FSSpecHandler):  # type: ignore[misc]  # pyarrow has no annotations
    """What pyarrow asks of a file system, answered by one of fsspec."""

    def __init__(self, fs: Any) -> None:
        from fsspec import AbstractFileSystem

        super().__init__(fs)
        move = _innermost(fs).mv
        self.renames = getattr(move, "__func__", move) is not AbstractFileSystem.mv
        """Whether a file can be given another name without being copied."""

    def get_file_info(self, paths: Sequence[str]) -> Any:
        """What there is under some paths."""
        with self._fresh():
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> Any:
        """What there is in a folder."""
        with self._fresh():
            return super().get_file_info_selector(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        """Make a folder, unless it is there."""
        with self._fresh():
            super().create_dir(path, recursive)

    def delete_dir(self, path: str) -> None:
        """Remove a folder and all in it."""
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
        """The content of a file. Read at once: files here are read whole, and only now can errors be translated."""
        with self._fresh():
            return pa.PythonFile(io.BytesIO(self.fs.cat_file(path)), mode="r")

    def open_input_file(self, path: str) -> Any:
        """The content of a file, in any order."""
        return self.open_input_stream(path)

    def put(self, path: str, data: Any) -> None:
        """Write a whole file under its own name. Stores without a rename have no folders that must be there first."""
        with self._fresh():
            self.fs.pipe_file(path, bytes(data))

    def move(self, src: str, dest: str) -> None:
        """Rename a file, in place of one that may be there.

        Not all renames replace: some raise, and that of WebHDFS does nothing and says nothing. There the old file is
        removed first; a crash in between leaves neither, which for an epoch's manifest means that the epoch is run
        again, as it was about to be.
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
                raise FileNotFoundError(f"{dest!r} is not there after {src!r} was renamed to it")

    def _exists(self, path: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(path))

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        """Ask the store and not fsspec's memory of it, and raise what pyarrow's own file systems would."""
        self.fs.invalidate_cache()
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
