"""What a run of the demo came to: how fast, how late, and how many of the frauds were caught."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from midstream import GeneratorSource
from midstream.metrics import Histogram, JobMetrics, OperatorStats


@dataclass(frozen=True)
class Summary:
    """The demo in numbers. Latency is a payment's age, from when it was *due*, once its verdict is known."""

    payments: int
    epochs: int
    seconds: float
    busy_seconds: float
    latency_ms: Histogram
    operators: tuple[OperatorStats, ...]
    alerts: int
    caught: int
    frauds: int
    folder: Path

    @classmethod
    def of(cls, metrics: JobMetrics, source: GeneratorSource, folder: Path, seconds: float) -> Summary:
        """Compare the alerts in ``folder`` with the truth, which is made again: the same seed, the same payments."""
        verdict = next(stats for stats in metrics.operators if stats.operator == "verdict")
        alerts = pq.read_table(folder, columns=["fraud"])["fraud"]
        payments = source.rows(0, metrics.rows_in, start_us=0)
        return cls(
            payments=metrics.rows_in,
            epochs=metrics.epochs,
            seconds=seconds,
            busy_seconds=metrics.busy_ms / 1000,
            latency_ms=verdict.latency_ms,
            operators=metrics.operators,
            alerts=len(alerts),
            caught=pc.sum(alerts, min_count=0).as_py(),
            frauds=sum(batch["fraud"].true_count for batch in payments),
            folder=folder,
        )

    @property
    def precision(self) -> float:
        """Share of the alerts that were frauds; 1 if there were none."""
        return self.caught / self.alerts if self.alerts else 1.0

    @property
    def recall(self) -> float:
        """Share of the frauds that were caught; 1 if there were none."""
        return self.caught / self.frauds if self.frauds else 1.0

    def print(self, console: Console) -> None:
        """Tell it."""
        speed, capacity = self.payments / self.seconds, self.payments / self.busy_seconds
        p50, p99 = self.latency_ms.quantile(0.5), self.latency_ms.quantile(0.99)
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="dim")
        lines.add_column()
        lines.add_row("payments", f"{self.payments:,} in {self.epochs} epochs and {self.seconds:.0f} s")
        lines.add_row("throughput", f"{speed:,.0f} payments/s; while epochs ran, {capacity:,.0f}")
        lines.add_row("latency", f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms, from when a payment was due to its verdict")
        costs = (f"{stats.operator} {stats.us_per_row:.2f}" for stats in self.operators if stats.us_per_row >= 0.005)
        lines.add_row("µs per row", ", ".join(costs))
        lines.add_row("alerts", f"{self.alerts:,}, of which {self.caught:,} are frauds: precision {self.precision:.0%}")
        lines.add_row("frauds", f"{self.frauds:,}, of which {self.caught:,} were caught: recall {self.recall:.0%}")
        lines.add_row("written to", str(self.folder))
        lines.add_row("read them", f"pyarrow.parquet.read_table({str(self.folder)!r}).to_pandas()")
        console.print(lines, soft_wrap=True, highlight=False, markup=False)
