"""How long rows wait, counted from when they were due: exact, without a probe among the data.

A generator's rows have numbers, and its schedule says when each one is due. So the first and last number of an epoch
and the moment of its commit give the latency of every row. Figures weigh rows, never epochs: most rows are in the long
epochs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midstream.flow.schedules import Schedule
from midstream.metrics import EpochProgress

__all__ = ["BUCKET_S", "Latencies", "Timeline", "first_due", "started_at"]

BUCKET_S = 0.25
CALM = 1.2
"""Rows are served as before if the p99 of a bucket is at most this multiple of the steady one."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latencies:
    """Rows in the order in which they are due: when each was due, and how long it waited; seconds."""

    due: Floats
    waited: Floats

    def quantile(self, share: float) -> float:
        """The latency that this share of the rows does not exceed."""
        return float(np.quantile(self.waited, share))

    def max(self) -> float:
        """The longest one."""
        return float(self.waited.max())

    def before(self, moment: float) -> Latencies:
        """The rows that were due before a moment."""
        end = int(np.searchsorted(self.due, moment))
        return Latencies(self.due[:end], self.waited[:end])

    def buckets(self) -> list[tuple[float, float]]:
        """The p99 of the rows of each quarter of a second, with the moment at which it begins."""
        numbers = np.floor(self.due / BUCKET_S).astype(np.int64)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
        ends = np.append(starts[1:], len(numbers))[: len(starts)]
        return [
            (float(numbers[i]) * BUCKET_S, float(np.quantile(self.waited[i:j], 0.99)))
            for i, j in zip(starts, ends, strict=True)
        ]

    def calm_since(self, steady_p99: float) -> float | None:
        """The moment after which all buckets are as they were before; None: the last one is not."""
        found = self.buckets()
        late = [position for position, (_, p99) in enumerate(found) if p99 > CALM * steady_p99]
        if not late:
            return found[0][0] if found else None
        return found[late[-1] + 1][0] if late[-1] + 1 < len(found) else None


@dataclass
class Timeline:
    """The committed epochs of a job, over all its starts: the rows of each one, and when it was committed.

    Times of the result are seconds since 1970. ``start_us`` is when the schedule began.
    """

    ends: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By epoch: the number of rows up to its end, and its commit."""
    state_read: list[int] = field(default_factory=list)
    """Bytes of state that each epoch had to read."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """Milliseconds of each phase of each epoch; "between" is what lies between them."""

    @property
    def rows(self) -> int:
        """Rows that are committed."""
        return next(reversed(self.ends.values()))[0] if self.ends else 0

    def add(self, progress: Iterable[EpochProgress]) -> None:
        """Take the epochs that are not known yet. None may be missing."""
        for each in progress:
            if each.epoch not in self.ends:
                if each.epoch != len(self.ends):
                    raise ValueError(f"epoch {each.epoch} follows {len(self.ends) - 1}: too late to know all epochs")
                self.append(each.rows_in, each.committed_at)
                self.state_read.append(each.state_read)
                parts = {phase.name: phase.ended_ms - phase.began_ms for phase in each.phases}
                between = each.duration_ms - sum(ms for name, ms in parts.items() if name != "idle")
                self.phases.append({**parts, "between": max(0.0, between)})

    def append(self, rows: int, committed_at: float) -> None:
        """The next epoch."""
        self.ends[len(self.ends)] = (self.rows + rows, committed_at)

    def gaps(self, first: int) -> Floats:
        """Seconds from commit to commit, up to those of the epochs from ``first`` on."""
        return np.diff([at for _, at in self.ends.values()][max(0, first - 1) :])

    def latencies(self, schedule: Schedule, start_us: int, first: int, end: int | None = None) -> Latencies:
        """The rows of the epochs from ``first`` up to, not including, ``end``."""
        spans = [(self.ends[epoch - 1][0] if epoch else 0, *self.ends[epoch]) for epoch in sorted(self.ends)][first:end]
        due = [schedule.time_of(np.arange(begin, after)) for begin, after, _ in spans]
        if not due:
            return Latencies(np.empty(0), np.empty(0))
        committed = np.repeat([at for _, _, at in spans], [len(each) for each in due])
        times = (np.concatenate(due) + start_us) / 1e6
        return Latencies(times, committed - times)


def first_due(checkpoint: str | Path) -> int:
    """When the schedule of a job's only source began, in microseconds since 1970, by Spark's log of offsets."""
    [start] = started_at(checkpoint)
    return start


def started_at(checkpoint: str | Path) -> list[int]:
    """The same for several sources, the one with the most rows first: Spark's log has them in an order of its own."""
    logs = [path for path in Path(checkpoint).rglob("offsets/*") if path.name.isdigit()]
    newest = max(logs, key=lambda path: int(path.name))  # in the first one a source may have no offset
    offsets = [json.loads(line) for line in newest.read_text().splitlines() if '"start_us"' in line]
    return [each["start_us"] for each in sorted(offsets, key=lambda each: -int(each["index"]))]
