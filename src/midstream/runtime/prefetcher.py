"""What a worker process does to its base besides its tasks: it loads bins ahead of time, portion by portion, and frees
those that nobody on its executor needs any more.

When it gets its turns, and how fast, is up to the runtime: a thread on Spark, the seeded scheduler of simulations.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass

from midstream.control.messages import Prefetch, Prefetched, WorkerId
from midstream.engine.clock import Clock
from midstream.errors import MidstreamError
from midstream.ids import BinId, Epoch, StageIndex
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage

__all__ = ["Portion", "Prefetcher"]


_log = logging.getLogger("midstream")


@dataclass(frozen=True)
class Portion:
    """Something was loaded, or a bin was freed."""

    bytes: int
    bytes_per_s: int
    """The budget that it counts against."""


_FREED = Portion(bytes=0, bytes_per_s=1)


class Prefetcher:
    """Works on the newest message of each stage. A later one replaces it at the next portion, because files of older
    state are soon removed; what was loaded stays. Bins are freed when nothing is to be loaded.

    :meth:`take`, :meth:`free`, :meth:`keep` and :meth:`task_begins` may be called by any thread, :meth:`step` by one.
    """

    def __init__(self, state: StateAccess, worker: WorkerId, clock: Clock) -> None:
        self._state = state
        self._worker = worker
        self._clock = clock
        self._waiting: dict[StageIndex, Prefetch] = {}
        self._unneeded: deque[tuple[Lineage, BinId]] = deque()
        self._work: Generator[Portion, None, Prefetched | None] | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held while a portion is loaded."""
        self._committed = Epoch(-1)
        """The newest epoch whose state a task of this process began with, or a message named."""
        self.has_work = threading.Event()

    def take(self, message: Prefetch) -> None:
        """The coordinator asks for bins. Messages about state older than the newest known are dropped: they would take
        back a base that tasks already use."""
        with self._lock:
            if message.epoch >= self._committed:
                self._committed = message.epoch
                self._waiting[message.stage] = message
                self.has_work.set()

    def free(self, lineage: Lineage, bins: Iterable[BinId]) -> None:
        """No partition of the executor has owned these bins of an operator for some time."""
        with self._lock:
            self._unneeded.extend((lineage, number) for number in bins)
            self.has_work.set()

    def keep(self, operator: str, bins: Collection[BinId]) -> None:
        """Partitions of the executor own these bins of an operator, or will: those that are not freed yet stay."""
        with self._lock:
            self._unneeded = deque(
                (lineage, number)
                for lineage, number in self._unneeded
                if lineage.operator != operator or number not in bins
            )

    def task_begins(self, epoch: Epoch) -> None:
        """A task of this process begins, with the state after the epoch before its own."""
        with self._lock:
            self._committed = max(self._committed, Epoch(epoch - 1))
            self._waiting = {stage: each for stage, each in self._waiting.items() if each.epoch >= self._committed}

    def step(self) -> Portion | Prefetched | None:
        """Load one portion or free one bin. Return the report if there is nothing more to load, None if nothing was
        requested.

        Never raises: errors are part of the report.
        """
        with self._turn:
            return self._step()

    @contextlib.contextmanager
    def resting(self) -> Iterator[bool]:
        """Whether no portion is being loaded. If so, none will be until the end of the block, and bases may be
        closed."""
        rests = self._turn.acquire(blocking=False)
        try:
            yield rests
        finally:
            if rests:
                self._turn.release()

    def _step(self) -> Portion | Prefetched | None:
        while (work := self._work or self._next()) is not None:
            self._work = work
            try:
                return next(work)
            except StopIteration as done:
                self._work = None
                if done.value is not None:
                    report: Prefetched = done.value
                    return report
            except Exception:  # the thread must live: nobody would load or free anything any more
                self._work = None
                _log.warning("what an executor loads ahead, or frees, is left to its tasks", exc_info=True)
                return _FREED
        return None

    def _next(self) -> Generator[Portion, None, Prefetched | None] | None:
        with self._lock:
            if self._waiting:
                return self._load(self._waiting.pop(min(self._waiting)))
            if self._unneeded:
                return self._free()
            self.has_work.clear()
            return None

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
        except Exception as found:  # nothing depends on it but time
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

    def _free(self) -> Generator[Portion, None, None]:
        while True:
            with self._lock:
                if self._waiting or not self._unneeded:
                    return
                lineage, number = self._unneeded.popleft()
                is_last = not self._unneeded or self._unneeded[0][0].operator != lineage.operator
            try:
                self._state.drop(lineage, (number,))
                if is_last:  # of several bins: what is left moves to a smaller file only once
                    self._state.compact(lineage)
            except Exception as error:  # it costs disk, and nothing else
                _log.warning("bin %s of %r, which no partition here owns, stays: %s", number, lineage.operator, error)
            yield _FREED

    def _loaded(self, message: Prefetch, lineages: list[Lineage]) -> tuple[BinId, ...]:
        """The bins that all operators have."""
        loaded = frozenset(message.bins)
        try:
            for lineage in lineages:
                loaded &= self._state.has(lineage, loaded)
        except (MidstreamError, OSError):
            return ()
        return tuple(sorted(loaded))
