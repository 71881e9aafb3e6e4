"""Whether the state that is there fits the flow that wants to go on with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pyarrow as pa

from midstream.checkpoint.location import Checkpoint, Manifest
from midstream.data.schema import columns_of, to_ddl
from midstream.errors import CheckpointError
from midstream.flow.model import Form, Join, Operator, Process, Stateful, Transact
from midstream.planner.programs import StageProgram
from midstream.planner.stages import Plan


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """What decides the bytes of an operator's state: its description, and the columns it takes."""

    operator: Operator
    takes: tuple[pa.Schema, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns."""
        assert isinstance(self.operator.spec, Stateful)
        return self.operator.spec.keys

    def describe(self) -> str:
        """In words, as far as it matters to the state.

        A process may have another function, form, promises and time to live; what it stores are its own objects. A
        join may promise something else: that changes no byte of what it keeps. A transact may have other transactions,
        and more or fewer tables.
        """
        spec = self.operator.spec
        if isinstance(spec, Process):
            spec = Process(spec.keys, Form.ROWS)
        elif isinstance(spec, Join):
            spec = dataclasses.replace(spec, unique=False)
        elif isinstance(spec, Transact):
            spec = Transact((), (), order_by="", domain=spec.domain)
        details = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        shown = ", ".join(f"{name}={value!r}" for name, value in details.items() if value not in (None, False))
        return f"{self.operator.kind}({shown}) over ({') and ('.join(to_ddl(s) for s in self._relevant())})"

    def _relevant(self) -> list[pa.Schema]:
        """Of a process or transact only the key's columns matter, of others all that they may keep."""
        if isinstance(self.operator.spec, Process | Transact):
            return [columns_of(self.takes[0], self.operator.spec.keys)]
        return list(self.takes)


def _tables(operator: Operator) -> dict[str, str]:
    return {table.name: repr(table) for table in operator.spec.tables} if isinstance(operator.spec, Transact) else {}


def stored_layouts(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, StateLayout]:
    """The layouts of the operators of a committed epoch that keep state."""
    programs = [StageProgram.from_bytes(checkpoint.blobs.get(digest)) for digest in manifest.programs]
    return {
        op.name: StateLayout(op, program.inputs[op.name])
        for program in programs
        for op in program.operators
        if isinstance(op.spec, Stateful)
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
        if name not in graph or not isinstance(graph[name].spec, Stateful):
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
