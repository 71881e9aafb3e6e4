"""What a worker process of Spark does to its base besides its tasks, in a thread of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from midstream.control.channel import Server
from midstream.control.messages import Accepted, FromTask, Prefetch, Prefetched, ToTask, WorkerJoined
from midstream.ids import BinId, Epoch
from midstream.runtime.spark.worker import Whereabouts, _Worker
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from tests.unit.test_prefetching import STAGE, World

LONG = 60.0  # seconds; only a failing test waits this long


def test_bins_are_loaded_and_freed_while_no_task_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    made = World(tmp_path)
    lineage = made.lineages[4]
    loaded, freed, peers = threading.Event(), threading.Event(), list[bytes]()
    reports: list[Prefetched] = []

    def answer(peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        if isinstance(message, WorkerJoined):
            peers.append(peer)
        if isinstance(message, Prefetched):
            reports.append(message)
            loaded.set()
            return []
        return [(peer, Accepted())]

    drop = StateAccess.drop

    def dropped(state: StateAccess, lineage: Lineage, bins: Collection[BinId]) -> None:
        drop(state, lineage, bins)
        if BinId(5) in bins:
            freed.set()

    monkeypatch.setattr(StateAccess, "drop", dropped)
    with Server(answer) as server:
        at = Whereabouts(server.address, "job", str(tmp_path), str(tmp_path / "state"), str(tmp_path / "own"))
        worker = _Worker(at)
        bins = tuple(map(BinId, (1, 3, 5)))
        server.send(peers[0], Prefetch(STAGE, Epoch(3), {"count": lineage.encode()}, bins, 1 << 30))
        assert loaded.wait(LONG)
        assert (reports[0].bins, reports[0].error) == (bins, None)
        worker.free(lineage, [BinId(3), BinId(5)])
        assert freed.wait(LONG)
        assert worker.state.held(lineage) == {BinId(1)}
    background = worker._background
    assert background is not None
    background.join(LONG)
    assert not background.is_alive(), "it ends with the job"
