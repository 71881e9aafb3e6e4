"""Preflight: the driver calls new functions on a few real rows, with the state of their keys, before it sends anything.

The rows are some that the operator processed in the last committed epoch, with the state that this epoch left for their
keys. So a function that cannot take its input, or that expects its state in another layout, is found here, where it
costs nothing. Failures on other rows are found by the trial, see :mod:`.trial`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from midstream.change.configuration import FIRST_REVISION
from midstream.change.prepare import PreparedChange, stage_of
from midstream.checkpoint.change_records import InsertRecord, UpdateRecord
from midstream.control.messages import Commit
from midstream.data.rows import to_rows
from midstream.data.times import EpochTimes
from midstream.engine.frames import decode_rows
from midstream.engine.parts import Parts, instantiate
from midstream.engine.resources import Resources
from midstream.errors import CheckpointError, FunctionError, MidstreamError, OperatorFailed, StateError
from midstream.flow.model import Operator, Port, Transform
from midstream.flow.spec import ERROR_COLUMN, ERRORS
from midstream.ids import Epoch, Revision
from midstream.planner.programs import StageProgram
from midstream.state.base import Base
from midstream.state.files import FileRef, StateFiles
from midstream.state.lineage import Lineage
from midstream.state.task import TaskState
from midstream.storage.blobs import BlobStore

__all__ = ["Samples", "changed_transforms", "run_preflight"]

_NONE = Epoch(-1)


@dataclass(frozen=True)
class Samples:
    """A few rows that each operator processed in an epoch, and the files with the epoch's changes of its state.

    The epoch began and ended under ``revision``, so the state that it wrote has that revision's layout.
    """

    epoch: Epoch = _NONE
    revision: Revision = FIRST_REVISION
    rows: Mapping[str, bytes] = field(default_factory=dict)
    deltas: Mapping[str, tuple[FileRef, ...]] = field(default_factory=dict)

    def files(self) -> frozenset[str]:
        """The names of the state files that the next preflight reads."""
        return frozenset(delta.name for deltas in self.deltas.values() for delta in deltas)

    def after(self, commit: Commit) -> Samples:
        """The samples after one more epoch; without rows, or with a change within it, the earlier ones stay."""
        if not commit.samples or commit.switches:
            return self
        deltas = {
            operator: tuple(change.delta for change in changes if change.delta is not None)
            for operator, changes in commit.states.items()
        }
        return Samples(commit.epoch, commit.revision, commit.samples, deltas)


def changed_transforms(prepared: PreparedChange) -> tuple[str, ...]:
    """The transforms that a change updates or whose columns it changes. Only the runtime can check them."""
    before, after = prepared.before.graph, prepared.after.graph
    return tuple(
        op.name
        for op in after.of(Transform)
        if op.name in _new_functions(prepared)
        or op.name not in before
        or not after.schema_of(op.inputs[0]).equals(before.schema_of(before[op.name].inputs[0]))
    )


def run_preflight(prepared: PreparedChange, samples: Samples, store: BlobStore, files: StateFiles) -> tuple[str, ...]:
    """Call each new function on the samples of its operator. Raises :class:`FunctionError` if one fails.

    Returns a line for each function that could not be checked, with the reason.
    """
    unchecked = []
    resources = Resources(store)
    try:
        for name in _new_functions(prepared):
            if not prepared.after.graph[name].spec.has_preflight:
                continue
            if (why := _check(prepared, name, samples, resources, files)) is not None:
                unchecked.append(f"no preflight of {name!r}: {why}")
    finally:
        resources.close()
    return tuple(unchecked)


def _check(
    prepared: PreparedChange, name: str, samples: Samples, resources: Resources, files: StateFiles
) -> str | None:
    is_new = name not in prepared.before.graph
    rows = _entering(prepared, name, samples, resources) if is_new else _sampled(samples, name)
    if rows is None:
        return "nothing that it reads has had a row yet" if is_new else "it has processed no row yet"
    after = prepared.after
    program = _since(resources.program(after.programs[stage_of(after.plan)[name]]), samples.revision)
    operator = program.operator(name)
    if not rows.schema.equals(program.inputs[name][0]):
        return "its input columns change"
    try:
        resources.function(program.blobs[name], name)
    except OperatorFailed as error:
        # It may need something that only workers have; the trial will show.
        return f"it cannot be opened on the driver: {error.error}"
    try:
        with _state_of(name, operator, samples, files) as states:
            bad = _call(operator, program, resources, states, rows)
        if (
            bad is not None
            and bad.num_rows == rows.num_rows
            and not _was_bad(prepared, name, samples, resources, files)
        ):
            raise _all_bad(name, bad)
    except OperatorFailed as error:
        raise _refusal(prepared, name, samples, rows.num_rows, error) from error
    except (CheckpointError, StateError) as error:
        # This is no fault of the function.
        return f"the state of these rows cannot be read any more: {error}"
    return None


def _new_functions(prepared: PreparedChange) -> tuple[str, ...]:
    """The operators that a change updates or inserts, in the flow's order."""
    new = {edit.operator for edit in prepared.edits if isinstance(edit, UpdateRecord | InsertRecord)}
    return tuple(op.name for op in prepared.after.graph if op.name in new)


