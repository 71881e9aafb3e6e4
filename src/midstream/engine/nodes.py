"""An operator in place in a task: its work, by revision, and what it has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from midstream.engine.intake import IntakeEntry, entries_of
from midstream.engine.parts import Parts, at_work
from midstream.engine.steps import AtWork
from midstream.flow.model import Operator
from midstream.ids import Revision
from midstream.metrics import Histogram, OperatorStats
from midstream.planner.stages import Wire


@dataclass(frozen=True)
class Version:
    """What an operator does under a revision."""

    work: AtWork
    event_time: str | None


@dataclass
class OperatorNode:
    """An operator in place: its work by revision, who reads each of its branches, and what it has done so far."""

    name: str
    versions: dict[Revision, Version]
    late: frozenset[str]
    """Its branches of late rows."""
    aside: frozenset[str]
    """Its branches of bad rows."""
    consumers: dict[str, tuple[IntakeEntry, ...]]
    wires: dict[str, tuple[Wire, ...]]
    latest: Revision
    """The revision of the last rows that it took."""
    is_updated: bool = False
    sample: pa.RecordBatch | None = None
    """The first rows that it met."""
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
        """A slice was processed, or a part of what is said at the end was made."""
        self.slices += 1
        self.busy_ns += took_ns
        self.slowest_ns = max(self.slowest_ns, took_ns)

    def stats(self) -> OperatorStats:
        """What was done, as it is reported."""
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
            note="" if (note := self.versions[self.latest].work.note) is None else note(),
        )


def version_of(operator: Operator, parts: Parts) -> Version:
    """What an operator does under the revision of these parts."""
    return Version(at_work(operator, parts), parts.program.event_times.get(operator.name))


def node_of(operator: Operator, parts: Parts) -> OperatorNode:
    """An operator in place, under the revision of these parts."""
    program = parts.program
    # Not the inlets: a transform of this stage that reads another one has had its rows in Catalyst already.
    here = [op for op in program.operators if op.name not in program.stage.inlets]
    return OperatorNode(
        name=operator.name,
        versions={parts.revision: version_of(operator, parts)},
        late=frozenset(operator.late_branches),
        aside=frozenset(operator.error_branches),
        consumers={port.branch: entries_of(port, here) for port in operator.ports},
        wires={
            port.branch: tuple(
                wire for wire in program.wires if wire.port == port and wire.origin == program.stage.index
            )
            for port in operator.ports
        },
        latest=parts.revision,
    )
