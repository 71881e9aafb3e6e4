"""State that can be restored if a function fails on a row.

A *turn* is one call of a function. The first time a turn reads or changes some state, its old content is recorded; if
the function raises, everything recorded is restored. Values that could be changed in place are pickled for this, which
is why only operators with ``on_error="branch"`` use such state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, overload

from midstream.state.handle import Keeper, ListView, MapKey, MapView, State
from midstream.state.values import MISSING

__all__ = ["Undo", "UndoState"]

_IMMUTABLE = frozenset(
    {type(None), type(MISSING), bool, int, float, complex, str, bytes, date, datetime, timedelta, Decimal}
)


class Undo:
    """The steps that undo a turn.

    >>> undo, seen = Undo(), []
    >>> undo.begin()
    >>> undo.add(lambda: seen.append("first"))
    >>> undo.add(lambda: seen.append("second"))
    >>> undo.roll_back()
    >>> seen
    ['second', 'first']
    """

    def __init__(self) -> None:
        self.turn = 0
        self._steps: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Begin a turn; changes made before can no longer be undone."""
        self.turn += 1
        self._steps.clear()

    def add(self, step: Callable[[], None]) -> None:
        """Record how to undo one change."""
        self._steps.append(step)

    def roll_back(self) -> None:
        """Undo the turn, last change first."""
        while self._steps:
            self._steps.pop()()
        self.turn += 1


def restorer_of(value: Any) -> Callable[[], Any]:
    """A function that returns the value as it is now, even if the value is changed in place later."""
    if type(value) in _IMMUTABLE:
        return lambda: value
    try:
        data = pickle.dumps(value, 5)
    except Exception:  # the codec of state falls back to cloudpickle, too
        return _restorer_with_classes(value)
    return lambda: pickle.loads(data)


def _restorer_with_classes(value: Any) -> Callable[[], Any]:
    import cloudpickle  # pickles classes of a script or notebook by value, as the codec of state does

    try:
        data = cloudpickle.dumps(value, 5)
    except Exception:  # the task will fail when it writes this value anyway
        return lambda: value
    return lambda: pickle.loads(data)


class UndoState(State):
    """State of one key that can be undone."""

    __slots__ = ("_noted", "_undo")

    def __init__(self, keeper: Keeper, key: bytes, value: Any, level: int, undo: Undo) -> None:
        super().__init__(keeper, key, value, level)
        self._undo = undo
        self._noted = -1

    def get(self, default: Any = None) -> Any:
        """The value, or the default if the key has none."""
        self._note()
        return super().get(default)

    def set(self, value: Any) -> None:
        """Set the value."""
        self._note()
        super().set(value)

    def delete(self) -> None:
        """Delete the value."""
        self._note()
        super().delete()

    def _note(self) -> None:
        if self._noted == self._undo.turn:
            return
        self._noted = self._undo.turn
        value, changed = restorer_of(self._value), self._changed

        def restore() -> None:
            self._value, self._changed = value(), changed

        self._undo.add(restore)

    def _new_list(self, stored: bytes) -> ListView:
        return UndoList(self._keeper, stored, self._undo)

    def _new_map(self, prefix: bytes, name: str) -> MapView:
        return UndoMap(self._keeper, prefix, name, self._undo)


class UndoList(ListView):
    """A list of one key that can be undone."""

    __slots__ = ("_noted", "_undo")

    def __init__(self, keeper: Keeper, stored: bytes, undo: Undo) -> None:
        super().__init__(keeper, stored)
        self._undo = undo
        self._noted = -1

    def append(self, item: Any, keep: int | None = None) -> None:
        """Add an item; with ``keep``, only the most recent ``keep`` items stay."""
        self._note()
        super().append(item, keep)

    def extend(self, items: Iterable[Any]) -> None:
        """Add items."""
        self._note()
        super().extend(items)

    def trim(self, n: int) -> None:
        """Keep the last ``n`` items."""
        self._note()
        super().trim(n)

    def clear(self) -> None:
        """Delete all items."""
        self._note()
        super().clear()

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        self._note()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self._note()
        return super().__iter__()

    def _note(self) -> None:
        if self._noted == self._undo.turn:
            return
        self._noted = self._undo.turn
        items, changed = restorer_of(self._items), self._changed

        def restore() -> None:
            self._items, self._changed = items(), changed

        self._undo.add(restore)


class UndoMap(MapView):
    """A map of one key that can be undone; only accessed items have a cost."""

    __slots__ = ("_noted", "_undo")

    def __init__(self, keeper: Keeper, prefix: bytes, name: str, undo: Undo) -> None:
        super().__init__(keeper, prefix, name)
        self._undo = undo
        self._noted: dict[MapKey, int] = {}

    def __getitem__(self, item: MapKey) -> Any:
        value = super().__getitem__(item)
        self._note(item)
        return value

    def __setitem__(self, item: MapKey, value: Any) -> None:
        self._note(item)
        super().__setitem__(item, value)

    def _note(self, item: MapKey) -> None:
        if self._noted.get(item) == self._undo.turn:
            return
        self._noted[item] = self._undo.turn
        was_known, written = item in self._known, self._written.get(item)
        value = restorer_of(self._known.get(item))

        def restore() -> None:
            if was_known:
                self._known[item] = value()
            else:
                self._known.pop(item, None)
            if written is None:
                self._written.pop(item, None)
            else:
                self._written[item] = written

        self._undo.add(restore)
