"""Decides what executors load ahead of time, and which workers to ask. Pure; the coordinator keeps it across runs.

An executor that will own bins can have them before it does: its workers are sent :class:`Prefetch` with the committed
state, again in each epoch, so that its base follows. It only saves time: any of these messages may be lost, come twice
or come late, and the worker may die. Whoever takes over a bin makes sure that it has it, as every task does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.control.messages import EpochOpened, Prefetch, PrefetchRequest, Send, WorkerId
from midstream.ids import Epoch, ExecutorId

__all__ = ["SILENT_EPOCHS", "Prefetching"]

SILENT_EPOCHS = 2
"""A worker that no task of so many epochs has run in is taken for ended."""


@dataclass(frozen=True)
class _Listener:
    worker: WorkerId
    peer: bytes
    epoch: Epoch
    """The epoch in which it was heard of last."""


class Prefetching:
    """Asks one worker of each executor, the same one as long as it is heard of: of two that load the same bins, each
    begins anew with what the other has not finished. Spark ends idle workers, so the next one that is heard of replaces
    a silent one.

    >>> from midstream.ids import BinId, Digest, Revision, Run, StageIndex
    >>> prefetching, worker = Prefetching(), WorkerId("host", 7, ExecutorId("1"))
    >>> prefetching.heard_of(worker, b"peer")
    []
    >>> request = PrefetchRequest(worker.executor, StageIndex(1), (BinId(3),), bytes_per_s=1_000_000)
    >>> opened = EpochOpened(Epoch(5), Run(0), Revision(1), (), lineages={StageIndex(1): {"count": b""}})
    >>> prefetching.opened(opened), prefetching.want([request])[0].message.epoch
    ([], 4)
    """

    def __init__(self) -> None:
        self._listening: dict[ExecutorId, _Listener] = {}
        self._requests: tuple[PrefetchRequest, ...] = ()
        self._opened: EpochOpened | None = None

    @property
    def executors(self) -> frozenset[ExecutorId]:
        """Executors with a worker that listens. A lost one stays among them, because nobody reports its loss."""
        return frozenset(self._listening)

    def heard_of(self, worker: WorkerId, peer: bytes) -> list[Send]:
        """A worker that listens at ``peer`` has joined, or has begun a task. Returns the requests that its executor has
        not been sent yet."""
        if not worker.executor:
            return []
        now = Epoch(-1) if self._opened is None else self._opened.epoch
        asked = self._listening.get(worker.executor)
        is_new = asked is None or (asked.worker != worker and now - asked.epoch > SILENT_EPOCHS)
        if asked is None or is_new or asked.worker == worker:
            self._listening[worker.executor] = _Listener(worker, peer, now)
        return self._orders(worker.executor) if is_new else []

    def left(self, worker: WorkerId) -> None:
        """A worker no longer listens."""
        asked = self._listening.get(worker.executor)
        if asked is not None and asked.worker == worker:
            del self._listening[worker.executor]

    def opened(self, opened: EpochOpened) -> list[Send]:
        """A run begins, perhaps with newer state than the one before."""
        self._opened = opened
        return self.want(opened.prefetch)

    def want(self, requests: Sequence[PrefetchRequest]) -> list[Send]:
        """From now on, these requests count, and no others."""
        self._requests = tuple(requests)
        return [send for executor in self._listening for send in self._orders(executor)]

    def _orders(self, executor: ExecutorId) -> list[Send]:
        opened = self._opened
        if opened is None:
            return []
        return [
            Send(
                self._listening[executor].peer,
                Prefetch(
                    request.stage,
                    Epoch(opened.epoch - 1),
                    opened.lineages.get(request.stage, {}),
                    request.bins,
                    request.bytes_per_s,
                ),
            )
            for request in self._requests
            if request.executor == executor
        ]
