"""Committed state and watermarks after an epoch. Pure; shared by both runtimes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from midstream.checkpoint.manifest import Manifest
from midstream.control.messages import Commit
from midstream.data.times import Watermarks
from midstream.engine.control_order import ControlReport
from midstream.flow.model import Graph
from midstream.ids import BINS, Digest, Epoch, StageIndex
from midstream.planner.stages import Plan
from midstream.state.files import FileRef
from midstream.state.lineage import Lineage
from midstream.storage.table_files import SinkFile


@dataclass(frozen=True)
class CommittedState:
    """The state after ``epoch``: the files of each operator, and the progress of the sources.

    Operators that the flow no longer has keep their lineage, so that they find their state if they are added again.
    """

    epoch: Epoch
    lineages: Mapping[str, Lineage]
    watermarks: Watermarks
    bins: int = BINS
    """Number of bins of the job's key spaces."""

    @classmethod
    def of(cls, graph: Graph, manifest: Manifest | None, bins: int = BINS) -> CommittedState:
        """The state after the epoch of a manifest; None means a job that has committed nothing."""
        timed = {name: spec for name, spec in graph.sources.items() if spec.event_time is not None}
        delays = {name: spec.delay_us for name, spec in timed.items()}
        idle = {name: spec.idle_us for name, spec in timed.items() if spec.idle_us is not None}
        if manifest is None:
            return cls(Epoch(-1), {}, Watermarks(delays, idle), bins)
        latest = {source: time for source, time in manifest.event_times.items() if source in timed}
        heard = {source: clock for source, clock in manifest.heard.items() if source in timed}
        watermark = manifest.watermark if timed else None
        if watermark is None and latest and timed.keys() <= latest.keys():  # an older manifest without watermark
            watermark = min(latest[source] - delay for source, delay in delays.items())
        lineages = {operator: Lineage.decode(data) for operator, data in manifest.lineages.items()}
        return cls(manifest.epoch, lineages, Watermarks(delays, idle, latest, heard, watermark), bins)

    def by_stage(self, plan: Plan) -> dict[StageIndex, dict[str, bytes]]:
        """The encoded lineages of each stage's operators, for its tasks."""
        return {
            stage.index: {
                name: self._lineage(name).encode() for name in stage.operators if plan.graph[name].spec.is_stateful
            }
            for stage in plan.stages
        }

    def lacks(self, operators: Iterable[str]) -> list[str]:
        """Those of these operators that have no state, not even an empty one."""
        return [name for name in operators if name not in self.lineages]

    def beginning_with(self, files: Mapping[str, FileRef]) -> CommittedState:
        """The same, with a file of initial state for operators that have none yet."""
        found = {}
        for name, file in files.items():
            lineage = Lineage.start(name, self.bins)
            if file.rows:
                lineage = replace(lineage.after(Epoch(0), [file]), epoch=lineage.epoch)
            found[name] = lineage
        return replace(self, lineages={**self.lineages, **found})

    def _lineage(self, operator: str) -> Lineage:
        return self.lineages.get(operator) or Lineage.start(operator, self.bins)

    def after(self, commit: Commit) -> CommittedState:
        """The state after one more epoch."""
        lineages = dict(self.lineages)
        for operator, changes in commit.states.items():
            lineages[operator] = self._lineage(operator).after(
                commit.epoch,
                [change.delta for change in changes if change.delta is not None],
                list(chain.from_iterable(change.rewrites for change in changes)),
            )
        return CommittedState(commit.epoch, lineages, commit.watermarks, self.bins)

    def manifest(
        self,
        commit: Commit,
        programs: tuple[Digest, ...],
        configuration: Digest,
        assignments: Digest,
        *,
        committed_at: float,
        offsets: str,
        files: Mapping[str, tuple[SinkFile, ...]],
        closing: bool = False,
        controls: Mapping[int, tuple[ControlReport, ...]] | None = None,
    ) -> Manifest:
        """The manifest of the epoch that led here."""
        return Manifest(
            epoch=commit.epoch,
            revision=commit.revision,
            programs=programs,
            configuration=configuration,
            committed_at=committed_at,
            rows={stats.operator: (stats.rows_in, stats.rows_out) for stats in commit.operators},
            lineages={operator: lineage.encode() for operator, lineage in self.lineages.items()},
            event_times=self.watermarks.latest,
            offsets=offsets,
            heard=self.watermarks.heard,
            watermark=self.watermarks.watermark,
            files=dict(files),
            closing=closing,
            controls=dict(controls or {}),
            assignments=assignments,
        )

    def files(self) -> Iterator[str]:
        """The names of all state files that a restart from here needs."""
        for lineage in self.lineages.values():
            for entry in lineage.entries:
                yield entry.file.name
