"""A worker process loads bins ahead of time, portion by portion: what it works on, and what it reports.

When it gets its turns, and how fast, is up to the runtime: a thread on Spark, the seeded scheduler of simulations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from midstream.control.messages import Prefetch, Prefetched, WorkerId
from midstream.engine.clock import Clock
from midstream.errors import MidstreamError
from midstream.ids import BinId, Epoch, StageIndex
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage

__all__ = ["Portion", "Prefetcher"]


@dataclass(frozen=True)
class Portion:
    """Something was loaded."""

    bytes: int
    bytes_per_s: int
    """The budget that it counts against."""


class Prefetcher:
    """Works on the newest message of each stage. A later one replaces it at the next portion, because files of older
    state are soon removed; what was loaded stays.

    :meth:`take` and :meth:`task_begins` may be called by any thread, :meth:`step` by one.
    """

    def __init__(self, state: StateAccess, worker: WorkerId, clock: Clock) -> None:
        self._state = state
        self._worker = worker
        self._clock = clock
        self._waiting: dict[StageIndex, Prefetch] = {}
        self._work: Generator[Portion, None, Prefetched] | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held while a portion is loaded."""
        self._committed = Epoch(-1)
        """The newest epoch whose state a task of this process began with, or a message named."""
        self.has_work = threading.Event()

    def take(self, message: Prefetch) -> None:
        """The coordinator asks for bins. Messages about older state than is known to exist are dropped: with them, a
        base that tasks use already would be taken back."""
        with self._lock:
            if message.epoch >= self._committed:
                self._committed = message.epoch
                self._waiting[message.stage] = message
                self.has_work.set()

    def task_begins(self, epoch: Epoch) -> None:
        """A task of this process begins, with the state after the epoch before its own."""
        with self._lock:
            self._committed = max(self._committed, Epoch(epoch - 1))
            self._waiting = {stage: each for stage, each in self._waiting.items() if each.epoch >= self._committed}

    def step(self) -> Portion | Prefetched | None:
        """Load one portion; or return the report, if there is nothing more to load; or None, if nobody wants anything.

        Never raises: what goes wrong is part of the report.
        """
        with self._turn:
            return self._step()

    @contextlib.contextmanager
    def resting(self) -> Iterator[bool]:
        """Whether no portion is being loaded; if so, none is before the end of the block, and bases may be closed."""
        rests = self._turn.acquire(blocking=False)
        try:
            yield rests
        finally:
            if rests:
                self._turn.release()

    def _step(self) -> Portion | Prefetched | None:
        if self._work is None:
            self._work = self._next()
            if self._work is None:
                return None
        try:
            portion = next(self._work)
        except StopIteration as done:
            self._work = None
            report: Prefetched = done.value
            return report
        return portion

    def _next(self) -> Generator[Portion, None, Prefetched] | None:
        with self._lock:
            if not self._waiting:
                self.has_work.clear()
                return None
            message = self._waiting.pop(min(self._waiting))
        return self._load(message)

    def _is_replaced(self, message: Prefetch) -> bool:
        with self._lock:
            return message.stage in self._waiting or message.epoch < self._committed

    def _load(self, message: Prefetch) -> Generator[Portion, None, Prefetched]:
        began, size, error = self._clock.stopwatch_ns(), 0, None
        lineages = [Lineage.decode(data) for data in message.lineages.values()]
        try:
            for lineage in lineages:
                for read in self._state.load_ahead(lineage, message.bins):
                    size += read
                    yield Portion(read, message.bytes_per_s)
                    if self._is_replaced(message):
                        break
        except (MidstreamError, OSError) as found:
            error = f"{type(found).__name__}: {found}"
        return Prefetched(
            self._worker,
            message.stage,
            message.epoch,
            self._loaded(message, lineages),
            size,
            (self._clock.stopwatch_ns() - began) / 1e9,
            error,
        )

    def _loaded(self, message: Prefetch, lineages: list[Lineage]) -> tuple[BinId, ...]:
        """The bins that all operators have."""
        loaded = frozenset(message.bins)
        try:
            for lineage in lineages:
                loaded &= self._state.has(lineage, loaded)
        except (MidstreamError, OSError):
            return ()
        return tuple(sorted(loaded))
