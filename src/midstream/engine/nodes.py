"""An operator in a task: its steps and its readers, by revision, and its counters.

The versions of all operators under a revision form the DAG of that revision. Two revisions share versions that are
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import pyarrow as pa

from midstream.engine.intake import IntakeEntry, entries_of
from midstream.engine.key_sampler import LOOKED_AT, KeySampler
from midstream.engine.parts import Parts, instantiate
from midstream.engine.steps import OperatorInTask
from midstream.flow.model import Operator
from midstream.ids import Revision
from midstream.metrics import HeavyKeys, Histogram, OperatorStats
from midstream.planner.programs import StageProgram
from midstream.planner.stages import Wire


@dataclass(frozen=True)
class Version:
    """An operator under a revision: its steps, and the readers in this stage and the wires of each of its branches."""

    work: OperatorInTask
    event_time: str | None
    consumers: Mapping[str, tuple[IntakeEntry, ...]]
    wires: Mapping[str, tuple[Wire, ...]]


@dataclass
class OperatorNode:
    """An operator in a task. It has no version under a revision whose graph lacks the operator."""

    name: str
    versions: dict[Revision, Version]
    late: frozenset[str]
    """Its branches for late rows."""
    aside: frozenset[str]
    """Its branches for bad rows."""
    latest: Revision
    """The revision of the last rows that it took; initially the task's revision."""
    is_updated: bool = False
    keys: KeySampler | None = None
    """For a key_by: samples the keys of its rows."""
    sample: pa.RecordBatch | None = None
    """The first rows that it took."""
    rows_in: int = 0
    rows_out: int = 0
    rows_late: int = 0
    rows_ahead: int = 0
    errors: int = 0
    slices: int = 0
    busy_ns: int = 0
    slowest_ns: int = 0
    ages_ms: list[tuple[float, int]] = field(default_factory=list)

    def note_slice(self, took_ns: int) -> None:
        """Count a processed slice, or a part of the end-of-epoch output."""
        self.slices += 1
        self.busy_ns += took_ns
        self.slowest_ns = max(self.slowest_ns, took_ns)

    def _note(self) -> Callable[[], str] | None:
        version = self.versions.get(self.latest)
        return None if version is None else version.work.note

    def stats(self) -> OperatorStats:
        """The counters, for the report."""
        return OperatorStats(
            operator=self.name,
            rows_in=self.rows_in,
            rows_out=self.rows_out,
            rows_late=self.rows_late,
            rows_ahead=self.rows_ahead,
            errors=self.errors,
            slices=self.slices,
            busy_us=self.busy_ns // 1000,
            slowest_slice_us=self.slowest_ns // 1000,
            latency_ms=Histogram.of(self.ages_ms),
            note="" if (note := self._note()) is None else note(),
            heavy_keys=HeavyKeys() if self.keys is None else self.keys.found(),
        )


def version_of(operator: Operator, parts: Parts, known: OperatorInTask | None = None) -> Version:
    """An operator under the revision of these parts; ``known`` is the operator if it is already loaded."""
    program = parts.program
    # Without inlets: a transform that reads another transform got its rows in Catalyst.
    here = [op for op in program.operators if op.name not in program.stage.inlets]
    starting = [wire for wire in program.wires if wire.origin == program.stage.index]
    return Version(
        instantiate(operator, parts) if known is None else known,
        program.event_times.get(operator.name),
        consumers={port.branch: entries_of(port, here) for port in operator.ports},
        wires={port.branch: tuple(wire for wire in starting if wire.port == port) for port in operator.ports},
    )


def node_of(operator: Operator, revision: Revision, key_sample: int = LOOKED_AT) -> OperatorNode:
    """The node of an operator, still without versions, in a task that begins under ``revision``.

    ``key_sample`` is the most rows of a slice that are looked at for heavy keys.
    """
    columns = operator.spec.partition_by if key_sample else None
    return OperatorNode(
        name=operator.name,
        versions={},
        late=frozenset(operator.late_branches),
        aside=frozenset(operator.error_branches),
        latest=revision,
        keys=None if columns is None else KeySampler(columns, key_sample),
    )


def in_order(before: StageProgram, after: StageProgram) -> list[str]:
    """The operators of two versions of a stage, in an order that is topological for both if there is one."""
    old, new = [op.name for op in before.operators], [op.name for op in after.operators]
    if old == new:
        return old
    behind: dict[str, set[str]] = {name: set() for name in (*old, *new)}
    for program in (before, after):
        for op in program.operators:
            behind[op.name].update(port.operator for port in op.inputs if port.operator in behind)
    try:
        return list(TopologicalSorter(behind).static_order())
    except CycleError:  # two operators have changed places; either graph's order will do
        return [*new, *(name for name in old if name not in new)]
