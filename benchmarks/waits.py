"""How long events of a steady load wait until they are committed, by what Spark tells of a query's epochs.

An epoch takes what was due when it began, so an event that is due between the beginnings of two epochs waits until the
second one has ended. Where events are due at even intervals, this needs no look at the rows, and is the same for both
sides.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Moments", "moments", "steady_waits", "waits_ms"]

Moments = tuple[float, float]
"""When an epoch began and ended, in seconds since 1970."""
STEP_S = 0.001
PATIENCE_S = 60.0
POLL_S = 0.1


def moments(progress: Sequence[Mapping[str, Any]]) -> list[Moments]:
    """The epochs of a query that had rows."""
    found = []
    for told in progress:
        if told["numInputRows"]:
            began = datetime.fromisoformat(told["timestamp"]).timestamp()
            found.append((began, began + told["durationMs"]["triggerExecution"] / 1000))
    return found


def waits_ms(epochs: Sequence[Moments]) -> npt.NDArray[np.float64]:
    """The wait of an event of each millisecond, from the beginning of the first of these epochs to that of the last.

    >>> waits_ms([(0.0, 0.1), (0.2, 0.3)])[[0, -1]].round().tolist()
    [300.0, 101.0]
    """
    due = [(np.arange(before, began, STEP_S), ended) for (before, _), (began, ended) in pairwise(epochs)]
    return np.concatenate([1000 * (ended - at) for at, ended in due]) if due else np.empty(0)


def steady_waits(query: StreamingQuery, warm_up_s: float, seconds: float) -> npt.NDArray[np.float64]:
    """The waits in these seconds of a running query, after its first epoch and those in which it warms up.

    It takes longer where there are no two epochs in that time, as on a busy machine.
    """
    _epochs(query, 0.0, 1)
    query.awaitTermination(warm_up_s)  # type: ignore[arg-type]  # parts of a second are taken, too
    since = time.time()
    query.awaitTermination(seconds)  # type: ignore[arg-type]
    return waits_ms(_epochs(query, since, 2))


def _epochs(query: StreamingQuery, since: float, least: int) -> list[Moments]:
    """The epochs that began since then, when there are enough."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = [epoch for epoch in moments(query.recentProgress) if epoch[0] >= since]
        if len(found) >= least:
            return found
        if not query.isActive or time.monotonic() > until:
            raise RuntimeError(f"{len(found)} epochs instead of {least}, and no more: {query.exception()}")
        query.awaitTermination(POLL_S)  # type: ignore[arg-type]
