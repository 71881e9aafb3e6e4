"""The description of an operator: one class that answers every question the rest of midstream has about it.

A :class:`Spec` describes an operator without its name, its place in the graph and the user's function or table.
Planner, engine, checkpoint and changes ask the description instead of looking at its class, so a new operator is one
module of :mod:`midstream.operators` with a subclass of :class:`Spec`. The defaults describe a stateless operator that
emits at most one row per row and has no function.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from midstream.data.schema import to_ddl, type_name
from midstream.errors import FlowError, SchemaError, StateError
from midstream.flow.functions import pack
from midstream.flow.transactions.tables import Table
from midstream.storage.blobs import Blob
from midstream.storage.table_format import TableFormat

if TYPE_CHECKING:
    from midstream.flow.model import Operator

LATE = "late"
"""The branch for rows that arrived too late for an operator's windows, with the input's columns."""

LATE_RIGHT = "late_right"
"""The same for the right input of a join."""

ERRORS = "errors"
"""The branch for bad rows of an operator with ``on_error="branch"``, with the input's columns and the reason."""

ERRORS_RIGHT = "errors_right"
"""The same for the right input of a join."""

ERROR_COLUMN = "error"
"""The column of an errors branch that holds the reason."""


class OnError(enum.StrEnum):
    """What happens to a bad row: the epoch fails, with the row in the error; or the row leaves by a branch."""

    FAIL = "fail"
    BRANCH = "branch"


class Form(enum.StrEnum):
    """How a function is called: with one dict per row, or with one Arrow record batch per slice."""

    ROWS = "rows"
    BATCHES = "batches"


class Contract(enum.StrEnum):
    """How many output rows one input row can lead to; this decides which operators must change together."""

    ONE_TO_ONE = "one-to-one"
    ONE_TO_MANY = "one-to-many"


class How(enum.StrEnum):
    """Whose rows a lookup or join keeps, with nulls, if they have no match. A lookup has no rows on its right."""

    INNER = "inner"
    LEFT = "left"
    RIGHT = "right"
    FULL = "full"

    @property
    def keeps_left(self) -> bool:
        """Whether a left row without a match is kept."""
        return self in (How.LEFT, How.FULL)

    @property
    def keeps_right(self) -> bool:
        """Whether a right row without a match is kept."""
        return self in (How.RIGHT, How.FULL)


class Delivery(enum.StrEnum):
    """How rows come to a sink."""

    TASKS = "tasks"
    """The tasks that emit them write them."""

    NONE = "none"
    """The tasks that emit them drop them."""

    ROWS = "rows"
    """They come back to the driver as the result of the epoch's job."""

    FRAME = "frame"
    """The sink reads a DataFrame."""


@dataclass(frozen=True)
class SinkTable:
    """Where and how tasks write the files of a sink. A path on this machine is absolute."""

    location: str
    format: TableFormat
    partition_by: tuple[str, ...] = ()
    merge: bool = False
    """Whether small files of committed epochs are merged, while later epochs run."""


@dataclass(frozen=True)
class InputChange:
    """An input of an operator whose columns differ before and after a change.

    ``written_for`` are the columns that its function was written for; None if the change replaces the function.
    """

    operator: str
    kind: str
    old: pa.Schema
    new: pa.Schema
    written_for: pa.Schema | None

    def __str__(self) -> str:
        return (
            f"the change gives {self.kind} {self.operator!r} other columns: ({to_ddl(self.new)}) instead of "
            f"({to_ddl(self.old)})"
        )

    def require(self, names: Iterable[str]) -> None:
        """Refuse if one of these columns is gone or has a different type."""
        self._require(names, self.old, ", and it needs")

    def require_written_for(self) -> None:
        """Refuse if a column that the function was written for is missing, unless the function is replaced."""
        if self.written_for is not None:
            advice = f". Add an Update({self.operator!r}, …) to the change that can take them; it needs"
            self._require(self.written_for.names, self.written_for, advice)

    def _require(self, names: Iterable[str], wanted: pa.Schema, why: str) -> None:
        for name in names:
            kind = wanted.field(name).type
            if name not in self.new.names or not self.new.field(name).type.equals(kind):
                raise SchemaError(f"{self}{why} {name!r} of type {type_name(kind)}", column=name)


