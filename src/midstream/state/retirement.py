"""Decides when a host gives up bins that none of its partitions owns any more, so that they do not fill its disk.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from midstream.ids import BinId, Epoch

__all__ = ["GRACE_EPOCHS", "Retirement"]

GRACE_EPOCHS = 3
"""Epochs for which a host keeps a bin after it was last wanted there, because the bin may soon come back."""


class Retirement:
    """Remembers since when bins have been unwanted. Each worker process of a host has its own; losing it costs disk
    only.

    >>> retirement, held = Retirement(grace=2), lambda: {BinId(1), BinId(2)}
    >>> [retirement.due("count", Epoch(epoch), {BinId(1)}, held) for epoch in (7, 8, 9)]
    [[], [], [2]]
    """

    def __init__(self, grace: int = GRACE_EPOCHS) -> None:
        self._grace = grace
        self._wanted: dict[str, frozenset[BinId]] = {}
        self._since: dict[str, dict[BinId, Epoch]] = {}

    def due(
        self, operator: str, epoch: Epoch, wanted: Collection[BinId], held: Callable[[], Collection[BinId]]
    ) -> list[BinId]:
        """The bins that can be dropped now, ascending.

        ``wanted`` are the bins that partitions on this host own in this epoch, or will own. ``held`` looks up what the
        base has, which is done only when that may have changed.
        """
        since = self._since.setdefault(operator, {})
        wanted = frozenset(wanted)
        if wanted != self._wanted.get(operator):
            self._wanted[operator] = wanted
            found = set(held()) - wanted
            self._since[operator] = since = {number: since.get(number, epoch) for number in found}
        due = sorted(number for number, first in since.items() if epoch - first >= self._grace)
        for number in due:
            del since[number]
        return due
