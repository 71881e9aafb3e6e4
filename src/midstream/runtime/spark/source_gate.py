"""A gate in the middle of a query's start: behind the making of its sources, and before Spark reads its log.

A source of midstream's own is made in a process beside Spark's driver, which takes most of the time that a query needs
to start. The reader of one of them comes to the gate there, and waits until the job's driver opens it, or is dead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import uuid

__all__ = ["SourceGate", "pass_gate"]


class SourceGate:
    """The driver's side. Opened, it stays open, also for readers that come later."""

    def __init__(self) -> None:
        self.path = os.path.join(tempfile.gettempdir(), f"midstream-gate-{uuid.uuid4().hex}")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.path)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._waiting: list[socket.socket] = []

    def has_arrived(self, patience_s: float) -> bool:
        """Whether a reader has come to the gate, or comes within this time."""
        if not self._waiting:
            self._listener.settimeout(patience_s)
            with contextlib.suppress(TimeoutError):
                self._waiting.append(self._listener.accept()[0])
        return bool(self._waiting)

    def open(self) -> None:
        """Let everybody pass. Harmless when repeated."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)
        self._listener.close()
        while self._waiting:
            self._waiting.pop().close()


def pass_gate(path: str) -> None:
    """The reader's side: return as soon as the gate is open, or nobody is there any more who could open it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as passage:
        passage.connect(path)
        passage.recv(1)
