"""How long events of a steady load wait until they are committed, by what Spark tells of a query's epochs.

An epoch takes what was due when it began, so an event that is due between the beginnings of two epochs waits until the
second one has ended. Where events are due at even intervals, this needs no look at the rows, and is the same for both
sides.
"""

from __future__ import annotations

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
    """The waits in these seconds of a running query, after its first epoch and those in which it warms up."""
    query.awaitTermination(0.1)  # type: ignore[arg-type]  # parts of a second are taken, too
    for _ in range(round(PATIENCE_S / 0.1)):
        if not query.isActive or moments(query.recentProgress):
            break
        query.awaitTermination(0.1)  # type: ignore[arg-type]
    query.awaitTermination(warm_up_s + seconds)  # type: ignore[arg-type]
    if query.exception() is not None:
        raise RuntimeError(str(query.exception()))
    epochs = moments(query.recentProgress)
    until = epochs[-1][1]
    return waits_ms([epoch for epoch in epochs if epoch[0] >= until - seconds])
