"""Checks that stored state fits the flow that is to continue with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pyarrow as pa

from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.errors import CheckpointError
from midstream.flow.graph_format import CODEC
from midstream.flow.model import Operator
from midstream.planner.programs import StageProgram
from midstream.planner.stages import Plan
from midstream.storage.documents import read_document


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """What determines the format of an operator's state: its description, and its input columns."""

    operator: Operator
    takes: tuple[pa.Schema, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns."""
        return self.operator.spec.keyed_by

    def describe(self) -> str:
        """A text of everything that matters to the state."""
        return self.operator.spec.state_layout(self.takes)


def _tables(operator: Operator) -> dict[str, str]:
    return {table.name: repr(table) for table in operator.spec.shared_tables}


def stored_layouts(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, StateLayout]:
    """The layouts of the operators of a committed epoch that keep state, and of those that left some when they went."""
    return {**kept_layouts(checkpoint, manifest), **layouts_in_use(checkpoint, manifest)}


def kept_layouts(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, StateLayout]:
    """The layouts of state that removed operators have left and that is still there; older versions did not write them
    down."""
    what = "the configuration of a revision"
    found = read_document(checkpoint.blobs.get(manifest.configuration), what).get("kept", {})
    layouts: dict[str, StateLayout] = CODEC.decode(found, Mapping[str, StateLayout], what)
    return {name: layout for name, layout in layouts.items() if name in manifest.lineages}


def layouts_in_use(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, StateLayout]:
    """The layouts of the operators of a committed epoch that keep state."""
    programs = [StageProgram.from_bytes(checkpoint.blobs.get(digest)) for digest in manifest.programs]
    return {
        op.name: StateLayout(op, program.inputs[op.name])
        for program in programs
        for op in program.operators
        if op.spec.is_stateful
    }


def check_layouts(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse a flow one of whose operators could not read the state that is stored under its name."""
    manifest = checkpoint.newest_manifest()
    if manifest is not None:
        require_fitting(stored_layouts(checkpoint, manifest), plan, checkpoint.location)


def require_fitting(stored: Mapping[str, StateLayout], plan: Plan, location: str) -> None:
    """The comparison behind :func:`check_layouts`."""
    graph = plan.graph
    for name, layout in stored.items():
        if name not in graph or not graph[name].spec.is_stateful:
            continue
        wanted = StateLayout(graph[name], tuple(graph.schema_of(port) for port in graph[name].inputs)).describe()
        found = layout.describe()
        before, after = _tables(layout.operator), _tables(graph[name])
        for table in before.keys() & after.keys():
            if before[table] != after[table]:
                found, wanted = before[table], after[table]
        if found != wanted:
            raise CheckpointError(
                f"the state of operator {name!r} in {location!r} does not fit the flow: it was kept by\n  {found}\nbut "
                f"the flow has\n  {wanted}\nGive the operator another name (it then starts with empty state), or use a "
                f"new checkpoint"
            )
