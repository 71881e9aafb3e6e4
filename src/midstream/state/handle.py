"""The state that a user's function sees: the value, lists, maps and timers of one key.

A handle belongs to one key in one task. It remembers what was read and written. Its keeper writes each change once, at
the end of the epoch, no matter how often it was changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence, Sized
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, overload

import msgspec

from midstream.data.key_space import KeySpace
from midstream.errors import StateError
from midstream.state.keys import Namespace, item_key, split_item
from midstream.state.values import MISSING

__all__ = ["Keeper", "ListView", "MapView", "State"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
MapKey = str | int | bytes | tuple[str | int | bytes, ...]


class Keeper(Protocol):
    """Stores the state of handles."""

    what: str
    space: KeySpace
    clock: int
    watermark: int | None
    firing: int | None
    """The time of the timer that is firing, if any."""

    def read(self, stored: bytes) -> Any:
        """The object under a stored key, or MISSING."""

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
        """Stored keys with this prefix and their objects, ascending, without this epoch's changes by handles."""

    def set_timer(self, key: bytes, namespace: Namespace, time: int, wanted: bool) -> None:
        """Register or cancel a timer."""


class State:
    """A function's state for one key. An epoch's changes are committed together, or not at all.

    * ``get(default)``, ``set(value)``, ``delete()``: one value, any object that can be pickled. After changing the
      object in place, call ``set`` again.
    * ``list(name)``: a short list, read and written whole.
    * ``map(name)``: a dict whose items are stored one by one, so that reading or writing an item costs only that item.
    * ``event_timer(time)``, ``clock_timer(time)``: have ``on_timer`` called when the watermark, or the clock, gets
      there.

    >>> from midstream import Flow, ListSource, MemorySink
    >>> from midstream.testing import run_local
    >>> def count(key, row, state):
    ...     state.set(state.get(0) + 1)
    ...     return [{"user": key, "n": state.get()}]
    >>> flow, out = Flow("visits"), MemorySink()
    >>> visits = flow.source("in", ListSource([[{"user": "ann"}], [{"user": "ann"}]], "user string"))
    >>> visits.key_by("by user", "user").process("count", count, returns="user string, n int").sink("out", out)
    >>> _ = run_local(flow)
    >>> out.rows[-1]
    {'user': 'ann', 'n': 2}
    """

    __slots__ = ("_changed", "_keeper", "_key", "_level", "_lists", "_maps", "_stored_level", "_value")

    def __init__(self, keeper: Keeper, key: bytes, value: Any, level: int = 0) -> None:
        self._keeper = keeper
        self._key = key
        self._value = value
        self._changed = False
        # The revision whose layout this key's state has: in this handle, and as stored.
        self._level = self._stored_level = level
        self._lists: dict[str, ListView] | None = None
        self._maps: dict[str, MapView] | None = None

    def get(self, default: Any = None) -> Any:
        """The value, or the default if the key has none."""
        value = self._value
        return default if value is MISSING else value

    def set(self, value: Any) -> None:
        """Set the value."""
        self._value = value
        self._changed = True

    def delete(self) -> None:
        """Delete the value."""
        self._value = MISSING
        self._changed = True

    def list(self, name: str = "list") -> ListView:
        """A list that belongs to this key."""
        if self._lists is None:
            self._lists = {}
        view = self._lists.get(name)
        if view is None:
            view = self._lists[name] = self._new_list(
                item_key(self._key, Namespace.LIST, name.encode(), self._keeper.space)
            )
        return view

    def _new_list(self, stored: bytes) -> ListView:
        return ListView(self._keeper, stored)

    def map(self, name: str = "map") -> MapView:
        """A map that belongs to this key."""
        if self._maps is None:
            self._maps = {}
        view = self._maps.get(name)
        if view is None:
            data = name.encode()
            prefix = item_key(self._key, Namespace.MAP, bytes([len(data)]) + data, self._keeper.space)
            view = self._maps[name] = self._new_map(prefix, name)
        return view

    def _new_map(self, prefix: bytes, name: str) -> MapView:
        return MapView(self._keeper, prefix, name)

    def _exists(self) -> bool:
        """Whether this key has any state."""
        lists, maps = self._lists or {}, self._maps or {}
        views: Iterable[Sized] = (*lists.values(), *maps.values())
        if self._value is not MISSING or any(len(view) for view in views):
            return True
        # A view that was opened may have been cleared since, so only unopened views count as stored.
        return any(name not in lists for name in self._stored_lists()) or any(
            name not in maps for name in self._stored_maps()
        )

    def _stored_lists(self) -> Iterator[str]:
        for stored, _ in self._keeper.scan(item_key(self._key, Namespace.LIST, space=self._keeper.space)):
            yield split_item(stored, self._keeper.space)[1].decode()

    def _stored_maps(self) -> Iterator[str]:
        """The map name of each stored item."""
        for stored, _ in self._keeper.scan(item_key(self._key, Namespace.MAP, space=self._keeper.space)):
            item = split_item(stored, self._keeper.space)[1]
            yield item[1 : 1 + item[0]].decode()

    def clear(self) -> None:
        """Delete the value, lists and maps of this key. Timers stay."""
        self.delete()
        for name in self._stored_lists():
            self.list(name)
        for name in self._stored_maps():
            self.map(name)
        for items in (self._lists or {}).values():
            items.clear()
        for mapping in (self._maps or {}).values():
            mapping.clear()

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def now(self) -> datetime:
        """The driver's clock at the start of the epoch; the same in all tasks and attempts."""
        return _datetime(self._keeper.clock)

    @property
    def watermark(self) -> datetime | None:
        """The event time up to which all rows are assumed to have arrived, including this epoch's; None if unknown."""
        return None if self._keeper.watermark is None else _datetime(self._keeper.watermark)

    def event_timer(self, time: datetime) -> None:
        """Call ``on_timer`` at the end of the epoch in which the watermark reaches this time.

        When a run ends with ``close_windows=True``, all timers set so far fire, but not timers that those set.
        """
        self._timer(Namespace.EVENT_TIMER, time, wanted=True)

    def clock_timer(self, time: datetime) -> None:
        """Call ``on_timer`` at the end of the first epoch that begins at this time or later."""
        self._timer(Namespace.CLOCK_TIMER, time, wanted=True)

    def cancel_event_timer(self, time: datetime) -> None:
        """Cancel an event timer. Does nothing if there is no such timer."""
        self._timer(Namespace.EVENT_TIMER, time, wanted=False)

    def cancel_clock_timer(self, time: datetime) -> None:
        """Cancel a clock timer. Does nothing if there is no such timer."""
        self._timer(Namespace.CLOCK_TIMER, time, wanted=False)

    def _timer(self, namespace: Namespace, time: datetime, wanted: bool) -> None:
        if not isinstance(time, datetime):
            raise StateError(f"{self._keeper.what}: a timer needs a datetime, found {type(time).__name__} {time!r:.60}")
        self._keeper.set_timer(self._key, namespace, _microseconds(time), wanted)