def _sampled(samples: Samples, name: str) -> pa.RecordBatch | None:
    found = samples.rows.get(name)
    return None if found is None else decode_rows(pa.py_buffer(found))


def _entering(prepared: PreparedChange, name: str, samples: Samples, resources: Resources) -> pa.RecordBatch | None:
    """The rows that an inserted operator would have taken first: what leaves the outputs that it reads, for real rows
    of the operators above it. None if that is not known."""
    rows = [_leaving(prepared, port, samples, resources) for port in prepared.after.graph[name].inputs]
    return rows[0] if len(rows) == 1 else None


def _leaving(prepared: PreparedChange, port: Port, samples: Samples, resources: Resources) -> pa.RecordBatch | None:
    graph, was = prepared.after.graph, prepared.before.graph
    op, schema = graph[port.operator], graph.schema_of(port)
    readers = [each for each in was.consumers(port) if len(was[each].inputs) == 1] if port.operator in was else []
    for reader in readers:
        found = _sampled(samples, reader)
        if found is not None and found.num_rows and found.schema.equals(schema):
            return found
    if op.spec.is_stateful or op.spec.is_outlet:
        return None
    found = _entering(prepared, op.name, samples, resources) if op.inputs else _sampled(samples, op.name)
    if found is None or not op.spec.is_updatable:
        return found
    program = resources.program(prepared.after.programs[stage_of(prepared.after.plan)[op.name]])
    parts = Parts(program, resources, {}, EpochTimes(clock=0), FIRST_REVISION)
    try:
        left = instantiate(op, parts).entries[0](found).get(port.branch)
    except OperatorFailed:  # it is checked by itself
        return None
    return left if left is not None and left.num_rows and left.schema.equals(schema) else None


def _was_bad(prepared: PreparedChange, name: str, samples: Samples, resources: Resources, files: StateFiles) -> bool:
    """Whether the current function cannot take any of the rows either."""
    if name not in prepared.before.graph:
        return False
    rows, before = decode_rows(pa.py_buffer(samples.rows[name])), prepared.before
    program = _since(resources.program(before.programs[stage_of(before.plan)[name]]), samples.revision)
    with _state_of(name, program.operator(name), samples, files) as states:
        bad = _call(program.operator(name), program, resources, states, rows)
    return bad is not None and bad.num_rows == rows.num_rows


def _all_bad(name: str, bad: pa.RecordBatch) -> OperatorFailed:
    """The error for a function that sends every row to its errors branch: it never fails, but must be a mistake."""
    [first, *_] = to_rows(bad)
    reason = first.pop(ERROR_COLUMN)
    return OperatorFailed(
        f"all rows would go to the errors branch of {name!r}; the reason for the first, {first!r:.200}: {reason}",
        operator=name,
        error=reason,
        row=first,
        user_traceback="",
    )


def _since(program: StageProgram, revision: Revision) -> StageProgram:
    """Drop the migrations that the samples have already been through: one epoch's files may not show their level."""
    later = {
        name: tuple(step for step in steps if step.revision > revision) for name, steps in program.migrations.items()
    }
    return replace(program, migrations=later)


def _call(
    operator: Operator,
    program: StageProgram,
    resources: Resources,
    states: Mapping[str, TaskState],
    rows: pa.RecordBatch,
) -> pa.RecordBatch | None:
    """Call the function on rows; return those that went to its errors branch, if it has one."""
    parts = Parts(program, resources, states, EpochTimes(clock=0), FIRST_REVISION)
    work = instantiate(operator, parts)
    results = work.entries[0](rows)
    return results.get(ERRORS) if operator.error_branches else None


@contextlib.contextmanager
def _state_of(name: str, operator: Operator, samples: Samples, files: StateFiles) -> Iterator[dict[str, TaskState]]:
    """The state that the sample's epoch left, in a temporary folder; nothing is written back."""
    if not operator.spec.keeps_user_state:
        yield {}
        return
    lineage = Lineage.start(name, files.space.bins).after(samples.epoch, list(samples.deltas.get(name, ())))
    with tempfile.TemporaryDirectory(prefix="midstream-preflight-") as folder:
        base = Base(folder, f"preflight of {name}", files)
        try:
            with TaskState(base, lineage, files.space.all) as state:
                yield {name: state}
        finally:
            base.close()


def _refusal(prepared: PreparedChange, name: str, samples: Samples, rows: int, error: OperatorFailed) -> MidstreamError:
    hint = "Fix it and request the change again; preflight=False sends a function that can only run on workers."
    kinds = UpdateRecord | InsertRecord
    record = next(edit for edit in prepared.edits if isinstance(edit, kinds) and edit.operator == name)
    if isinstance(record, UpdateRecord) and prepared.after.graph[name].spec.keeps_user_state:
        hint = (
            "If it expects its state in another layout, pass migrate=, a function that converts a key's state"
            if record.migrate is None
            else "It was called after migrate= had converted the state of these keys"
        )
    return FunctionError(
        f"operator {name!r}: {record.label} fails in preflight, on {rows} row(s) of epoch {samples.epoch}; nothing "
        f"was changed: {error.message}\n\n{error.user_traceback}\n\n{hint}",
        operator=name,
        row=error.row,
        user_traceback=error.user_traceback,
    )
