"""The observations of a running job after an epoch: the one source of ``job.watch()``, ``midstream top``, the metrics
endpoint, and the policies that decide from them.

An :class:`Observation` is a frozen value without references to the job: it can be kept, compared, sent as JSON, and
made up in a test. Whoever decides something reads this and nothing else.

Times are in milliseconds and sizes in bytes, as the names of the fields say. Shares are fractions of one core: an
operator that kept two cores busy all the time has a busy share of 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from midstream.metrics import HeavyKeys, JobMetrics

__all__ = ["Observation", "OperatorObservation", "SourceObservation", "with_backlog"]


class OperatorObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One operator in one epoch, over all of its tasks.

    >>> OperatorObservation(operator="FM", kind="map", rows_in=10, rows_out=9, busy_ms=5.0).us_per_row
    500.0
    """

    operator: str
    """Its name in the flow."""
    kind: str
    """``map``, ``aggregate`` and so on."""
    rows_in: int = 0
    """Rows that it took, including all rows that were added up before the exchange."""
    rows_out: int = 0
    """Rows that it emitted, without late and bad ones."""
    rows_late: int = 0
    """Rows that came too late for its windows, or for their turn among transactions."""
    rows_ahead: int = 0
    """Of a source: rows whose event time was too far ahead to move the watermark."""
    errors: int = 0
    """Bad rows, which left at its errors branch."""
    busy_ms: float = 0.0
    """Time in its own code, summed over its tasks."""
    busy_share: float = 0.0
    """``busy_ms`` by the time from the last commit to this one: how many cores it kept busy."""
    slowest_slice_ms: float = 0.0
    """Its longest single call."""
    latency_p50_ms: float | None = None
    """Age of rows when they left it: half are younger. At most 19% too high. None if rows carry no event time."""
    latency_p95_ms: float | None = None
    """The same for 95 of 100 rows."""
    latency_p99_ms: float | None = None
    """The same for 99 of 100 rows."""
    state_bytes: int = 0
    """Size of the files in the checkpoint that make its state."""
    state_files: int = 0
    """Number of these files."""
    keys_at_most: int = 0
    """Upper bound on the number of stored keys: those of its snapshots, and all rows of deltas since. Exact after a
    snapshot of all bins; until then a key that changes often counts more than once."""
    heavy_keys: HeavyKeys = HeavyKeys()
    """Of a key_by: the keys with the most rows, as far as a sample shows."""
    note: str = ""
    """The operator's own remark on how it worked."""

    @property
    def us_per_row(self) -> float:
        """Mean time per input row, in microseconds."""
        return 1000.0 * self.busy_ms / self.rows_in if self.rows_in else 0.0


class SourceObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One source in one epoch, and how far behind it is."""

    source: str
    """Its name in the flow."""
    rows: int = 0
    """Rows that it emitted in this epoch."""
    behind_ms: float | None = None
    """From its latest event time so far to the clock of this epoch. None without event times."""
    offset: str = ""
    """How far it has been read, in its own words; of Kafka the next offset by topic and partition, as JSON. Empty on
    the local runtime."""
    backlog: dict[str, float] = {}
    """What is left to read according to the source itself, under Spark's names, such as Kafka's
    ``maxOffsetsBehindLatest``. As of the last epoch that Spark has reported, read on request; empty if the source
    reports nothing, as files do, and on the local runtime."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A job after a committed epoch.

    >>> seen = Observation(flow="fraud", job="a1", epoch=7, revision=1, observed_at=0.0, rows_in=500, elapsed_ms=250.0)
    >>> seen.rows_per_s
    2000.0
    >>> import msgspec
    >>> msgspec.json.decode(msgspec.json.encode(seen), type=Observation) == seen
    True
    """

    flow: str
    """Name of the flow."""
    job: str
    """The job's number, which survives restarts."""
    epoch: int
    """The epoch that was committed last. Numbers that are missing in a sequence were dropped because the reader was
    slow."""
    revision: int
    """The revision of the configuration under which the next epoch begins."""
    is_on_trial: bool = False
    """Whether a change can still be rolled back."""
    observed_at: float
    """When the epoch was committed, in seconds since 1970."""
    duration_ms: float = 0.0
    """From the beginning of the epoch on the driver to its commit."""
    elapsed_ms: float = 0.0
    """From the last commit to this one: ``duration_ms`` and the wait before it."""
    rows_in: int = 0
    """Rows of all sources."""
    rows_out: int = 0
    """Rows for all sinks; those that a transform hands straight to a sink are not counted."""
    tasks: int = 0
    """How many tasks the epoch had."""
    worker_memory_bytes: int = 0
    """Resident memory of the largest worker process, when its task ended."""
    driver_memory_bytes: int = 0
    """Resident memory of the driver's Python process."""
    operators: tuple[OperatorObservation, ...] = ()
    """All operators that took part, in the order of the flow."""
    sources: tuple[SourceObservation, ...] = ()
    """All sources, in the order of the flow."""
    totals: JobMetrics = JobMetrics()
    """Sums since this start, for those who need counters."""

    @property
    def rows_per_s(self) -> float:
        """Source rows per second, waiting included."""
        return 1000.0 * self.rows_in / self.elapsed_ms if self.elapsed_ms else 0.0

    @property
    def utilisation(self) -> float:
        """The share of the time in which an epoch was running: 1.0 if one follows the other without a wait."""
        return min(1.0, self.duration_ms / self.elapsed_ms) if self.elapsed_ms else 0.0


def with_backlog(seen: Observation, reported: Mapping[str, Mapping[str, str]]) -> Observation:
    """The observation with the backlog that sources report, where they report numbers.

    >>> seen = Observation(
    ...     flow="f", job="j", epoch=0, revision=1, observed_at=0.0, sources=(SourceObservation(source="in"),)
    ... )
    >>> with_backlog(seen, {"in": {"maxOffsetsBehindLatest": "3", "state": "ok"}}).sources[0].backlog
    {'maxOffsetsBehindLatest': 3.0}
    """
    sources = []
    for source in seen.sources:
        backlog = {}
        for name, value in reported.get(source.source, {}).items():
            with contextlib.suppress(ValueError):
                backlog[name] = float(value)
        sources.append(msgspec.structs.replace(source, backlog=backlog))
    return msgspec.structs.replace(seen, sources=tuple(sources))
