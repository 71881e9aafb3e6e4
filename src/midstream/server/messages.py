"""The messages between a job and its clients, as JSON.

Functions are pickled by value, tables are Arrow IPC, both in base64. A pickle is code: it is loaded only after the
token was checked, and only by a Python version that can run what the client's Python compiled.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import pyarrow as pa

from midstream.change.plan_records import loaded_payload
from midstream.checkpoint.change_records import ChangeRecord
from midstream.checkpoint.savepoints import Savepoint
from midstream.data.schema import ddl_of
from midstream.engine.initial_rows import table_given
from midstream.errors import FlowError, FunctionError
from midstream.flow.edits import Edit, Insert, Move, Remove, Rescale, Rewire, Tune, Update
from midstream.flow.functions import pack
from midstream.flow.graph_format import graph_from_document, graph_to_document
from midstream.flow.inputs import describe_table, packed_source
from midstream.flow.model import Graph, Operator
from midstream.metrics import EpochProgress, SweepStats
from midstream.storage.documents import read_document, write_document

__all__ = [
    "EDIT_KINDS",
    "ChangeRequest",
    "DeployRequest",
    "Deployed",
    "EditMessage",
    "ErrorReply",
    "Explained",
    "InsertMessage",
    "JobState",
    "MigrationFunction",
    "MoveMessage",
    "RemoveMessage",
    "RescaleMessage",
    "RevertRequest",
    "RewireMessage",
    "SavepointRequest",
    "SavepointState",
    "TuneMessage",
    "UpdateMessage",
    "Welcome",
    "message_of",
    "packed_states",
    "python_version",
    "require_same_python",
]


def python_version() -> str:
    """The minor version of Python; compiled functions can only be exchanged between equal ones."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


class UpdateMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="update"):
    """An :class:`~midstream.Update` as a message: ``function`` for operators with functions, ``table`` for lookups.

    >>> sent = UpdateMessage.of(Update("double", lambda row: {"n": 3 * row["n"]}))
    >>> msgspec.json.decode(msgspec.json.encode(sent), type=UpdateMessage).edit().function({"n": 2})
    {'n': 6}
    """

    operator: str
    function: bytes | None = None
    table: bytes | None = None
    migrate: bytes | None = None
    returns: str | None = None

    @classmethod
    def of(cls, update: Update) -> UpdateMessage:
        """Pack an update; raises :class:`FunctionError` if that is impossible."""
        name = update.operator
        if update.local is not None:
            raise FlowError(f"update of {name!r}: local= is only for the local runtime, which has no clients")
        is_table = _is_table(update.function)
        return cls(
            operator=name,
            function=None if is_table else pack(update.function, name).data,
            table=_table_to_bytes(update.function, name) if is_table else None,
            migrate=None if update.migrate is None else pack(update.migrate, name).data,
            returns=None if update.returns is None else ddl_of(update.returns),
        )

    def edit(self) -> Update:
        """Unpack it. This runs the sender's code."""
        if (self.function is None) == (self.table is None):
            raise FlowError(f"update of {self.operator!r}: set either function or table")
        replacement = (
            _table_from_bytes(self.table, self.operator)
            if self.table is not None
            else _load(self.function or b"", self.operator)
        )
        migrate = None if self.migrate is None else _load(self.migrate, self.operator)
        return Update(self.operator, replacement, migrate=migrate, returns=self.returns)


class MoveMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="move"):
    """A :class:`~midstream.Move` as a message."""

    bins: dict[int, int]
    stage: str | None = None

    def edit(self) -> Move:
        """The edit."""
        return Move(self.bins, self.stage)


class RescaleMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rescale"):
    """A :class:`~midstream.Rescale` as a message."""

    partitions: int
    stage: str | None = None

    def edit(self) -> Rescale:
        """The edit."""
        return Rescale(self.partitions, self.stage)


class InsertMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="insert"):
    """An :class:`~midstream.Insert` as a message; ``build`` is its function, pickled by value."""

    build: bytes | None
    after: tuple[str, ...] | None
    before: tuple[str, ...] | None = None
    state: bytes | dict[str, bytes] | None = None
    """The initial state as Arrow IPC, or by operator."""
    source: bytes | None = None
    """The function that adds a source, pickled by value."""

    @classmethod
    def of(cls, edit: Insert) -> InsertMessage:
        """Pack an insert; raises :class:`FunctionError` if that is impossible."""
        after, before = edit.between or (edit.after, edit.before)
        return cls(
            None if edit.build is None else pack(edit.build, "Insert").data,
            None if after is None and edit.source is not None else _names(after),
            None if before is None else _names(before),
            _packed_state(edit.state),
            None if edit.source is None else pack(edit.source, "Insert").data,
        )

    def edit(self) -> Insert:
        """Unpack it. This runs the sender's code."""
        build, source = (None if data is None else _load(data, "Insert") for data in (self.build, self.source))
        return Insert(build, after=self.after, before=self.before, state=self._given_state(), source=source)

    def _given_state(self) -> Any:
        if isinstance(self.state, dict):
            return {name: _table_from_bytes(data, name) for name, data in self.state.items()}
        return None if self.state is None else _table_from_bytes(self.state, "Insert")


class RemoveMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="remove"):
    """A :class:`~midstream.Remove` as a message."""

    operator: str
    flush: bool = False

    def edit(self) -> Remove:
        """The edit."""
        return Remove(self.operator, self.flush)


class RewireMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rewire"):
    """A :class:`~midstream.Rewire` as a message."""

    operator: str
    to: tuple[str, ...]
    input: int | None = None

    def edit(self) -> Rewire:
        """The edit."""
        return Rewire(self.operator, self.to, self.input)


class TuneMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tune"):
    """A :class:`~midstream.Tune` as a message: texts such as ``"500 ms"``, numbers, or null for a default."""

    knobs: dict[str, int | str | None]

    def edit(self) -> Tune:
        """The edit."""
        return Tune(**self.knobs)


def packed_states(given: Mapping[str, Any] | None) -> dict[str, bytes] | None:
    """Initial states by operator, as a message has them."""
    if given is None:
        return None
    return {name: _table_to_bytes(table_given(each, name), name) for name, each in given.items()}


def _packed_state(given: Any) -> bytes | dict[str, bytes] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return packed_states(given)
    return _table_to_bytes(table_given(given, "Insert"), "Insert")


def _names(given: Any) -> tuple[str, ...]:
    return tuple(given) if isinstance(given, tuple | list) else () if given is None else (given,)


EditMessage = UpdateMessage | MoveMessage | RescaleMessage | InsertMessage | RemoveMessage | RewireMessage | TuneMessage
"""An edit on its way, by its ``kind``."""
EDIT_KINDS = tuple(repr(kind.__struct_config__.tag) for kind in get_args(EditMessage))
"""The kinds of edits, for messages to people."""


def message_of(edit: Edit) -> EditMessage:
    """An edit as a message; raises :class:`FunctionError` if its function cannot be packed."""
    match edit:
        case Update():
            return UpdateMessage.of(edit)
        case Move(bins=bins, stage=stage):
            return MoveMessage(dict(bins), stage)
        case Rescale(partitions=partitions, stage=stage):
            return RescaleMessage(partitions, stage)
        case Insert():
            return InsertMessage.of(edit)
        case Remove(operator=operator, flush=flush):
            return RemoveMessage(operator, flush)
        case Rewire(operator=operator, to=to, input=number):
            return RewireMessage(operator, _names(to), number)
        case Tune(knobs=knobs):
            return TuneMessage(dict(knobs))
    raise FlowError(f"a {type(edit).__name__} cannot be sent to a job; deploy the whole script")


class ChangeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /explain`` and ``POST /update``. ``python`` is the client's :func:`python_version`."""

    edits: tuple[EditMessage, ...]
    python: str
    scheduler: str = "fries"
    time_limit: str | None = None
    by: str | None = None
    note: str | None = None

    def unpacked(self) -> tuple[Edit, ...]:
        """The edits. This runs the sender's code."""
        require_same_python(self.python)
        return tuple(message.edit() for message in self.edits)


class MigrationFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that migrates the state of one process back to an earlier layout."""

    operator: str
    function: bytes

    @classmethod
    def of(cls, operator: str, function: Any) -> MigrationFunction:
        """Pack a migration."""
        return cls(operator, pack(function, operator).data)


class DeployRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /deploy``: a script's flow, as graphs are kept in checkpoints.

    ``payloads`` has what operators run, in the form of blobs, and the targets of sinks that can be pickled. With
    ``plan_only`` nothing is changed.
    """

    flow: bytes
    payloads: dict[str, bytes]
    python: str
    migrate: tuple[MigrationFunction, ...] = ()
    scheduler: str = "fries"
    time_limit: str | None = None
    by: str | None = None
    note: str | None = None
    plan_only: bool = False
    flush: tuple[str, ...] = ()
    """Operators that emit all they hold open before they go."""
    state: dict[str, bytes] | None = None
    """By name of an added operator: its initial state as Arrow IPC."""

    @staticmethod
    def packed(graph: Graph) -> tuple[bytes, dict[str, bytes]]:
        """The fields ``flow`` and ``payloads`` for a flow; sources that are DataFrames stay where they are."""
        payloads = {}
        for op in graph:
            payload = graph.payloads.get(op.name)
            if op.spec.reads_stream:
                if (blob := packed_source(payload, op.name)) is not None:
                    payloads[op.name] = blob.data
            elif op.delivery is not None:
                with contextlib.suppress(FunctionError):
                    payloads[op.name] = pack(payload, op.name).data
            elif (blob := op.spec.packed(payload, op.name)) is not None:
                payloads[op.name] = blob.data
        return write_document(graph_to_document(graph)), payloads

    def unpacked(self) -> Graph:
        """The flow. This runs the sender's code."""
        require_same_python(self.python)
        what = "the flow that was sent"
        graph = graph_from_document(read_document(self.flow, what), what)
        payloads: dict[str, Any] = {}
        for op in graph:
            data = self.payloads.get(op.name)
            if data is not None:
                payloads[op.name] = _payload(op, data)
        return Graph(graph.name, graph.operators, payloads, graph.written_for)

    def initial_states(self) -> Mapping[str, Any]:
        """The initial states by operator."""
        return {name: _table_from_bytes(data, name) for name, data in (self.state or {}).items()}

    def migrations(self) -> Mapping[str, Any]:
        """The migrations by operator. This runs the sender's code."""
        return {step.operator: _load(step.function, step.operator) for step in self.migrate}


