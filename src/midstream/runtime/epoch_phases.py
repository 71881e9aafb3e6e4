"""Where the time of an epoch went, by the clocks of the driver and of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from midstream.ids import StageIndex
from midstream.metrics import Phase

__all__ = ["EpochMoments", "phases_of"]


@dataclass(frozen=True)
class EpochMoments:
    """Moments of an epoch by the driver's clock, in seconds since 1970."""

    ended_before: float | None
    """When the epoch before it was committed; None for the first one of a start."""
    first_began: float
    """When its first run began."""
    began: float
    """When the run that was committed began."""
    planned: float
    """When that run began to compute."""
    computed: float
    committed: float


def phases_of(times: EpochMoments, spans: Mapping[StageIndex, tuple[float, float]]) -> tuple[Phase, ...]:
    """The phases of an epoch, relative to the beginning of the run that was committed.

    ``spans`` has each stage's first beginning and last end by the clocks of workers. Those may differ from the
    driver's, and any clock may be set back; so stages are clipped to the run, and no phase ends before it begins.

    >>> times = EpochMoments(9.9, 10.0, 10.0, planned=10.01, computed=10.3, committed=10.35)
    >>> [(p.name, round(p.began_ms), round(p.ended_ms)) for p in phases_of(times, {StageIndex(0): (10.05, 10.25)})]
    [('idle', -100, 0), ('plan', 0, 10), ('stage 0', 50, 250), ('sinks', 250, 300), ('commit', 300, 350)]
    """

    def since_begin(moment: float) -> float:
        return 1000 * (moment - times.began)

    computed = max(0.0, since_begin(times.computed))
    stages = []
    for stage, (first, last) in sorted(spans.items()):
        begin = min(max(0.0, since_begin(first)), computed)
        stages.append(Phase(f"stage {stage}", begin, min(max(begin, since_begin(last)), computed)))
    planned = min([max(0.0, since_begin(times.planned)), computed, *(stage.began_ms for stage in stages)])
    first_began = min(0.0, since_begin(times.first_began))
    phases = []
    if times.ended_before is not None:
        phases.append(Phase("idle", min(first_began, since_begin(times.ended_before)), first_began))
    if first_began < 0:
        phases.append(Phase("earlier runs", first_began, 0.0))
    phases += [Phase("plan", 0.0, planned), *stages]
    phases.append(Phase("sinks", max([planned, *(stage.ended_ms for stage in stages)]), computed))
    phases.append(Phase("commit", computed, max(computed, since_begin(times.committed))))
    return tuple(phases)
