"""Values that handlers of control operations have stored, because they are too large for a result."""

from __future__ import annotations

import contextlib
import posixpath
import threading

import pyarrow.fs as pafs

from midstream.storage.blobs import filesystem_of

__all__ = ["KEPT_OPERATIONS", "ControlValues"]

KEPT_OPERATIONS = 10
"""Newest operations whose values stay."""


class ControlValues:
    """A folder for each operation that has stored some. May be used by several threads."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._fs, self._root = filesystem_of(location)
        self._lock = threading.Lock()

    def folder(self, number: int) -> str:
        """The folder with the values of an operation."""
        return posixpath.join(self._location, f"{number:010d}")

    def tidy(self) -> None:
        """Remove the values of all but the newest operations. What cannot be removed now is removed later."""
        with self._lock, contextlib.suppress(OSError):
            found = self._fs.get_file_info(pafs.FileSelector(self._root, allow_not_found=True))
            for old in sorted(info.path for info in found)[:-KEPT_OPERATIONS]:
                self._fs.delete_dir(old)
