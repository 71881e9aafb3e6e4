"""The state of all keys of one operator in one task, for handlers at the end of an epoch, which look at all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from midstream.state.handle import State
from midstream.state.keys import Namespace, split_item
from midstream.state.task import TaskState

__all__ = ["KeyedStates"]

_ONCE = 1000
"""Keys whose handles are loaded together."""


class KeyedStates:
    """The state of a process in one task, by key. Keys are as functions get them: a value, or a tuple of several.

    It has what the epoch's rows have left, and changes are committed with that epoch.
    """

    def __init__(
        self,
        task: TaskState,
        handles: Callable[[Sequence[bytes]], list[State]],
        shown: Callable[[bytes], Any],
        stored: Callable[[Any], bytes],
        write: Callable[[], None],
    ) -> None:
        self._task = task
        self._handles = handles
        self._shown = shown
        self._stored = stored
        self._write = write

    def keys(self) -> Iterator[Any]:
        """The keys of this task that have state, by bin."""
        return (self._shown(key) for key in self._all())

    def items(self) -> Iterator[tuple[Any, State]]:
        """The keys of this task that have state, and the state of each."""
        known = self._all()
        for start in range(0, len(known), _ONCE):
            some = known[start : start + _ONCE]
            for key, state in zip(some, self._handles(some), strict=True):
                yield self._shown(key), state

    def of(self, key: Any) -> State | None:
        """The state of one key, which may have none yet; None if another task owns the key."""
        stored = self._stored(key)
        if self._task.space.bin_of(stored) not in self._task.bins:
            return None
        [state] = self._handles([stored])
        return state

    def write(self) -> None:
        """Pass changes to the task's state. Called by the engine when handlers are done."""
        self._write()

    def _all(self) -> list[bytes]:
        """The stored keys of all values, lists and maps, ascending."""
        space = self._task.space
        found: set[bytes] = set()
        for number in sorted(self._task.bins):
            found.update(key for key, _ in self._task.scan(number, Namespace.VALUE))
            for namespace in (Namespace.LIST, Namespace.MAP):
                found.update(split_item(key, space)[0] for key, _ in self._task.scan(number, namespace))
        return sorted(found)
