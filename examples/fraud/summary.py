"""The results of a run of the demo: how fast, how late, and how many of the frauds were caught."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq

from midstream import GeneratorSource
from midstream.metrics import Histogram, OperatorStats

if TYPE_CHECKING:
    from midstream import Job

    from .changes import Show


@dataclass(frozen=True)
class Summary:
    """The demo in numbers. Latency is a payment's age, from when it was *due*, once its verdict is known."""

    payments: int
    due: int
    epochs: int
    seconds: float
    busy_seconds: float
    latency_ms: Histogram
    operators: tuple[OperatorStats, ...]
    alerts: int
    caught: int
    frauds: int
    folder: Path
    changes: tuple[tuple[str, str], ...]
    mixtures: int

    @classmethod
    def of(cls, job: Job, source: GeneratorSource, folder: Path, seconds: float, show: Show, mixtures: int) -> Summary:
        """Compare the alerts in ``folder`` with the truth, which is made again: the same seed, the same payments."""
        metrics, last = job.metrics, job.progress[-1].epoch
        # The epoch that was running at the end was given up; it may have left a part of its alerts behind.
        alerts = pq.read_table(folder, columns=["fraud", "fm"], filters=[("epoch", "<=", last)])
        new = pc.sum(pc.equal(alerts["fm"], 2), min_count=0).as_py()
        truth = source.rows(0, metrics.rows_in, start_us=0)
        verdict = next(stats for stats in metrics.operators if stats.operator == "verdict")
        return cls(
            payments=metrics.rows_in,
            due=source.total or 0,
            epochs=metrics.epochs,
            seconds=seconds,
            busy_seconds=metrics.busy_ms / 1000,
            latency_ms=verdict.latency_ms,
            operators=metrics.operators,
            alerts=len(alerts),
            caught=pc.sum(alerts["fraud"], min_count=0).as_py(),
            frauds=sum(batch["fraud"].true_count for batch in truth),
            folder=folder,
            changes=tuple(show.lines(len(alerts) - new, new, mixtures)),
            mixtures=mixtures,
        )

    @property
    def precision(self) -> float:
        """Share of the alerts that were frauds; 1 if there were none."""
        return self.caught / self.alerts if self.alerts else 1.0

    @property
    def recall(self) -> float:
        """Share of the frauds that were caught; 1 if there were none."""
        return self.caught / self.frauds if self.frauds else 1.0

    def __str__(self) -> str:
        return "\n".join(f"{label:<12}{text}" for label, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        speed, capacity = self.payments / self.seconds, self.payments / self.busy_seconds
        p50, p99 = self.latency_ms.quantile(0.5), self.latency_ms.quantile(0.99)
        costs = (f"{stats.operator} {stats.us_per_row:.2f}" for stats in self.operators if stats.us_per_row >= 0.01)
        yield "payments", f"{self.payments:,} of {self.due:,}, in {self.epochs:,} epochs and {self.seconds:.0f} s"
        yield "throughput", f"{speed:,.0f} payments/s over all, {capacity:,.0f} while epochs ran"
        yield "latency", f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms from when a payment was due to its verdict"
        yield "µs per row", ", ".join(costs)
        yield "alerts", f"{self.alerts:,}, of which {self.caught:,} are frauds (precision {self.precision:.0%})"
        yield "frauds", f"{self.frauds:,}, of which {self.caught:,} were caught (recall {self.recall:.0%})"
        yield from self.changes
        yield "written to", str(self.folder)
        yield "read it", f"pyarrow.parquet.read_table({str(self.folder)!r}).to_pandas()"