class ListView(Sequence[Any]):
    """A list of one key; the oldest item first."""

    __slots__ = ("_changed", "_items", "_keeper", "_stored")

    def __init__(self, keeper: Keeper, stored: bytes) -> None:
        self._keeper = keeper
        self._stored = stored
        found = keeper.read(stored)
        self._items: list[Any] = [] if found is MISSING else found
        self._changed = False

    def append(self, item: Any, keep: int | None = None) -> None:
        """Add an item; with ``keep``, only the most recent ``keep`` items stay."""
        self._items.append(item)
        self._changed = True
        if keep is not None:
            self.trim(keep)

    def extend(self, items: Iterable[Any]) -> None:
        """Add items."""
        self._items.extend(items)
        self._changed = True

    def trim(self, n: int) -> None:
        """Keep the last ``n`` items."""
        if len(self._items) > n:
            del self._items[: len(self._items) - n]
            self._changed = True

    def clear(self) -> None:
        """Delete all items."""
        self._items = []
        self._changed = True

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._items[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"ListView({self._items!r})"

    def _pending(self) -> tuple[bytes, Any] | None:
        """The pending write: a stored key and its object, or MISSING to delete it."""
        return (self._stored, self._items or MISSING) if self._changed else None


class MapView(MutableMapping[MapKey, Any]):
    """A map of one key. Its own keys are strings, whole numbers, bytes, or tuples of these."""

    __slots__ = ("_keeper", "_known", "_name", "_prefix", "_written")

    def __init__(self, keeper: Keeper, prefix: bytes, name: str) -> None:
        self._keeper = keeper
        self._prefix = prefix
        self._name = name
        self._known: dict[MapKey, Any] = {}  # read or written
        self._written: dict[MapKey, bytes] = {}

    def __getitem__(self, item: MapKey) -> Any:
        if item not in self._known:
            self._known[item] = self._keeper.read(self._stored(item))
        if self._known[item] is MISSING:
            raise KeyError(item)
        return self._known[item]

    def __setitem__(self, item: MapKey, value: Any) -> None:
        self._written[item] = self._stored(item)
        self._known[item] = value

    def __delitem__(self, item: MapKey) -> None:
        self[item]
        self[item] = MISSING

    def clear(self) -> None:
        """Delete all items."""
        for item in self:
            self[item] = MISSING

    def __iter__(self) -> Iterator[MapKey]:
        """The keys of all items; previously stored items come first."""
        for stored, value in self._keeper.scan(self._prefix):
            item = _item_of(stored[len(self._prefix) :])
            self._known.setdefault(item, value)
        return iter([item for item, value in self._known.items() if value is not MISSING])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"MapView({dict(self)!r})"

    def _pending(self) -> Iterator[tuple[bytes, Any]]:
        for item, stored in self._written.items():
            yield stored, self._known[item]

    def _stored(self, item: MapKey) -> bytes:
        parts = item if isinstance(item, tuple) else (item,)
        if not all(type(part) in (str, int, bytes) for part in parts):
            raise StateError(
                f"{self._keeper.what}: {item!r:.60} cannot be a key of the map {self._name!r}; use str, int,"
                f" bytes, or tuples of these"
            )
        try:
            return self._prefix + msgspec.msgpack.encode(item)
        except OverflowError:
            raise StateError(f"{self._keeper.what}: {item!r} does not fit the 64 bits of a map key") from None


def _item_of(data: bytes) -> MapKey:
    item = msgspec.msgpack.decode(data)
    return tuple(item) if isinstance(item, list) else item


def _microseconds(time: datetime) -> int:
    # A time without a zone is UTC, which is also how timestamps without a zone are compared with watermarks.
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND


def _datetime(microseconds: int) -> datetime:
    # An epoch that closes all windows has a watermark later than any datetime.
    return _EPOCH + min(microseconds, _LAST) * _MICROSECOND
