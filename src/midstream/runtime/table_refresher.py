"""Reads the tables of lookups again while a job runs; one that differs from what the job has becomes a change.

The change is like any other: in the history, on trial, rolled back if it fails. Tables that no revision needs any more
are swept with their blobs. A failure here never fails the job, which continues with the table that it has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from midstream.change.change import Change
from midstream.change.configuration import Configuration
from midstream.checkpoint.change_records import Outcome
from midstream.flow.edits import Edit, Update
from midstream.flow.table_refresh import TableRefresh
from midstream.ids import Digest

__all__ = ["BY", "TableRefresher"]

BY = "refresh"
"""The author of these changes in the history."""

PATIENCE_S = 10.0

_log = logging.getLogger("midstream")


class Refreshable(Protocol):
    """The parts of a job that a refresher needs."""

    def update(self, *edits: Edit, by: str | None = None, note: str | None = None) -> Change:
        """Change the job."""


class TableRefresher:
    """Looks after the lookups of a job, in a thread of its own."""

    def __init__(
        self,
        job: Refreshable,
        newest: Callable[[], Configuration],
        refreshes: Mapping[str, TableRefresh],
        read_at_start: Mapping[str, Digest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._newest = newest
        """What the job runs once all changes that wait have taken effect."""
        self._refreshes = refreshes
        self._clock = clock
        running = newest().blobs
        # A restart goes on with the table of the last refresh, which the one that the script has just read may follow.
        now = clock()
        self._due = {
            name: now + (0.0 if running.get(name) != read_at_start.get(name) else refresh.every_s)
            for name, refresh in refreshes.items()
        }
        self._versions: dict[str, Any] = {}
        self._tried: dict[str, tuple[Digest, Change | None]] = {}
        """By lookup: the last table that was put in a change. One that failed is not tried again."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="midstream-refresh", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. A table that is being read has some time for it; after that its thread is left alone."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stopped.wait(max(0.0, min(self._due.values()) - self._clock())):
            self.look()

    def look(self) -> None:
        """Refresh the tables that are due."""
        for name, refresh in self._refreshes.items():
            if self._due[name] <= self._clock() and not self._stopped.is_set():
                try:
                    self._refresh(name, refresh)
                except Exception as error:
                    _log.warning("the table of lookup %r stays as it is: %s: %s", name, type(error).__name__, error)
                self._due[name] = self._clock() + refresh.every_s

    def _refresh(self, name: str, refresh: TableRefresh) -> None:
        newest = self._newest()
        if name not in newest.graph:
            return  # a change has removed it
        spec = newest.graph[name].spec
        tried, change = self._tried.get(name, (None, None))
        if change is not None and change.outcome is Outcome.PENDING:
            return
        version = None
        if refresh.version is not None:
            version = refresh.version()
            if name in self._versions and self._versions[name] == version:
                return
        edit = Update(name, refresh.read())
        _, table = spec.replaced(edit.function, None, name, f"refresh of lookup {name!r}")
        blob = spec.packed(table, name)
        assert blob is not None, "a table can be stored"
        if blob.digest not in (newest.blobs.get(name), tried):
            self._tried[name] = (blob.digest, None)
            self._tried[name] = (blob.digest, self._job.update(edit, by=BY, note="its table was read again"))
        self._versions[name] = version
