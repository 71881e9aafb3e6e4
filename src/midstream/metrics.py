"""A job's metrics: per operator, per epoch, and since its start. Frozen, mergeable, sent as messages.

Counts and times come from the tasks, one :class:`OperatorStats` per operator and task; the coordinator adds them up.
Latency is the age of a row when it leaves an operator: now minus the time at which its event was *due*. It exists if
the source has an event-time column and the operator's rows still carry it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

_STEPS_PER_DOUBLING = 4

HEAVY_KEYS = 32
"""Most keys in a report of heavy keys."""


class Histogram(msgspec.Struct, frozen=True):
    """Counts in logarithmic buckets: four per doubling, so a quantile is at most 19% too high.

    >>> ages = Histogram.of([(1.0, 90), (100.0, 10)])
    >>> ages.count, round(ages.quantile(0.5)), ages.quantile(0.99) >= 100.0
    (100, 1, True)
    """

    buckets: dict[int, int] = {}

    @classmethod
    def of(cls, weighted: Iterable[tuple[float, int]]) -> Histogram:
        """Build from (value, weight) pairs; values below 1/16 count as 1/16."""
        buckets: dict[int, int] = {}
        for value, weight in weighted:
            bucket = math.ceil(_STEPS_PER_DOUBLING * math.log2(max(value, 0.0625)))
            buckets[bucket] = buckets.get(bucket, 0) + weight
        return cls(buckets)

    @property
    def count(self) -> int:
        """Total weight."""
        return sum(self.buckets.values())

    def quantile(self, q: float) -> float:
        """Upper end of the bucket that contains the q-quantile; 0.0 if empty."""
        wanted, seen = q * self.count, 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return float(2.0 ** (bucket / _STEPS_PER_DOUBLING))
        return 0.0

    def at_most(self, limit: float) -> int:
        """The weight of all buckets that end at or below ``limit``."""
        last = math.floor(_STEPS_PER_DOUBLING * math.log2(limit) + 1e-9)
        return sum(weight for bucket, weight in self.buckets.items() if bucket <= last)

    @property
    def total(self) -> float:
        """The sum of all values, each taken as the upper end of its bucket."""
        return sum(weight * float(2.0 ** (bucket / _STEPS_PER_DOUBLING)) for bucket, weight in self.buckets.items())

    def __add__(self, other: Histogram) -> Histogram:
        buckets = dict(self.buckets)
        for bucket, weight in other.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + weight
        return Histogram(buckets)


class HeavyKeys(msgspec.Struct, frozen=True):
    """The keys with the most rows, after Misra and Gries: never more than 32 of them, however many there are.

    If every row is counted, no count is too high, and none is too low by more than ``missed``; a key that is not listed
    has at most ``missed`` rows. Counts of a sample are estimates, so for them this holds only up to chance.

    >>> a = HeavyKeys.of({"'ann'": 70, "'bob'": 2}, rows=72)
    >>> (a + HeavyKeys.of({"'ann'": 30}, rows=30)).heaviest
    ("'ann'", 0.98...)
    """

    rows: int = 0
    """All rows: those that were looked at, and those that they stand for."""
    counts: dict[str, int] = {}
    """By key, as text: about how many rows it had. Heaviest first."""
    missed: int = 0

    @classmethod
    def of(cls, counts: Mapping[str, int], rows: int, missed: int = 0) -> HeavyKeys:
        """The heaviest of these; the rows of the others count as missed."""
        ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
        least = ordered[HEAVY_KEYS][1] if len(ordered) > HEAVY_KEYS else 0
        return cls(rows, {key: count - least for key, count in ordered if count > least}, missed + least)

    @property
    def heaviest(self) -> tuple[str, float] | None:
        """The heaviest key, and its share of the rows; None if there are no rows."""
        for key, count in self.counts.items():
            return key, count / self.rows
        return None

    def __add__(self, other: HeavyKeys) -> HeavyKeys:
        if not (self.rows and other.rows):
            return self if self.rows else other
        counts = dict(self.counts)
        for key, count in other.counts.items():
            counts[key] = counts.get(key, 0) + count
        return HeavyKeys.of(counts, self.rows + other.rows, self.missed + other.missed)


class OperatorStats(msgspec.Struct, frozen=True):
    """Statistics of one operator: of one task, or summed over many.

    >>> a = OperatorStats("FM", rows_in=10, rows_out=9, slices=1, busy_us=500, slowest_slice_us=500)
    >>> (a + a).rows_in, (a + a).slowest_slice_us, (a + a).us_per_row
    (20, 500, 50.0)
    """

    operator: str
    rows_in: int = 0
    rows_out: int = 0
    slices: int = 0
    busy_us: int = 0
    slowest_slice_us: int = 0
    latency_ms: Histogram = Histogram()
    rows_late: int = 0
    """Rows that came too late for the operator's windows; not included in ``rows_out``."""
    rows_ahead: int = 0
    """Source rows whose event time was too far in the future to move the watermark; included in the other counts."""
    errors: int = 0
    """Bad rows, which left by the operator's errors branch; not included in ``rows_out``."""
    note: str = ""
    """The operator's own remark on how it worked, if any; over several tasks or epochs, the last one."""
    heavy_keys: HeavyKeys = HeavyKeys()
    """Of a key_by: the keys with the most rows, from a sample."""

    @property
    def us_per_row(self) -> float:
        """Mean time per input row spent in the operator's own code."""
        return self.busy_us / self.rows_in if self.rows_in else 0.0

    def __add__(self, other: OperatorStats) -> OperatorStats:
        return OperatorStats(
            operator=self.operator,
            rows_in=self.rows_in + other.rows_in,
            rows_out=self.rows_out + other.rows_out,
            rows_late=self.rows_late + other.rows_late,
            rows_ahead=self.rows_ahead + other.rows_ahead,
            errors=self.errors + other.errors,
            slices=self.slices + other.slices,
            busy_us=self.busy_us + other.busy_us,
            slowest_slice_us=max(self.slowest_slice_us, other.slowest_slice_us),
            latency_ms=self.latency_ms + other.latency_ms,
            note=other.note or self.note,
            heavy_keys=self.heavy_keys + other.heavy_keys,
        )


