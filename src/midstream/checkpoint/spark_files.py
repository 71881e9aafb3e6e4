"""Spark's own log in a checkpoint, as files: what a job needs of it to continue after an epoch.

Spark keeps one small file an epoch in ``offsets`` (written before the epoch) and ``commits`` (after it), and what its
sources remember in ``sources``. It continues after the last offsets, and needs those before them. Without the commit of
the last ones it asks for that epoch again; the epoch has a manifest, so nothing is computed.

``metadata`` holds the number of the query, of which a Spark application runs one at a time: a fork gets another one.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import uuid
from collections.abc import Iterator, Mapping

import msgspec
import pyarrow.fs as pafs

from midstream.checkpoint.source_positions import KEPT
from midstream.errors import CheckpointError
from midstream.ids import Epoch
from midstream.storage.blobs import ASIDE, filesystem_of, remove_file, set_aside, write_atomically

__all__ = ["LOGS", "SOURCES", "SparkFiles"]

LOGS = ("offsets", "commits")
SOURCES = "sources"
ATTEMPTS = 5

_log = logging.getLogger("midstream")


class SparkFiles:
    """The files of Spark's log below one folder. Without a query, as on the local runtime, there are none."""

    def __init__(self, location: str, *, durable: bool = True) -> None:
        self.location = location
        self._durable = durable
        self._fs, self._root = filesystem_of(location)

    def needed_after(self, epoch: Epoch) -> dict[str, bytes]:
        """The files from which Spark continues after an epoch, by their names below this folder. It may be running."""
        if not self._listed(""):
            return {}
        found = {}
        for log in LOGS:
            for each in (epoch - 1, epoch):
                content = self._content(f"{log}/{each}")
                if content is not None:
                    found[f"{log}/{each}"] = content
        if missing := [name for name in _wanted(epoch) if name not in found]:
            raise CheckpointError(
                f"Spark's log in {self.location!r} lacks {', '.join(missing)}, without which nothing can go on after "
                f"epoch {epoch}"
            )
        return {**found, **self._sources(), **dict(self._read_below(KEPT))}

    def newest_offsets(self) -> tuple[str, bytes] | None:
        """The newest entry of the log of offsets, with its name."""
        numbers = [number for info in self._listed("offsets") if (number := _number(info)) is not None]
        for number in sorted(numbers, reverse=True):
            content = self._content(f"offsets/{number}")
            if content is not None:
                return f"offsets/{number}", content
        return None

    def holds_state(self) -> bool:
        """Whether operators of Spark's own keep state beside the log."""
        return bool(self._listed("state"))

    def remove(self) -> None:
        """Remove the whole log, if there is one. Must not be called while Spark uses it."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_dir(self._root)

    def clear(self) -> None:
        """Remove all but the number of the query, which may be running if it has read nothing of the rest."""
        for folder in (*LOGS, SOURCES, KEPT):
            with contextlib.suppress(FileNotFoundError):
                self._fs.delete_dir(posixpath.join(self._root, folder))

    def number(self, query: str) -> None:
        """Give the query a number (a UUID in hex). Without one, Spark refuses a log with entries."""
        data = msgspec.json.encode({"id": str(uuid.UUID(query))})
        write_atomically(self._fs, posixpath.join(self._root, "metadata"), data, durable=self._durable)

    def metadata(self) -> dict[str, bytes]:
        """The file with the number of the query, if there is one."""
        content = self._content("metadata")
        return {} if content is None else {"metadata": content}

    def leads_after(self, epoch: Epoch) -> bool:
        """Whether the log still has what Spark needs to continue after an epoch. True if there is no log at all."""
        if not self._listed(""):
            return True
        paths = [posixpath.join(self._root, name) for name in _wanted(epoch)]
        return all(info.type == pafs.FileType.File for info in self._fs.get_file_info(paths))

    def has_committed(self, epoch: Epoch) -> bool:
        """Whether the log has the commit of an epoch. Spark does not sync it, so it may be torn: then it has none."""
        return _is_whole_entry(self._content(f"commits/{epoch}"))

    def set_torn_aside(self) -> None:
        """Set aside the newest commit, and the newest offsets, if they are torn: Spark would not start with them.

        Without a commit, Spark requests that epoch again, and we skip it if it has a manifest. Offsets are on disk
        before the manifest of their epoch is; without them the epoch is planned again.
        """
        for log in ("commits", "offsets"):
            names = [posixpath.basename(info.path) for info in self._listed(log)]
            newest = max((int(name) for name in names if name.isdigit()), default=None)
            if newest is not None and not _is_whole_entry(self._content(f"{log}/{newest}")):
                set_aside(self._fs, posixpath.join(self._root, log, str(newest)), durable=self._durable)
                _log.warning(
                    "Spark's %s of epoch %d in %r were torn by a crash; they are set aside", log, newest, self.location
                )

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write these files, except those that have this content already."""
        for name, content in files.items():
            if self._content(name) != content:
                self._remove(_sum_of(name))
                write_atomically(self._fs, posixpath.join(self._root, name), content, durable=self._durable)

    def remove_after(self, epoch: Epoch) -> None:
        """Remove what the log has of later epochs, commits first. Must not be called while Spark runs."""
        for log in reversed(LOGS):
            numbered = [(_number(info), info) for info in self._listed(log)]
            for number, info in sorted(((n, i) for n, i in numbered if n is not None), key=lambda each: -each[0]):
                if number > epoch:
                    self._remove(f"{log}/{posixpath.basename(info.path)}")

    def _sources(self) -> dict[str, bytes]:
        """What sources remember. Spark may replace many of these files by one while they are read."""
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(FileNotFoundError):
                return dict(self._read_below(SOURCES))
        return dict(self._read_below(SOURCES))

    def _read_below(self, folder: str) -> Iterator[tuple[str, bytes]]:
        for info in self._listed(folder, recursive=True):
            name = posixpath.relpath(info.path, self._root)
            if info.is_file and not posixpath.basename(name).startswith(".") and not name.endswith(".tmp"):
                with self._fs.open_input_stream(info.path) as stream:
                    yield name, bytes(stream.read())

    def _listed(self, folder: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
        path = posixpath.join(self._root, folder) if folder else self._root
        return list(self._fs.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=recursive)))

    def _content(self, name: str) -> bytes | None:
        try:
            with self._fs.open_input_stream(posixpath.join(self._root, name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def _remove(self, name: str) -> None:
        for each in dict.fromkeys((_sum_of(name), name)):
            with contextlib.suppress(FileNotFoundError):
                remove_file(self._fs, posixpath.join(self._root, each))


def _is_whole_entry(data: bytes | None) -> bool:
    """Whether this is a whole file of Spark's log: a line with the version, a line of JSON, and perhaps more."""
    lines = (data or b"").split(b"\n")
    try:
        return lines[0].startswith(b"v") and isinstance(msgspec.json.decode(lines[1]), dict)
    except (IndexError, msgspec.MsgspecError):
        return False


def _wanted(epoch: Epoch) -> list[str]:
    return [f"offsets/{each}" for each in (epoch - 1, epoch) if each >= 0]


def _sum_of(name: str) -> str:
    """The file in which Hadoop's file system keeps the checksum of another one.

    >>> _sum_of("offsets/7")
    'offsets/.7.crc'
    """
    folder, base = posixpath.split(name)
    return name if base.startswith(".") else posixpath.join(folder, f".{base}.crc")


def _number(info: pafs.FileInfo) -> int | None:
    """The epoch of a file of the log, whole, set aside, or a checksum."""
    name = posixpath.basename(info.path).removesuffix(ASIDE).removesuffix(".crc").removeprefix(".")
    return int(name) if name.isdigit() else None
