"""Two streams of kilobyte events, joined: a stand-in for IPQ1 of Chi, which is private.

Pages are shown to users, and users act on them. Of each stream the events of a user are aggregated in sliding windows;
the two are joined by user and window, and added up for each group of users and ten seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream import Flow, GeneratorSource, agg, sliding, tumbling
from midstream.flow.schedules import Indexes
from midstream.flow.sinks import SinkTarget

__all__ = ["LARGE", "SMALL", "Streams", "Users", "flow", "oracle"]

COLUMNS = "user int, page string"
EVENT_BYTES = 1000
DELAY_S, WINDOW_S, SLIDE_S, TOTAL_S = 1, 4, 2, 10
GROUPS = 8
_PAGES = 64


class Streams(NamedTuple):
    """The two sources."""

    shown: Any
    acted: Any


@dataclass(frozen=True)
class Users:
    """Who looks at pages, and acts on a fifth of them.

    >>> shown, acted = Users().streams(rate=1200)
    >>> [batch] = shown.rows(0, 1, start_us=0)
    >>> len(batch["page"][0].as_py()), shown.rate, acted.rate
    (1000, Constant(rate=1000), Constant(rate=200))
    """

    users: int = 500

    def streams(self, rate: float, *, limit: int | None = None, **options: Any) -> Streams:
        """Both streams, with this number of events in a second, and at most ``limit`` pages that are shown."""
        made = partial(_make, self.users)
        acts = None if limit is None else limit // 5
        return Streams(
            GeneratorSource(made, COLUMNS, round(rate * 5 / 6), seed=1, limit=limit, **options),
            GeneratorSource(made, COLUMNS, round(rate / 6), seed=2, limit=acts, **options),
        )


SMALL, LARGE = Users(20), Users()


def flow(streams: Streams, sink: SinkTarget) -> Flow:
    """For each group of users and ten seconds: windows in which a user both looked and acted, and their events."""
    flow, sides = Flow("impressions"), []
    for name, source in zip(streams._fields, streams, strict=True):
        digest = flow.source(name, source, delay=f"{DELAY_S} seconds").map_batches(
            f"digest {name}", digested, returns="user int, bytes int, event_time timestamp"
        )
        window = sliding(f"{WINDOW_S} seconds", every=f"{SLIDE_S} seconds")
        totals: dict[str, Any] = {name: agg.count(), f"{name}_bytes": agg.sum("bytes")}
        counts = digest.key_by(f"{name} by user", "user").aggregate(f"{name} in window", window=window, **totals)
        names = ("user", f"window_end AS {name}_at", name, f"{name}_bytes")
        sides.append(counts.select(f"{name} counts", *names).key_by(f"{name} of user", "user"))
    shown, acted = sides
    both = shown.join("both", acted, within="0 seconds", left_time="shown_at", right_time="acted_at")
    both = both.map_batches("group", grouped, returns="team int, shown_at timestamp, shown bigint, acted bigint")
    both.key_by("by group", "team").aggregate(
        "total",
        window=tumbling(f"{TOTAL_S} seconds"),
        time="shown_at",
        windows=agg.count(),
        shown=agg.sum("shown"),
        acted=agg.sum("acted"),
    ).sink("totals", sink)
    return flow


def digested(events: pa.RecordBatch) -> pa.RecordBatch:
    """The length of a page instead of the page itself."""
    lengths = pc.binary_length(events["page"])
    return pa.RecordBatch.from_arrays([events["user"], lengths, events["event_time"]], ["user", "bytes", "event_time"])


def grouped(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With the group of the user in the place of the user."""
    groups = pa.array(rows["user"].to_numpy() % GROUPS, pa.int32())
    columns = [groups, *(rows[name] for name in ("shown_at", "shown", "acted"))]
    return pa.RecordBatch.from_arrays(columns, ["team", "shown_at", "shown", "acted"])


def oracle(shown: pa.Table, acted: pa.Table) -> Counter[tuple[int, int, str]]:
    """By group, start of ten seconds and column: the totals of all windows that the last watermark closes."""
    seconds = [table["event_time"].cast(pa.int64()).to_numpy() / 1e6 for table in (shown, acted)]
    watermark = min(float(each.max()) for each in seconds) - DELAY_S
    counts = []
    for table, times in zip((shown, acted), seconds, strict=True):
        found: Counter[tuple[int, int]] = Counter()
        for user, time in zip(table["user"].to_pylist(), times.tolist(), strict=True):
            first = int(time // SLIDE_S) * SLIDE_S + SLIDE_S
            for end in range(first, first + WINDOW_S, SLIDE_S):
                found[user, end] += 1
        counts.append(found)
    totals: Counter[tuple[int, int, str]] = Counter()
    for (user, end), count in counts[0].items():
        start = end // TOTAL_S * TOTAL_S
        if (user, end) in counts[1] and start + TOTAL_S <= watermark:
            for name, number in (("windows", 1), ("shown", count), ("acted", counts[1][user, end])):
                totals[user % GROUPS, start, name] += number
    return totals


@cache
def _pages() -> pa.Array:
    letters = np.random.default_rng(0).integers(97, 123, (_PAGES, EVENT_BYTES), np.uint8)
    return pa.array([row.tobytes().decode() for row in letters])


def _make(users: int, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "user": rng.integers(0, users, len(indexes), np.int32),
        "page": _pages().take(pa.array(rng.integers(0, _PAGES, len(indexes)))),
    }
