"""A log of records in the checkpoint location: entries are added, and never changed or removed.

An entry is a file: a record at some moment, and a checksum. A record has an entry for its beginning and one for each
later event; its last entry counts. The entries themselves are numbered without gaps, so that a missing one is noticed.

An entry is on disk before a reader is told about it. So a torn *last* entry was never reported to anybody: it is left
out, and set aside by the next entry. Any other damage is an error.
"""

from __future__ import annotations

import logging
import posixpath
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import pyarrow.fs as pafs

from midstream.errors import CheckpointError
from midstream.storage.blobs import ASIDE, filesystem_of, set_aside, write_atomically
from midstream.storage.checksums import with_checksum, without_checksum
from midstream.storage.documents import read_struct, write_struct

__all__ = ["EntryLog", "Numbered"]

_log = logging.getLogger("midstream")


class Numbered(msgspec.Struct, frozen=True):
    """A record with a number of its own: all entries with one number are about the same thing."""

    number: int


R = TypeVar("R", bound=Numbered)


class EntryLog(Generic[R]):
    """Records of one kind, in the order in which they began. One process writes; any may read."""

    kind: Any
    """The class of its entries: that of its records, if each has an entry of its own."""
    what: str
    """Its name in messages."""
    advice: str
    """What to do if it is damaged."""
    loss: str
    """What is lost with an entry that is set aside, for messages."""

    def __init__(self, location: str, *, durable: bool = True) -> None:
        self.location = location
        self._durable = durable
        self._fs, self._root = filesystem_of(location)
        # Entries never change, so each is read once. `_read` counts them.
        self._records: dict[int, R] = {}
        self._read = 0
        self._torn: str | None = None
        self._owed: tuple[R, Callable[[], None]] | None = None
        """A record without an entry yet, and what has to be called before it gets one."""
        self._lock = threading.Lock()

    def keep(self, record: R) -> None:
        """Add an entry, which replaces the earlier ones of this record."""
        self._write(record)

    def owe(self, record: R, sync: Callable[[], None]) -> None:
        """Take a record whose entry is added later: by the next call of any method, in whatever thread.

        :param sync: has all on disk that the record refers to; called before its entry is added.
        """
        with self._lock:
            self._pay()
            self._owed = record, sync

    def secure(self) -> None:
        """Have all records on disk that the log was given."""
        with self._lock:
            self._pay()

    def _pay(self) -> None:
        if self._owed is None:
            return
        record, sync = self._owed
        sync()
        self._append(record)
        self._owed = None

    def _records_in(self, entry: Any) -> tuple[R, ...]:
        """The records of an entry."""
        return (entry,)

    def _write(self, entry: msgspec.Struct) -> None:
        with self._lock:
            self._pay()
            self._append(entry)

    def _append(self, entry: msgspec.Struct) -> None:
        self._catch_up()
        if self._torn is not None:
            set_aside(self._fs, self._torn, durable=self._durable)
            self._torn = None
        data = with_checksum(write_struct(entry))
        write_atomically(self._fs, self._path(self._read + 1), data, durable=self._durable, checked=True)
        self._add(entry)

    def records(self) -> list[R]:
        """All records, oldest first, each from its last entry."""
        with self._lock:
            self._pay()
            self._catch_up()
            return [self._records[number] for number in sorted(self._records)]

    def next_number(self) -> int:
        """The number of the next record."""
        with self._lock:
            self._pay()
            self._catch_up()
            return max(self._records, default=0) + 1

    def set_damage_aside(self) -> list[str]:
        """Set aside the entries that are damaged or missing; return what was done, as lines for the user."""
        found: dict[int, str] = {}
        with self._lock:
            entries = self._entries()
            for entry in range(1, max(entries, default=0) + 1):
                if entry not in entries:
                    write_atomically(self._fs, self._path(entry) + ASIDE, b"", durable=self._durable)
                    found[entry] = "missing"
                elif not entries[entry].endswith(ASIDE) and self._decoded(entry) is None:
                    set_aside(self._fs, self._path(entry), durable=self._durable)
                    found[entry] = f"damaged; its file is now {self._name(entry) + ASIDE!r}"
            self._records, self._read, self._torn = {}, 0, None
        return [
            f"entry {entry} of {self.what} in {self.location!r} is {what}. It is left out{self.loss}"
            for entry, what in found.items()
        ]

    def _catch_up(self) -> None:
        """Read the entries that were added since; usually there are none, which costs one file system request."""
        if self._read and self._fs.get_file_info(self._path(self._read + 1)).type == pafs.FileType.NotFound:
            return
        entries = self._entries()
        last = max(entries, default=0)
        for entry in range(self._read + 1, last + 1):
            name = entries.get(entry)
            if name is not None and name.endswith(ASIDE):
                self._read = entry
                continue
            found = None if name is None else self._decoded(entry)
            if found is not None:
                self._add(found)
            elif entry == last:
                self._leave_out(entry)
            else:
                raise CheckpointError(
                    f"entry {entry} of {self.what} in {self.location!r}, {self._name(entry)!r}, is "
                    f"{'damaged' if name else 'missing'}, and later entries exist. Restore it from a copy; "
                    f"{self.advice}"
                )

    def _leave_out(self, entry: int) -> None:
        if self._torn is None:
            _log.warning(
                "the last entry of %s in %r, %r, is torn: the machine crashed before it was on disk. It is left out",
                self.what,
                self.location,
                self._name(entry),
            )
        self._torn = self._path(entry)

    def _add(self, entry: Any) -> None:
        for record in self._records_in(entry):
            self._records[record.number] = record
        self._read += 1

    def _entries(self) -> dict[int, str]:
        """The names of all entries, including those set aside, by number."""
        selector = pafs.FileSelector(self._root, allow_not_found=True)
        names = (posixpath.basename(info.path) for info in self._fs.get_file_info(selector))
        found = {}
        for name in sorted(names, reverse=True):  # an entry set aside may have a successor, which comes later
            number = name.removesuffix(ASIDE).removesuffix(".json")
            if number.isdigit():
                found[int(number)] = name
        return found

    def _decoded(self, entry: int) -> Any:
        """What an entry holds, or None if it is damaged."""
        with self._fs.open_input_stream(self._path(entry)) as stream:
            data = without_checksum(stream.read())
        what = f"entry {entry} of {self.what} in {self.location!r}"
        return None if data is None else read_struct(data, self.kind, what)

    def _path(self, entry: int) -> str:
        return posixpath.join(self._root, self._name(entry))

    @staticmethod
    def _name(entry: int) -> str:
        return f"{entry:010d}.json"
