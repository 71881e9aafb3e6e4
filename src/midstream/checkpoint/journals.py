"""The journals of runs that failed, in a checkpoint: for people, not for a restart. The newest few are kept."""

from __future__ import annotations

import contextlib
import posixpath

import pyarrow.fs as pafs

from midstream.ids import Epoch, Run
from midstream.storage.blobs import filesystem_of, remove_file, write_atomically

__all__ = ["KEPT_JOURNALS", "Journals"]

KEPT_JOURNALS = 20


class Journals:
    """The folder with the journals, one file each."""

    def __init__(self, location: str) -> None:
        self._fs, self._root = filesystem_of(location)

    def keep(self, epoch: Epoch, run: Run, data: bytes) -> str:
        """Keep the journal of a run; return its path."""
        path = posixpath.join(self._root, f"{epoch:010d}.{run}")
        write_atomically(self._fs, path, data, durable=False)
        return path

    def stale(self) -> list[str]:
        """The names of those that are too old to keep."""
        # Clocks of file systems are coarse: among several in one tick, the name shows which is the newest.
        found = self._fs.get_file_info(pafs.FileSelector(self._root, allow_not_found=True))
        kept = sorted(found, key=lambda info: (info.mtime_ns or 0, info.path))
        return [posixpath.basename(info.path) for info in kept[:-KEPT_JOURNALS]]

    def remove(self, name: str) -> None:
        """Remove one, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            remove_file(self._fs, posixpath.join(self._root, name))
