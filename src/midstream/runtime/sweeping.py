"""Removes files of state that no restart can need any more."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from midstream.errors import CheckpointError
from midstream.ids import Epoch
from midstream.runtime.standing import Standing
from midstream.state.files import StateFiles
from midstream.state.lineage import garbage

FULL_SWEEP_EVERY = 100


class Sweeper:
    """Follows a job's standings, epoch by epoch.

    A crash leads back at most one epoch: to the manifest before the newest, whose batch Spark may not have committed.
    So the files of the last two standings stay. What failed attempts left behind is in no standing; it is found by
    looking at all files, at the start and now and then.
    """

    def __init__(self, states: StateFiles) -> None:
        self._states = states
        self._kept: tuple[Standing, ...] = ()
        self._guard = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def keeping(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these files stay, whatever the job stands on by then."""
        held = Counter(set(names))
        with self._guard:
            self._held += held
        try:
            yield
        finally:
            with self._guard:
                self._held -= held

    def after(self, standing: Standing, also: Iterable[str] = ()) -> None:
        """The job stands here now, and uses some files besides. What cannot be removed is left for a full sweep."""
        dropped, self._kept = self._kept[:-1], (*self._kept[-1:], standing)
        with self._guard:
            held = {*self._held, *also}
        with contextlib.suppress(CheckpointError):
            if not dropped or standing.epoch % FULL_SWEEP_EVERY == 0:
                self._sweep_all(held)
            else:
                needed = {name for kept in self._kept for name in kept.files()}
                self._states.remove({name for old in dropped for name in old.files()} - needed - held)

    def _sweep_all(self, held: set[str]) -> None:
        lineages = [lineage for kept in self._kept for lineage in kept.lineages.values()]
        # Until Spark has moved on, the newest epoch may be run again; attempts of it may still be writing.
        settled = Epoch(self._kept[0].epoch)
        self._states.remove(set(garbage(self._states.names(), lineages, settled)) - held)
