"""Makes an observation of each committed epoch, on both runtimes. Pure but for the driver's own memory."""

from __future__ import annotations

from midstream.checkpoint.committed_state import CommittedState
from midstream.control.messages import Commit
from midstream.flow.model import Graph
from midstream.metrics import EpochProgress, JobMetrics, OperatorStats
from midstream.observation import Observation, OperatorObservation, SourceObservation
from midstream.state.access import resident_bytes
from midstream.state.lineage import Lineage

__all__ = ["Observer"]


class Observer:
    """Follows a job from one start to its end."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._totals = JobMetrics()

    def after(
        self, graph: Graph, commit: Commit, progress: EpochProgress, committed: CommittedState, clock_us: int
    ) -> Observation:
        """The observation of an epoch that was just committed. ``clock_us`` is the epoch's clock."""
        self._totals = self._totals.after(progress)
        idle_ms = sum(phase.ms for phase in progress.phases if phase.name in ("idle", "earlier runs"))
        elapsed_ms = progress.duration_ms + idle_ms
        latest = committed.watermarks.latest
        rows = {stats.operator: stats.rows_in for stats in progress.operators}
        return Observation(
            flow=graph.name,
            job=self._job,
            epoch=progress.epoch,
            revision=progress.revision,
            observed_at=progress.committed_at,
            duration_ms=progress.duration_ms,
            elapsed_ms=elapsed_ms,
            rows_in=progress.rows_in,
            rows_out=progress.rows_out,
            tasks=commit.tasks,
            worker_memory_bytes=commit.worker_memory,
            driver_memory_bytes=resident_bytes(),
            operators=tuple(
                _operator(stats, graph[stats.operator].kind, elapsed_ms, committed.lineages.get(stats.operator))
                for stats in progress.operators
            ),
            sources=tuple(
                SourceObservation(
                    source=name,
                    rows=rows.get(name, 0),
                    offset=progress.offsets.get(name, ""),
                    behind_ms=max(0.0, (clock_us - latest[name]) / 1000) if name in latest else None,
                )
                for name in graph.sources
            ),
            totals=self._totals,
        )


def _operator(stats: OperatorStats, kind: str, elapsed_ms: float, lineage: Lineage | None) -> OperatorObservation:
    ages = stats.latency_ms
    p50, p95, p99 = (ages.quantile(q) if ages.buckets else None for q in (0.5, 0.95, 0.99))
    busy_ms = stats.busy_us / 1000
    return OperatorObservation(
        operator=stats.operator,
        kind=kind,
        rows_in=stats.rows_in,
        rows_out=stats.rows_out,
        rows_late=stats.rows_late,
        rows_ahead=stats.rows_ahead,
        errors=stats.errors,
        busy_ms=busy_ms,
        busy_share=busy_ms / elapsed_ms if elapsed_ms else 0.0,
        slowest_slice_ms=stats.slowest_slice_us / 1000,
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        latency_p99_ms=p99,
        state_bytes=0 if lineage is None else sum(entry.file.size for entry in lineage.entries),
        state_files=0 if lineage is None else len(lineage.entries),
        keys_at_most=0 if lineage is None else sum(lineage.keys) + sum(lineage.rows),
        heavy_keys=stats.heavy_keys,
        note=stats.note,
    )
