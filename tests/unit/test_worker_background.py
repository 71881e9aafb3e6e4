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
from midstream.runtime.prefetcher import Portion, Prefetcher
from midstream.runtime.spark.worker import Whereabouts, _Worker
from midstream.state.access import StateAccess
from midstream.state.lineage import Lineage
from tests.unit.test_prefetching import STAGE, World

LONG = 60.0  # seconds; only a failing test waits this long


class Driver:
    """Hears what the worker says."""

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.peers: list[bytes] = []
        self.reports: list[Prefetched] = []

    def answer(self, peer: bytes, message: FromTask) -> list[tuple[bytes, ToTask]]:
        if isinstance(message, WorkerJoined):
            self.peers.append(peer)
        if isinstance(message, Prefetched):
            self.reports.append(message)
            self.loaded.set()
            return []
        return [(peer, Accepted())]


def whereabouts(server: Server, folder: Path) -> Whereabouts:
    return Whereabouts(server.address, "job", str(folder), str(folder / "state"), str(folder / "own"))


def test_bins_are_loaded_and_freed_while_no_task_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    made = World(tmp_path)
    lineage = made.lineages[4]
    driver, freed = Driver(), threading.Event()
    drop = StateAccess.drop

    def dropped(state: StateAccess, lineage: Lineage, bins: Collection[BinId]) -> None:
        drop(state, lineage, bins)
        if BinId(5) in bins:
            freed.set()

    monkeypatch.setattr(StateAccess, "drop", dropped)
    with Server(driver.answer) as server:
        worker = _Worker(whereabouts(server, tmp_path))
        bins = tuple(map(BinId, (1, 3, 5)))
        server.send(driver.peers[0], Prefetch(STAGE, Epoch(3), {"count": lineage.encode()}, bins, 1 << 30))
        assert driver.loaded.wait(LONG)
        assert (driver.reports[0].bins, driver.reports[0].error) == (bins, None)
        worker.free(lineage, [BinId(3), BinId(5)])
        assert freed.wait(LONG)
        assert worker.state.held(lineage) == {BinId(1)}
    background = worker._background
    assert background is not None
    background.join(LONG)
    assert not background.is_alive(), "it ends with the job"


def test_nothing_is_loaded_beside_a_task_of_the_same_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr("midstream.runtime.spark.worker.GAP_S", LONG)
    lineage, driver, taken = World(tmp_path).lineages[4], Driver(), threading.Event()
    beside_a_task: list[bool] = []
    step, wait = Prefetcher.step, threading.Event.wait

    def stepped(prefetcher: Prefetcher) -> Portion | Prefetched | None:
        beside_a_task.append(not worker._has_no_task.is_set())
        taken.set()
        return step(prefetcher)

    def waited(event: threading.Event, timeout: float | None = None) -> bool:
        if event is worker._has_no_task:
            taken.set()
        return wait(event, timeout)

    with Server(driver.answer) as server:
        worker = _Worker(whereabouts(server, tmp_path))
        worker._has_no_task.clear()
        monkeypatch.setattr(Prefetcher, "step", stepped)
        monkeypatch.setattr(threading.Event, "wait", waited)
        server.send(driver.peers[0], Prefetch(STAGE, Epoch(3), {"count": lineage.encode()}, (BinId(1),), 1 << 30))
        assert taken.wait(LONG)
        worker._has_no_task.set()
        assert driver.loaded.wait(LONG)
    assert beside_a_task
    assert not any(beside_a_task)