def merge(groups: Iterable[Iterable[OperatorStats]]) -> tuple[OperatorStats, ...]:
    """Sum of the stats by operator, in order of first occurrence."""
    total: dict[str, OperatorStats] = {}
    for group in groups:
        for stats in group:
            total[stats.operator] = total[stats.operator] + stats if stats.operator in total else stats
    return tuple(total.values())


class Phase(msgspec.Struct, frozen=True):
    """A stretch of an epoch, in milliseconds since the epoch began. Phases of stages overlap where tasks do.

    >>> Phase("plan", 0.0, 12.5).ms
    12.5
    """

    name: str
    began_ms: float
    ended_ms: float

    @property
    def ms(self) -> float:
        """How long it took."""
        return self.ended_ms - self.began_ms


class EpochProgress(msgspec.Struct, frozen=True):
    """One committed epoch: when it ran, how long it took, and the statistics of each operator."""

    epoch: int
    revision: int
    committed_at: float
    duration_ms: float
    operators: tuple[OperatorStats, ...]
    rows_in: int
    rows_out: int
    phases: tuple[Phase, ...] = ()
    """Where the time went: ``idle`` before the epoch, ``earlier runs`` if it was run again, ``plan``, each stage from
    its first task to its last, ``sinks`` and ``commit``. Times are relative to the beginning of the run that counts."""
    state_read: int = 0
    """Bytes of state files that tasks had to read first, because their hosts lacked the rows."""
    offsets: dict[str, str] = {}
    """By source: how far it has been read with this epoch, in its own words; of Kafka the next offset by topic and
    partition, as JSON. Empty on the local runtime."""

    @property
    def rows_per_s(self) -> float:
        """Source rows per second of this epoch's run time."""
        return 1000.0 * self.rows_in / self.duration_ms if self.duration_ms else 0.0

    @property
    def errors(self) -> int:
        """Bad rows over all operators."""
        return sum(stats.errors for stats in self.operators)


class SweepStats(msgspec.Struct, frozen=True):
    """Statistics on removing files from the checkpoint that no restart needs. Failures never fail a job.

    >>> SweepStats(removed=3, failed=2, overdue=1, error="disk is read-only").overdue
    1
    """

    removed: int = 0
    """Files removed since this start."""
    failed: int = 0
    """Number of failed attempts to list or remove files."""
    overdue: int = 0
    """Files that could not be removed yet, and will be tried again."""
    error: str | None = None
    """The reason of the last failure."""


class JobMetrics(msgspec.Struct, frozen=True):
    """A job since it was started: totals, and by operator."""

    epochs: int = 0
    rows_in: int = 0
    rows_out: int = 0
    busy_ms: float = 0.0
    operators: tuple[OperatorStats, ...] = ()
    sweep: SweepStats = SweepStats()

    @property
    def errors(self) -> int:
        """Bad rows over all operators."""
        return sum(stats.errors for stats in self.operators)

    def after(self, progress: EpochProgress) -> JobMetrics:
        """The totals including this epoch."""
        return JobMetrics(
            epochs=self.epochs + 1,
            rows_in=self.rows_in + progress.rows_in,
            rows_out=self.rows_out + progress.rows_out,
            busy_ms=self.busy_ms + progress.duration_ms,
            operators=merge([self.operators, progress.operators]),
            sweep=self.sweep,
        )
