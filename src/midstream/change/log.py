"""The log of changes in the checkpoint location: one file for each, rewritten when its outcome is known."""

from __future__ import annotations

import posixpath

import msgspec
import pyarrow.fs as pafs

from midstream.change.records import ChangeRecord
from midstream.data.blobs import filesystem_of, write_atomically
from midstream.errors import CheckpointError

__all__ = ["ChangeLog"]


class ChangeLog:
    """Changes of one job, in the order in which they were requested.

    >>> import tempfile
    >>> from midstream.ids import Revision
    >>> log = ChangeLog(tempfile.mkdtemp())
    >>> log.keep(ChangeRecord(log.next_number(), Revision(2), 0.0, "ann@host", "fries", (), "plan"))
    >>> [record.revision for record in log.records()]
    [2]
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._fs, self._root = filesystem_of(location)

    def keep(self, record: ChangeRecord) -> None:
        """Write a record, in place of the one of the same number."""
        data = msgspec.json.format(msgspec.json.encode(record), indent=1)
        write_atomically(self._fs, posixpath.join(self._root, f"{record.number:010d}.json"), data)

    def records(self) -> list[ChangeRecord]:
        """All records, oldest first."""
        return [self._read(name) for name in self._names()]

    def next_number(self) -> int:
        """The number of the next record."""
        names = self._names()
        return int(names[-1].removesuffix(".json")) + 1 if names else 1

    def _names(self) -> list[str]:
        selector = pafs.FileSelector(self._root, allow_not_found=True)
        names = (posixpath.basename(info.path) for info in self._fs.get_file_info(selector))
        return sorted(name for name in names if name.removesuffix(".json").isdigit())

    def _read(self, name: str) -> ChangeRecord:
        with self._fs.open_input_stream(posixpath.join(self._root, name)) as stream:
            data = stream.read()
        try:
            return msgspec.json.decode(data, type=ChangeRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"the record of a change, {name!r} in {self.location!r}, is damaged: {error}. Restore it from a copy; "
                f"or start the flow with changes='drop', which leaves all earlier changes out"
            ) from error
