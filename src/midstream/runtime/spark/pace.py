"""The pace of epochs, and how many rows they take from generators: what can be altered while a query runs.

Spark plans an epoch as soon as its query's trigger allows, and only then calls us. So the heartbeat waits *behind* an
epoch, when that is committed and before Spark learns it: what arrives meanwhile belongs to the next epoch. A crash in
that wait costs nothing, as the epoch has its manifest.

A generator's reader lives in a process of its own beside Spark's driver. It is told its limit by a small file, which it
reads whenever an epoch is planned.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable

from midstream.errors import FlowError
from midstream.flow.knobs import in_words

__all__ = ["Pacer", "RowLimit", "read_row_limit", "require_pace"]

LOOK_S = 1.0
"""The longest wait between checks that the query still runs."""


class Pacer:
    """Waits between epochs. One thread waits, others may :meth:`hurry` it or end the waiting."""

    def __init__(self, pace_us: Callable[[], int], is_running: Callable[[], bool]) -> None:
        self._pace_us = pace_us
        self._is_running = is_running
        self._is_over = False
        self._told = threading.Condition()

    def wait(self, began: float) -> None:
        """Wait until an epoch may follow one that began at ``began``, on the monotonic clock."""
        with self._told:
            while not self._is_over:
                left = began + self._pace_us() / 1e6 - time.monotonic()
                if left <= 0:
                    return
                if not self._told.wait(min(left, LOOK_S)) and not self._is_running():
                    return

    def hurry(self) -> None:
        """Wake a waiting thread, because the pace may have changed."""
        with self._told:
            self._told.notify_all()

    def end(self) -> None:
        """End the waiting for good."""
        with self._told:
            self._is_over = True
            self._told.notify_all()


class RowLimit:
    """The limit of rows per epoch, as a file for readers on this machine. Made for one start of a job.

    The file exists once there has been a limit.
    """

    def __init__(self) -> None:
        self.path = os.path.join(tempfile.gettempdir(), f"midstream-rows-{uuid.uuid4().hex}")
        self._last: int | None = None

    def set(self, rows: int | None) -> None:
        """The limit of epochs that are planned from now on; None leaves it to each source."""
        if rows != self._last:
            self._last = rows
            with open(self.path + ".new", "w") as file:
                file.write("" if rows is None else str(rows))
            os.replace(self.path + ".new", self.path)

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            os.remove(self.path)


def require_pace(pace_us: int | None, trigger_us: int | None) -> None:
    """Refuse a pace below Spark's own trigger."""
    if trigger_us is not None and pace_us is not None and pace_us < trigger_us:
        raise FlowError(
            f"knob pace={in_words('pace', pace_us)} is less than the trigger of {in_words('pace', trigger_us)}, which "
            f"Spark fixes when a query starts; give at least that, or start the job without trigger= and with "
            f"knobs={{'pace': …}} instead"
        )


def read_row_limit(path: str | None) -> int | None:
    """The limit in a file; None if there is none."""
    if path is not None:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return int(file.read())
    return None
