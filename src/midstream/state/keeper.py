"""Manages the handles of one task: loads values for whole slices, fires timers, expires keys, writes changes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from midstream.data.times import EpochTimes
from midstream.errors import StateError
from midstream.ids import Revision
from midstream.state.handle import State
from midstream.state.integers import integer_bytes, integer_of
from midstream.state.keys import Namespace, item_key, split_timer, timer_key
from midstream.state.task import TaskState
from midstream.state.undo import Undo, UndoState
from midstream.state.values import MISSING, ObjectCodec

__all__ = ["HandleKeeper", "Migrations"]

_VIEWS = (Namespace.LIST, Namespace.MAP)

HELD_BYTES = 32 << 20
"""Handles that a task keeps between slices for each of its operators, about."""
MOST_HELD = 8
"""Up to so many times as much, where the same keys come again and again: each time they would be written and read."""
_WATCHED = 4096
"""Keys that are looked at to see whether they come again."""
_HANDLE_BYTES = 400
"""Approximate size in bytes of a handle without its value."""


Migrations = Sequence[tuple[Revision, Callable[[bytes, State], None]]]
"""Functions that migrate a key's state, with the revisions that introduced each layout, oldest first."""


class HandleKeeper:
    """The handles of one operator in one task.

    Keys are expired at the start, by the epoch's clock, so that all rows of an epoch see the same state.

    With ``undo``, the changes that a function makes to its state can be undone.

    State is migrated key by key, when a function first asks for it. A key's *level* is the revision whose layout its
    state has. It is stored beside the key after the first migration, and is 0 before.
    """

    def __init__(
        self,
        what: str,
        task: TaskState,
        codec: ObjectCodec,
        *,
        times: EpochTimes,
        ttl_us: int | None = None,
        has_levels: bool = False,
        undo: Undo | None = None,
    ) -> None:
        self.what = what
        self.clock = times.clock
        self.watermark = times.watermark
        self._is_closing = times.is_closing
        self.firing: int | None = None
        self.idle_timers: Mapping[Namespace, str] = {}
        """Timer kinds that cannot fire for the current function, with the reason."""
        self._task = task
        self.space = task.space
        self._codec = codec
        self._has_levels = has_levels
        self._ttl_us = ttl_us
        self.undo = undo
        self._handles: dict[bytes, State] = {}
        self._held_bytes = 0
        self._held_limit = HELD_BYTES
        self._watched: set[bytes] = set()
        """The first keys of this epoch."""
        self._again = 0
        """How many of these were loaded again, since handles were forgotten last."""
        self._due: list[tuple[int, bytes, Namespace]] = []  # a heap, only while timers fire
        if ttl_us is not None:
            self._forget_expired()

    @property
    def task(self) -> TaskState:
        """The state of the task, below all handles."""
        return self._task

    def handles(self, keys: Sequence[bytes], migrations: Migrations = ()) -> list[State]:
        """The handle of each key. Handles are loaded together, and migrated by the given ``migrations``."""
        known = self._handles
        new = [key for key in keys if key not in known]
        if new:
            self._again += len(self._watched.intersection(new))
            self._watched.update(new[: max(0, _WATCHED - len(self._watched))])
            data = self._task.get_many(new)
            self._held_bytes += _HANDLE_BYTES * len(new) + sum(map(len, filter(None, data)))
            values = self._codec.decode_many(data, new)
            levels = self._levels(new)
            for key, stored, level in zip(new, values, levels, strict=True):
                value = MISSING if stored is MISSING else stored.value
                if self.undo is None:
                    known[key] = State(self, key, value, level)
                else:
                    known[key] = UndoState(self, key, value, level, self.undo)
        found = [known[key] for key in keys]
        if migrations:
            self._has_levels = True
            newest = migrations[-1][0]
            for key, handle in zip(keys, found, strict=True):
                if handle._level < newest:
                    _migrate(key, handle, migrations)
        return found

    def relieve(self, revision: Revision) -> None:
        """Write all changes and forget the handles, if there are many. No function may be using one.

        More of them are kept if so many keys have come again that all of them would fit.
        """
        if self._held_bytes <= self._held_limit:
            return
        if MOST_HELD * self._again >= len(self._watched) and self._held_limit < MOST_HELD * HELD_BYTES:
            self._held_limit *= 2
        else:
            self.write(revision)
            self._again = 0

    def due_timers(self) -> Iterator[tuple[bytes, int]]:
        """Timers that are due, in order of time; each is deleted as it is returned.

        Due timers that are set while this runs are returned as well, in order.
        """
        self._due = [(time, key, namespace) for namespace in self._limits() for time, key in self._timers(namespace)]
        heapq.heapify(self._due)
        while self._due:
            time, key, namespace = heapq.heappop(self._due)
            stored = timer_key(key, namespace, time, self.space)
            if self._task.get_many([stored]) == [None]:
                continue  # cancelled by a timer that fired earlier
            self._task.delete_many([stored])
            self.firing = time
            yield key, time
        self.firing = None

    def _levels(self, keys: Sequence[bytes]) -> Sequence[int]:
        if not self._has_levels:
            return [0] * len(keys)
        stored = self._task.get_many([item_key(key, Namespace.MIGRATED, space=self.space) for key in keys])
        return [0 if data is None else int.from_bytes(data, "big") for data in stored]

    def write(self, revision: Revision) -> None:
        """Write all changes to the task's state; ``revision`` is the revision of the function that made them."""
        changes: dict[bytes, Any] = {}
        touched = []
        for key, handle in self._handles.items():
            found = dict(_pending(handle))
            if found:
                changes.update(found)
                touched.append(key)
        keys = sorted(key for key, value in changes.items() if value is not MISSING)
        encoded = self._codec.encode_many([changes[key] for key in keys], revision, keys)
        self._task.put_many(keys, encoded)
        moved = sorted((key, handle._level) for key, handle in self._handles.items() if _level_changed(handle))
        records = [item_key(key, Namespace.MIGRATED, space=self.space) for key, _ in moved]
        self._task.put_many(records, [level.to_bytes(4, "big") for _, level in moved])
        self._task.delete_many(sorted(key for key, value in changes.items() if value is MISSING))
        if self._ttl_us is not None:
            self._note_written(sorted(touched), self._ttl_us)
        self._handles.clear()
        self._held_bytes = 0

    # ── called by handles ─────────────────────────────────────────────────────────────────────────────────────────

    def read(self, stored: bytes) -> Any:
        """The object under a stored key, or MISSING."""
        [data] = self._task.get_many([stored])
        return MISSING if data is None else self._codec.decode(data, stored).value

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
        """Stored keys with this prefix and their objects, ascending."""
        for stored, data in self._task.scan_prefix(prefix):
            yield stored, self._codec.decode(data, stored).value

    def set_timer(self, key: bytes, namespace: Namespace, time: int, wanted: bool) -> None:
        """Register or cancel a timer."""
        stored = timer_key(key, namespace, time, self.space)
        if self.undo is not None:
            self._note_timer(stored, self.undo)
        if not wanted:
            self._task.delete_many([stored])
            return
        if (why := self.idle_timers.get(namespace)) is not None:
            raise StateError(f"{self.what}: {why}")
        if self.firing is not None and time <= self.firing:
            raise StateError(
                f"{self.what}: on_timer set a timer for {time} µs while the one for {self.firing} µs fires; it must be "
                f"later, or it would fire forever"
            )
        limit = self._limits().get(namespace)
        if self._is_closing and namespace is Namespace.EVENT_TIMER:
            limit = None  # otherwise a timer that always sets another would never end
        if self.firing is not None and limit is not None and time <= limit and self._task.get_many([stored]) == [None]:
            heapq.heappush(self._due, (time, key, namespace))
        self._task.put_many([stored], [b""])

    def _note_timer(self, stored: bytes, undo: Undo) -> None:
        [before] = self._task.get_many([stored])

        def restore() -> None:
            if before is None:
                self._task.delete_many([stored])
            else:
                self._task.put_many([stored], [before])

        undo.add(restore)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _limits(self) -> dict[Namespace, int | None]:
        return {Namespace.EVENT_TIMER: self.watermark, Namespace.CLOCK_TIMER: self.clock}

    def _timers(self, namespace: Namespace) -> Iterator[tuple[int, bytes]]:
        limit = self._limits()[namespace]
        if limit is not None:
            yield from self._until(namespace, limit)

    def _until(self, namespace: Namespace, time: int) -> Iterator[tuple[int, bytes]]:
        """Entries up to a time (inclusive), in a namespace that is ordered by time."""
        stop = integer_bytes(time + 1)
        for number in self._task.occupied(namespace, stop):
            for stored, _ in list(self._task.scan(number, namespace, stop=stop)):
                yield split_timer(stored, self.space)

    def _forget_expired(self) -> None:
        for time, key in list(self._until(Namespace.EXPIRY, self.clock)):
            doomed = [key, timer_key(key, Namespace.EXPIRY, time, self.space)]
            doomed += [item_key(key, each, space=self.space) for each in (Namespace.WRITTEN, Namespace.MIGRATED)]
            for namespace in _VIEWS:
                doomed += [stored for stored, _ in self._task.scan_prefix(item_key(key, namespace, space=self.space))]
            self._task.delete_many(doomed)

    def _note_written(self, keys: Sequence[bytes], ttl_us: int) -> None:
        """Set the expiry of these keys to the clock plus their time to live."""
        records = [item_key(key, Namespace.WRITTEN, space=self.space) for key in keys]
        for key, data in zip(keys, self._task.get_many(records), strict=True):
            if data is not None:
                self._task.delete_many([timer_key(key, Namespace.EXPIRY, integer_of(data), self.space)])
        expiry = self.clock + ttl_us
        self._task.put_many(records, [integer_bytes(expiry)] * len(records))
        entries = [timer_key(key, Namespace.EXPIRY, expiry, self.space) for key in keys]
        self._task.put_many(entries, [b""] * len(entries))


def _migrate(key: bytes, handle: State, migrations: Migrations) -> None:
    """Apply all migrations newer than the key's level. A key without state only gets the new level."""
    exists = handle._exists()
    for revision, migrate in migrations:
        if handle._level < revision:
            if exists:
                migrate(key, handle)
            handle._level = revision


def _level_changed(handle: State) -> bool:
    """Whether the level must be written. A key without state needs none: nothing could be mistaken for older state."""
    return handle._level != handle._stored_level and handle._exists()


def _pending(handle: State) -> Iterator[tuple[bytes, Any]]:
    """The pending writes of a handle: stored keys and their objects, or MISSING to delete one."""
    if handle._changed:
        yield handle._key, handle._value
    for view in (handle._lists or {}).values():
        if (pending := view._pending()) is not None:
            yield pending
    for each in (handle._maps or {}).values():
        yield from each._pending()
