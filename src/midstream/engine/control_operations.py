"""Control operations: programs of handlers that users send to a running job, after Chi (section 4.2).

A control operation travels through the flow as messages do: an operator *begins* with the first one, handles each with
*next*, *completes* when those of all its inputs have come, and only then sends one of its own to its readers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from midstream.data.ddl import closest
from midstream.data.durations import duration
from midstream.errors import FlowError, FunctionError
from midstream.flow.functions import pack
from midstream.flow.model import Graph
from midstream.ids import PartitionId
from midstream.storage.blobs import Blob

if TYPE_CHECKING:
    from midstream.engine.control_context import ControlContext

__all__ = [
    "ControlMessage",
    "ControlMode",
    "ControlOperation",
    "ControlProgram",
    "checked",
    "default_merge",
    "prepared",
]

LARGEST_LIMIT = 16 << 20
"""Largest possible limit for the result of one task, in bytes: it travels with the task's report."""


class ControlMode(enum.StrEnum):
    """How the messages of a control operation travel."""

    BLOCKING = "blocking"
    """Behind all rows of an epoch and before all rows of the next one, in every task. State can be reached."""
    IN_BAND = "in-band"
    """Among the rows of an epoch, in front of the first one that each task of a source takes."""
    FAST = "fast"
    """Not ordered with rows: straight to the tasks that are running."""


@dataclass(frozen=True)
class ControlMessage:
    """A message of a control operation, as an operator gets it.

    It was sent by the partition ``sender`` of the stage before, or by ``operator`` in the same task; both are None
    where a message enters a stage by itself. ``value`` is what the sender gave to :meth:`.ControlContext.send`, or
    None.

    >>> ControlMessage(3, operator="score", value={"limit": 0.5}).value["limit"]
    0.5
    """

    number: int
    sender: PartitionId | None = None
    operator: str | None = None
    value: Any = None


class ControlOperation:
    """A program of handlers, run at the operators of a running job. Subclass it, and pass an instance to
    :meth:`midstream.Job.control`.

    All handlers are optional. In a task, at each operator that :meth:`prepare` names, they are called in this order:
    ``begin`` with the first message, ``next`` with every message (the first included), ``complete`` when the messages
    of all inputs have come, ``dispose``. What ``complete`` returns is merged over all operators and tasks, and is the
    operation's result. ``ctx.variables`` live from ``begin`` to ``dispose``; attributes of the object itself are shared
    by all tasks of a process, so handlers must not set them.

    A task may be run again, as it may for functions: only results of committed epochs count, but what a handler does
    outside of the job may happen twice.

    >>> class CountRows(ControlOperation):
    ...     mode = "blocking"
    ...
    ...     def complete(self, ctx):
    ...         return {ctx.operator: ctx.stats.rows_in}
    """

    mode: str = "in-band"
    """``"blocking"``, ``"in-band"`` or ``"fast"``; see :class:`ControlMode`."""
    time_limit: str = "10 s"
    """How long a call of a handler may take. After that the operation is given up."""
    result_limit: int = 256 * 1024
    """The most bytes that a task's result may have, pickled; use :meth:`.ControlContext.store` for more."""

    def prepare(self, graph: Graph) -> Mapping[str, Any]:
        """On the driver, once: the configuration of each operator at which handlers are to run, by its name. Other
        operators pass messages on. Default: all operators that run in tasks, with no configuration."""
        return {op.name: None for op in graph if not op.spec.is_outlet}

    def begin(self, ctx: ControlContext, message: ControlMessage) -> None:
        """At an operator: the first message has come."""

    def next(self, ctx: ControlContext, message: ControlMessage) -> None:
        """At an operator: a message has come, the first included."""

    def complete(self, ctx: ControlContext) -> Any:
        """At an operator: the messages of all inputs have come. Returns its part of the result, or None. Only here
        :attr:`.ControlContext.state` can be reached, and only if the operation is blocking."""

    def dispose(self, ctx: ControlContext) -> None:
        """At an operator, last: release what ``begin`` took. Also called when a handler has failed."""

    def merge(self, one: Any, other: Any) -> Any:
        """Merge two results, or two values that meet on their way; must be associative. Default: dicts are united and
        their common keys merged, lists joined, numbers added."""
        return default_merge(one, other)

    def finish(self, result: Any) -> Any:
        """On the driver, last: takes the merged result, and returns what the caller gets."""
        return result