_specs: dict[str, type[Spec]] = {}

SPECS: Mapping[str, type[Spec]] = MappingProxyType(_specs)
"""All kinds of operators, by the names that identify them in checkpoints. Complete once midstream is imported."""


@dataclass(frozen=True)
class Spec:
    """The description of an operator: frozen, comparable, small enough to travel to every worker.

    A subclass that sets :attr:`kind` is registered in :data:`SPECS`.

    >>> from midstream.operators.flat_map import FlatMap
    >>> FlatMap(Form.ROWS).kind, FlatMap(Form.ROWS).contract, SPECS["flat_map"] is FlatMap
    ('flat_map', <Contract.ONE_TO_MANY: 'one-to-many'>, True)
    """

    kind: ClassVar[str]
    """The operator's name in messages and in checkpoints. It must never change."""

    # ── its place in the flow ─────────────────────────────────────────────────────────────────────────────────────

    is_inlet: ClassVar[bool] = False
    """Whether its rows enter a stage as plain columns."""

    reads_stream: ClassVar[bool] = False
    """Whether its rows come from outside the flow."""

    is_outlet: ClassVar[bool] = False
    """Whether Catalyst runs it, rather than a stage."""

    error_branches: ClassVar[tuple[str, ...]] = (ERRORS,)
    """The branches for bad rows, one for each input, if the operator has ``on_error="branch"``."""

    inputs_are_alike: ClassVar[bool] = False
    """Whether it takes any number of inputs, in any order."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Packages that workers need for this operator, beyond those that midstream always needs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            assert cls.kind not in _specs, f"{_specs[cls.kind]} and {cls} are both of the kind {cls.kind!r}"
            _specs[cls.kind] = cls

    @property
    def divides(self) -> bool:
        """Whether the flow's stages end before this operator and begin again after it."""
        return self.is_inlet and self.is_outlet

    @property
    def outputs(self) -> tuple[str, ...]:
        """The branches of its result."""
        return ("",)

    @property
    def late_branches(self) -> tuple[str, ...]:
        """The branches for late rows, one for each input that may have late rows."""
        return ()

    @property
    def partition_by(self) -> tuple[str, ...] | None:
        """The columns that decide which task gets each row of its result; None if rows stay where they are."""
        return None

    def errors_schema(self, takes: pa.Schema) -> pa.Schema:
        """Schema of its bad rows: the input's columns and the reason."""
        return pa.schema([*takes, pa.field(ERROR_COLUMN, pa.string(), nullable=False)])

    def kept(self, columns: tuple[str, ...]) -> tuple[str, ...] | None:
        """The columns of its result that equal these columns of its (first) input, row by row; None if that is not
        certain.

        So behind an operator that keeps the key columns, rows are still in the task that owns their key.
        """
        return None

    def keeping(self, columns: tuple[str, ...]) -> Spec:
        """The description that guarantees that these columns stay :meth:`kept`, because operators rely on it."""
        return self

    # ── what it does with rows ────────────────────────────────────────────────────────────────────────────────────

    @property
    def contract(self) -> Contract:
        """How many output rows one input row can lead to, over all ports."""
        return Contract.ONE_TO_ONE

    @property
    def is_unique(self) -> bool:
        """Whether the user promises at most one row for each row of the source."""
        return False

    @property
    def blocks(self) -> bool:
        """Whether it also emits rows at the end of an epoch, when it cannot tell which input came after a change."""
        return False

    runs_whole_epochs: ClassVar[bool] = False
    """Whether it processes all rows of an epoch at once, so that a new function has to wait for the next epoch."""

    @property
    def combinable(self) -> bool:
        """Whether senders may pre-aggregate its input rows before the exchange."""
        return False

    def begins(self, branch: str) -> bool:
        """Whether rows that leave by a branch count as new source rows, rather than as results of an input row."""
        return False

    def gives_many(self, branch: str) -> bool:
        """Whether several rows may leave by a branch as the result of one input row. Not called for errors branches."""
        return self.contract is Contract.ONE_TO_MANY

    # ── the user's function or table, and how it changes ──────────────────────────────────────────────────────────

    is_updatable: ClassVar[bool] = False
    """Whether it has a function or table of the user's, which a change can replace."""

    has_preflight: ClassVar[bool] = False
    """Whether the driver calls a new function on a few rows before a change begins."""

    declares_columns: ClassVar[bool] = False
    """Whether the user declares its columns, rather than midstream deriving them from its inputs."""

    @property
    def function_takes(self) -> tuple[str, ...]:
        """The arguments of its function, in words."""
        return ()

    def packed(self, payload: Any, operator: str) -> Blob | None:
        """The payload in a form that workers can load. None if there is none, or it cannot be stored."""
        return pack(payload, operator) if self.is_updatable else None

    def loaded(self, data: bytes) -> Any:
        """The inverse of :meth:`packed`. Raises whatever the user's modules raise."""
        return pickle.loads(data)

    def replaced(self, function: Any, local: Any, operator: str, what: str) -> tuple[Spec, Any]:
        """The description and the payload after an update with ``function``, see :class:`midstream.Update`.

        ``what`` names the update in errors. Raises :class:`FlowError` if the function does not fit.
        """
        kinds = ", ".join(sorted(kind for kind, spec in SPECS.items() if spec.is_updatable))
        raise FlowError(
            f"{what}: a {self.kind} has no function to replace. Kinds of operators that can be updated: {kinds}"
        )

    def check_input(self, change: InputChange) -> None:
        """Refuse a change of an input's columns that the operator cannot take."""
        change.require_written_for()

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The description and the schema derived from the inputs after a change; ``schema`` is the one before it."""
        return self, inputs[0] if inputs and not self.declares_columns else schema

    # ── its state ─────────────────────────────────────────────────────────────────────────────────────────────────

    is_stateful: ClassVar[bool] = False
    """Whether it keeps state; if so, it follows a key_by."""

    @property
    def copyable_inputs(self) -> tuple[int, ...]:
        """Inputs whose rows may be in several tasks at once, if those of the other input are spread over these."""
        return ()

    @property
    def holds_back(self) -> bool:
        """Whether its state holds results that it emits only when the watermark reaches them: windows, timers, rows
        without a match."""
        return False

    keeps_user_state: ClassVar[bool] = False
    """Whether its state consists of the user's objects, which ``migrate=`` can convert to another layout."""

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The key columns of its state, as its (left) input has them."""
        return ()

    @property
    def keys_by_input(self) -> tuple[tuple[str, ...], ...]:
        """The columns by which the rows of each input must be brought together; empty without state."""
        return (self.keyed_by,) if self.is_stateful else ()

    @property
    def shared_tables(self) -> tuple[Table, ...]:
        """The tables that its state consists of, if it consists of tables."""
        return ()

    def state_layout(self, takes: Sequence[pa.Schema]) -> str:
        """A text of all that decides the bytes of its state: operators with equal texts can read each other's state."""
        return layout_text(self, takes)

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """Stored keys and values as a human-readable table."""
        raise StateError(f"{self.kind} {operator.name!r} keeps no state")

    def shown_table(self, operator: Operator, table: Table, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """One of its :attr:`shared_tables`, in full."""
        raise StateError(f"{self.kind} {operator.name!r} has no table {table.name!r}")


def layout_text(spec: Spec, kept: Sequence[pa.Schema]) -> str:
    """The text of a description for :meth:`Spec.state_layout`; ``kept`` are the columns that may be in its state."""
    details = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    shown = ", ".join(f"{name}={value!r}" for name, value in details.items() if value not in (None, False))
    return f"{spec.kind}({shown}) over ({') and ('.join(to_ddl(schema) for schema in kept)})"
