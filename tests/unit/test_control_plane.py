"""The driver's end of the control channel, with real connections."""

from __future__ import annotations

import threading
import time

import pytest

from midstream.control.channel import Client
from midstream.control.messages import Release, WorkerId, WorkerJoined, WorkerReleased
from midstream.runtime.spark import control_plane
from midstream.runtime.spark.control_plane import ControlPlane

LONG = 60.0


def wait_until_gone(plane: ControlPlane) -> None:
    """Until the server knows that the worker with number 1 is not connected any more."""
    peer = plane._coordinator._workers[WorkerId("host", 1)]
    until = time.monotonic() + LONG
    while not plane._server.undelivered:
        assert time.monotonic() < until
        plane._server.send(peer, Release())
        time.sleep(0.01)


def test_the_end_of_a_job_waits_for_workers_that_live_and_for_no_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_plane, "RELEASE_TIMEOUT_S", 10 * LONG)
    plane = ControlPlane("127.0.0.1")
    with Client(plane.address) as ended, Client(plane.address) as living:
        for number, client in enumerate((ended, living), 1):
            client.request(WorkerJoined(WorkerId("host", number)))
        ended.close()  # as Spark ends a worker that idles: it says nothing
        wait_until_gone(plane)
        assert len(plane._coordinator.workers) == 2, "it might come back"
        closing = threading.Thread(target=plane.close)
        closing.start()
        assert living.receive(LONG) == Release()
        assert closing.is_alive(), "it waits for the one that lives"
        living.post(WorkerReleased(WorkerId("host", 2)))
        closing.join(LONG)
        assert not closing.is_alive()
