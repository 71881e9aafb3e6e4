"""The initial state of inserted operators, from tables that users pass: checked and made into rows of state, as blobs.

The first epoch under the change writes them into a file of state, which its manifest names like any other. So they take
effect exactly once, with that epoch, or not at all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from midstream.change.configuration import Configuration
from midstream.data.key_space import KeySpace
from midstream.engine.initial_rows import table_given
from midstream.engine.parts import TaskSpec
from midstream.errors import FlowError, OperatorFailed, SchemaError
from midstream.flow.edits import Edit, steps_in
from midstream.flow.model import Graph
from midstream.flow.plan_steps import Add
from midstream.state.base import Base
from midstream.state.files import SCHEMA, StateFiles
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState
from midstream.storage.blobs import Blob

__all__ = ["initial_states", "require_no_other_state", "rows_of_state"]

_SLICE = 1 << 16


def initial_states(graph: Graph, edits: Iterable[Edit], bins: int, known: Iterable[str] = ()) -> dict[str, Blob]:
    """The initial states in edits, packed, by operator; ``known`` are packed already. Runs Spark jobs."""
    return {
        step.operator.name: _packed(graph, step.operator.name, step.state, bins)
        for step in steps_in(edits)
        if isinstance(step, Add) and step.state is not None and step.operator.name not in set(known)
    }


def _packed(graph: Graph, name: str, given: Any, bins: int) -> Blob:
    op = graph[name]
    what = f"{op.kind} {name!r}"
    if not isinstance(op.spec, TaskSpec) or not op.spec.is_stateful:
        raise FlowError(f"{what} keeps no state, so it can have no initial state")
    takes = [graph.schema_of(port) for port in op.inputs]
    table = table_given(given, what)
    space = KeySpace(bins)
    with tempfile.TemporaryDirectory(prefix="midstream-initial-") as folder:
        base = Base(folder, f"initial state of {name}", StateFiles(f"{folder}/files", durable=False, space=space))
        try:
            with TaskState(base, Lineage.start(name, bins), space.all) as state:
                op.spec.load_initial(op, takes, table, state, time.time_ns() // 1000)
                rows = state.changes()
        except OperatorFailed as error:
            raise SchemaError(
                f"{what}: its initial state cannot be loaded: {error.error}; row {error.row!r:.200}"
            ) from error
        finally:
            base.close()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(rows, _SLICE)
    return Blob.of(sink.getvalue().to_pybytes())


def rows_of_state(data: bytes) -> pa.Table:
    """The rows of a packed initial state."""
    return pa.ipc.open_stream(data).read_all()


def require_no_other_state(current: Configuration, names: Mapping[str, object]) -> None:
    """Refuse initial state for an operator that finds state under its name."""
    for name in names:
        if name in current.kept or name in current.graph or name in current.migrations:
            raise FlowError(
                f"{name!r} cannot get an initial state: there is state under this name already, of an operator that "
                f"was removed. Leave state= out to go on with that, or give the operator another name; 'midstream "
                f"state CHECKPOINT --forget {name}' drops the old state while the job is not running"
            )