def _payload(op: Operator, data: bytes) -> Any:
    try:
        return loaded_payload(op, data)
    except Exception as error:
        raise FunctionError(
            f"operator {op.name!r}: the job cannot load what it is to run ({type(error).__name__}: {error}); packages "
            f"that it uses must be installed where the job runs, too",
            operator=op.name,
        ) from error


class Deployed(msgspec.Struct, frozen=True):
    """Answer of ``POST /deploy``. ``change`` is null if nothing was changed: the job runs all of it, or only the plan
    was asked for, which ``text`` and ``svg`` have."""

    change: ChangeRecord | None = None
    text: str = ""
    svg: str = ""


class RevertRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /revert``."""

    revision: int
    python: str
    migrate: tuple[MigrationFunction, ...] = ()
    scheduler: str = "fries"
    by: str | None = None

    def unpacked(self) -> Mapping[str, Any]:
        """The migrations by operator. This runs the sender's code."""
        require_same_python(self.python)
        return {step.operator: _load(step.function, step.operator) for step in self.migrate}


class SavepointRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /savepoints``."""

    name: str
    note: str | None = None
    by: str | None = None


class SavepointState(msgspec.Struct, frozen=True):
    """A savepoint, without what it keeps. ``is_abandoned``: the job was rewound to before it, so only a fork can begin
    there.

    Answer of ``POST /savepoints`` and ``DELETE /savepoints/{name}``; ``GET /savepoints`` lists all.
    """

    name: str
    epoch: int
    revision: int
    taken_at: float
    by: str
    note: str | None = None
    is_abandoned: bool = False

    @classmethod
    def of(cls, found: Savepoint) -> SavepointState:
        """The part of a savepoint that clients see."""
        manifest = found.manifest
        return cls(found.name, found.epoch, manifest.revision, found.taken_at, found.by, found.note, found.is_abandoned)


class Welcome(msgspec.Struct, frozen=True):
    """Answer of ``GET /``: which job this is, and where the interface is described."""

    midstream: str
    name: str
    id: str
    description: str = "/openapi.json"


class JobState(msgspec.Struct, frozen=True):
    """Answer of ``GET /status``: totals since this start, recent epochs (newest last), the change on trial."""

    name: str
    id: str
    status: str
    revision: int
    epochs: int
    rows_in: int
    rows_out: int
    busy_ms: float
    progress: tuple[EpochProgress, ...] = ()
    on_trial: ChangeRecord | None = None
    error: str | None = None
    sweep: SweepStats = SweepStats()
    errors: dict[str, int] = {}
    """Bad rows by operator; only operators that have some."""
    rows_ahead: dict[str, int] = {}
    """By source, rows whose event time was too far in the future to move the watermark; only sources that have some."""
    knobs: dict[str, int | None] = {}
    """Every knob's value, in microseconds, bytes or rows; null for no limit."""


class Explained(msgspec.Struct, frozen=True):
    """Answer of ``POST /explain``. ``most_ms`` is null if the duration of the running epoch is unknown."""

    text: str
    svg: str
    least_ms: float
    most_ms: float | None


class ErrorReply(msgspec.Struct, frozen=True):
    """Answer to a failed request: the name of the error's class, and its message."""

    error: str
    message: str


def require_same_python(theirs: str) -> None:
    """Refuse what another minor version of Python has compiled."""
    if theirs != python_version():
        raise FunctionError(
            f"the job runs Python {python_version()}, and cannot run functions that Python {theirs!r:.20} compiled; "
            f"use the same version on both sides"
        )


def _load(data: bytes, operator: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        story = str(error).splitlines()
        raise FunctionError(
            f"operator {operator!r}: the job cannot load the object it was sent ({type(error).__name__}: "
            f"{story[0][:200] if story else ''}); packages that it uses must be installed where the job runs, too",
            operator=operator,
        ) from error


def _is_table(value: Any) -> bool:
    return isinstance(value, pa.Table | pa.RecordBatch) or type(value).__module__.startswith("pandas.")


def _table_to_bytes(value: Any, operator: str) -> bytes:
    table, _ = describe_table(value, f"update of {operator!r}")
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue())


def _table_from_bytes(data: bytes, operator: str) -> pa.Table:
    try:
        return pa.ipc.open_stream(data).read_all()
    except (pa.ArrowException, OSError) as error:
        raise FlowError(f"update of {operator!r}: the table is not an Arrow IPC stream: {error}") from error