def default_merge(one: Any, other: Any) -> Any:
    """Merge two results of a control operation without a :meth:`ControlOperation.merge` of its own.

    >>> default_merge({"a": 1, "b": [1]}, {"b": [2], "c": 3})
    {'a': 1, 'b': [1, 2], 'c': 3}
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        united = {key: default_merge(value, other[key]) if key in other else value for key, value in one.items()}
        return {**united, **{key: value for key, value in other.items() if key not in one}}
    if isinstance(one, list) and isinstance(other, list):
        return one + other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    raise TypeError(
        f"results of the types {type(one).__name__} and {type(other).__name__} meet, and only dicts, lists and numbers "
        f"merge by themselves; define merge(one, other)"
    )


@dataclass(frozen=True)
class ControlProgram:
    """A checked control operation: what tasks load, and its limits."""

    name: str
    mode: ControlMode
    operators: tuple[str, ...]
    """The operators with a configuration, where handlers run."""
    blob: Blob
    """A pickled tuple: the operation, and the configurations by operator."""
    time_limit_s: float
    result_limit: int


def checked(operation: Any) -> tuple[ControlMode, float]:
    """The mode and the time limit of a control operation, in seconds; raises if it is not one, or has wrong options."""
    if isinstance(operation, type) and issubclass(operation, ControlOperation):
        raise FunctionError(f"found the class {operation.__name__}; give an instance of it, {operation.__name__}(…)")
    if not isinstance(operation, ControlOperation):
        raise FunctionError(
            f"expected a control operation, found {type(operation).__name__} {operation!r:.80}; subclass "
            f"midstream.ControlOperation"
        )
    name = type(operation).__name__
    modes = [str(mode) for mode in ControlMode]
    if operation.mode not in modes:
        near = closest(str(operation.mode), modes)
        hint = f". Did you mean {near!r}?" if near else ""
        raise FlowError(f"{name}: mode={operation.mode!r} is not one of {', '.join(map(repr, modes))}{hint}")
    limit: Any = operation.result_limit
    if not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit <= LARGEST_LIMIT:
        raise FlowError(f"{name}: result_limit={limit!r} must be a number of bytes from 1 to {LARGEST_LIMIT:,}")
    return ControlMode(operation.mode), duration(operation.time_limit, f"{name}: time_limit") / 1e6


def prepared(operation: Any, graph: Graph) -> ControlProgram:
    """Check a control operation, call its :meth:`~ControlOperation.prepare` and pack it. Runs the user's code, and
    raises :class:`~midstream.errors.FlowError` if anything is wrong, before anything has changed."""
    mode, time_limit_s = checked(operation)
    name = type(operation).__name__
    try:
        found = operation.prepare(graph)
    except (Exception, SystemExit) as error:
        raise FunctionError(f"{name}: prepare raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise FunctionError(
            f"{name}: prepare returned {type(found).__name__} {found!r:.60}; expected a dict of operators and their "
            f"configurations"
        )
    _check_operators(name, found, graph)
    try:
        blob = pack((operation, dict(found)), name)
    except FunctionError as error:
        raise FunctionError(
            f"{name} cannot be sent to workers, because {error.culprit} cannot be pickled. Create it in begin, or keep "
            f"it out of the operation and its configurations",
            culprit=error.culprit,
        ) from error
    return ControlProgram(name, mode, tuple(found), blob, time_limit_s, operation.result_limit)


def _check_operators(name: str, configured: Mapping[Any, Any], graph: Graph) -> None:
    possible = [op.name for op in graph if not op.spec.is_outlet]
    if not configured:
        raise FlowError(f"{name}: prepare names no operator; there are {', '.join(possible)}")
    for operator in configured:
        if operator in possible:
            continue
        if operator in graph:
            raise FlowError(
                f"{name}: handlers cannot run at {operator!r}, a {graph[operator].spec.kind}, which Spark runs outside "
                f"of tasks of the flow; operators with tasks are {', '.join(possible)}"
            )
        near = closest(str(operator), possible)
        hint = f". Did you mean {near!r}?" if near else ""
        raise FlowError(f"{name}: there is no operator {operator!r}; there are {', '.join(possible)}{hint}")
