"""A disk that loses power: records the system calls of :mod:`midstream.storage.disk`, and simulates what a crash
leaves.

Everything synced is there. Of the rest anything is possible: a new name may be missing, a removed one may be back, and
a file may have none of its content, a part of it, zeros, or all. That is harsher than most file systems, and as harsh
as POSIX allows.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from midstream.storage import disk


@dataclass(frozen=True)
class Made:
    """A folder was created."""

    path: str


@dataclass(frozen=True)
class Created:
    """A file was opened for writing: a new file, or an existing one that is now empty."""

    path: str


@dataclass(frozen=True)
class Written:
    """Bytes were appended to a file."""

    path: str
    data: bytes


@dataclass(frozen=True)
class Renamed:
    """A file was renamed, replacing any file with the new name."""

    path: str
    other: str


@dataclass(frozen=True)
class Removed:
    """A file was removed."""

    path: str


@dataclass(frozen=True)
class Synced:
    """The content of a file, or the names in a folder, are on disk."""

    path: str
    is_folder: bool


@dataclass(frozen=True)
class AllSynced:
    """Everything is on disk."""


@dataclass(frozen=True)
class Promised:
    """Not a call: a caller was told that something is durable."""

    what: Any


Operation = Made | Created | Written | Renamed | Removed | Synced | AllSynced | Promised


class Killed(BaseException):
    """The process was killed; nothing after this happens."""


class Recorder:
    """Replaces the module ``os`` in :mod:`midstream.storage.disk`: performs and records each call."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.kill_at: int | None = None
        """The operation before which the process dies."""
        self._open: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def note(self, operation: Operation) -> None:
        if self.kill_at is not None and len(self.operations) >= self.kill_at:
            raise Killed
        self.operations.append(operation)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            file = os.open(path, flags, mode)
        else:
            os.stat(os.path.dirname(path))  # raises the same error as opening, before anything is recorded
            self.note(Created(path))
            file = os.open(path, flags, mode)
        self._open[file] = path
        return file

    def close(self, file: int) -> None:
        del self._open[file]
        os.close(file)

    def write(self, file: int, data: Any) -> int:
        self.note(Written(self._open[file], bytes(data)))
        written = os.write(file, data)
        assert written == len(data), "a test's disk is not full"
        return written

    def fsync(self, file: int) -> None:
        self.note(Synced(self._open[file], os.path.isdir(self._open[file])))

    def replace(self, path: str, other: str) -> None:
        self.note(Renamed(path, other))
        os.replace(path, other)

    def unlink(self, path: str) -> None:
        os.stat(path)
        self.note(Removed(path))
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        if os.path.exists(path):
            raise FileExistsError(path)
        os.stat(os.path.dirname(path))
        self.note(Made(path))
        os.mkdir(path, mode)

    def syncfs(self, _: int) -> int:
        self.note(AllSynced())
        return 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the disk's calls in this context, as a new process that has not synced any folder yet."""
        with (
            patch.object(disk, "os", self),
            patch.object(disk, "_syncfs", self.syncfs),
            patch.object(disk, "at_once", _in_turn),  # one of the orders that threads may have, the same in every run
            patch.object(disk, "_on_disk", set()),
        ):
            yield


def _in_turn(steps: Collection[Callable[[], None]]) -> None:
    for step in steps:
        step()


@dataclass
class _File:
    content: bytes = b""
    on_disk: bytes | None = None
    """None: never synced."""


@dataclass
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    on_disk: dict[str, list[_File | _Folder | None]] = field(default_factory=dict)
    """The targets of each name since the folder was last synced, oldest first; only names that changed."""

    def set(self, name: str, now: _File | _Folder | None) -> None:
        self.on_disk.setdefault(name, [self.names.get(name)]).append(now)
        if now is None:
            del self.names[name]
        else:
            self.names[name] = now


class Disk:
    """The folder ``root`` as the kernel sees it, and as it may be on disk."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._top = _Folder()

    def after(self, operations: Sequence[Operation]) -> Disk:
        """Apply recorded operations."""
        for operation in operations:
            match operation:
                case Made(path):
                    self._folder(path).set(os.path.basename(path), _Folder())
                case Created(path):
                    self._folder(path).set(os.path.basename(path), _File())
                case Written(path, data):
                    self._file(path).content += data
                case Renamed(path, other):
                    self._folder(other).set(os.path.basename(other), self._file(path))
                    self._folder(path).set(os.path.basename(path), None)
                case Removed(path):
                    self._folder(path).set(os.path.basename(path), None)
                case Synced(path, is_folder=False):
                    self._file(path).on_disk = self._file(path).content
                case Synced(path):
                    if self._is_inside(path):  # folders above existed before
                        self._folder(os.path.join(path, "x")).on_disk.clear()
                case AllSynced():
                    _sync_all(self._top)
        return self

    def files(self) -> dict[str, bytes]:
        """The kernel's view: the content of all files, by path below the root."""
        return dict(_files(self._top, ""))

    def crash(self, rng: random.Random, folder: Path) -> None:
        """Lose power, and write what is left to a folder."""
        _leave(self._top, folder, rng, rng.choice(MOODS))

    def _is_inside(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + os.sep)

    def _folder(self, path: str) -> _Folder:
        assert self._is_inside(path), path
        found: _File | _Folder = self._top
        for name in os.path.relpath(os.path.dirname(path), self._root).split(os.sep):
            if name != ".":
                assert isinstance(found, _Folder)
                found = found.names[name]
        assert isinstance(found, _Folder)
        return found

    def _file(self, path: str) -> _File:
        found = self._folder(path).names[os.path.basename(path)]
        assert isinstance(found, _File)
        return found


def _sync_all(folder: _Folder) -> None:
    folder.on_disk.clear()
    for each in folder.names.values():
        if isinstance(each, _Folder):
            _sync_all(each)
        else:
            each.on_disk = each.content


def _files(folder: _Folder, path: str) -> Iterator[tuple[str, bytes]]:
    for name, each in folder.names.items():
        if isinstance(each, _Folder):
            yield from _files(each, f"{path}{name}/")
        else:
            yield path + name, each.content


@dataclass(frozen=True)
class _Mood:
    """How much of the unsynced data a crash leaves: which of several states of a name, and which part of a file."""

    name: Callable[[random.Random, int], int]
    content: Callable[[random.Random, bytes], bytes]


def _any_part(rng: random.Random, data: bytes) -> bytes:
    return rng.choice([data, b"", data[: rng.randrange(len(data) + 1)], bytes(len(data))])


MOODS = [
    _Mood(lambda rng, states: 0, lambda rng, data: b""),  # nothing
    _Mood(lambda rng, states: states - 1, lambda rng, data: b""),  # names without content, as is common on ext4
    _Mood(lambda rng, states: states - 1, _any_part),
    _Mood(lambda rng, states: rng.randrange(states), lambda rng, data: data),
    _Mood(lambda rng, states: rng.randrange(states), _any_part),
    _Mood(lambda rng, states: rng.randrange(states), _any_part),
]


def _leave(folder: _Folder, path: Path, rng: random.Random, mood: _Mood) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name in sorted({*folder.names, *folder.on_disk}):
        states = folder.on_disk.get(name) or [folder.names[name]]
        found = states[mood.name(rng, len(states))]
        if isinstance(found, _Folder):
            _leave(found, path / name, rng, mood)
        elif found is not None:
            same = found.on_disk is not None and found.on_disk == found.content
            (path / name).write_bytes(found.content if same else mood.content(rng, found.content))
