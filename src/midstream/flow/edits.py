"""Edits: what a change does to a running job. The edits of a change are made together, as one revision.

========== ============================================ =====================================
edit       gives                                        decided by
========== ============================================ =====================================
`Update`   an operator another function                 :func:`revise`
`Move`     bins of a stage other owners                 :mod:`midstream.planner.reassignment`
`Rescale`  a stage another number of partitions         :mod:`midstream.planner.reassignment`
`Insert`   the flow operators that it did not have      :mod:`midstream.operators.plan_edits`
`Remove`   the flow one operator less                   :mod:`midstream.operators.plan_edits`
`Rewire`   an operator other inputs                     :mod:`midstream.operators.plan_edits`
`Redraw`   the flow the plan that the three stand for   :func:`revise`
`Tune`     the job other values of its knobs            :mod:`midstream.flow.knobs`
========== ============================================ =====================================

:func:`revise` is pure: it turns a graph and edits into a new graph, or raises an error that says what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from midstream.data.ddl import Declared, closest
from midstream.data.schema import parse_ddl
from midstream.errors import FlowError
from midstream.flow.functions import check_callable
from midstream.flow.knobs import KNOBS, require_takers, values_of
from midstream.flow.model import Graph, Operator, port_schema
from midstream.flow.plan_steps import Add, Step, TakeOut, outlined, require_keys
from midstream.flow.spec import InputChange, OnError, Spec
from midstream.flow.validate import check_error_column

__all__ = [
    "Edit",
    "Insert",
    "Move",
    "Redraw",
    "Remove",
    "Rescale",
    "Rewire",
    "Tune",
    "Update",
    "added_by",
    "check_edits",
    "dropped_by",
    "flushed_by",
    "reassignments_in",
    "revise",
    "steps_in",
    "tuned_by",
    "updates_in",
]


@dataclass(frozen=True)
class Edit:
    """One edit of a change; its class is its kind. The edits of a change apply all together or not at all."""


@dataclass(frozen=True)
class Update(Edit):
    """The function that one operator runs after a change.

    :param operator: the name of a map, filter, flat_map, route, process, transact, lookup or transform.
    :param function: the new function, called with the same arguments as the old one; for a lookup, the new table; for a
        transact, the new transactions, in a list if there are several.
    :param migrate: for a process whose new function expects a different layout of its state: ``migrate(key, state)`` is
        called once for each key that has state, before the new function first sees that key.
    :param returns: the columns that the new function returns, in Spark's DDL; default: unchanged.
    :param local: for a transform, the equivalent function of a ``pyarrow.Table``, for the local runtime.

    >>> Update("double", lambda row: {"n": 3 * row["n"]}).operator
    'double'
    """

    operator: str
    function: Any
    migrate: Callable[[Any, Any], None] | None = None
    returns: Declared | None = None
    local: Callable[[pa.Table], pa.Table] | None = None


@dataclass(frozen=True)
class Move(Edit):
    """Other owners for some bins of a stage. All state in a bin moves with it; from the next epoch on.

    :param bins: the new owner, a partition, of each bin that moves; bins that are not named stay.
    :param stage: the name of the stage's ``key_by``, or of an operator that runs in the stage; may be left out if the
        flow has only one stage behind an exchange.

    >>> Move({0: 1, 2: 1}, stage="by user")
    Move(bins={0: 1, 2: 1}, stage='by user')
    """

    bins: Mapping[int, int]
    stage: str | None = None
    __hash__ = None  # type: ignore[assignment]  # a mapping has no hash


@dataclass(frozen=True)
class Rescale(Edit):
    """Another number of partitions for a stage, from the next epoch on; as few bins move as an even spread allows.

    :param partitions: from 1 to the number of bins.
    :param stage: as for :class:`Move`; default: every stage behind an exchange.

    >>> Rescale(8, stage="by user").partitions
    8
    """

    partitions: int
    stage: str | None = None


@dataclass(frozen=True)
class Divide(Edit):
    """Several tasks for a hot key of a join, from the next epoch on: rows of one side are spread over them, those of
    the other are copied to each. All keys of the same bin are divided with it. A goal of :meth:`midstream.Job.migrate`.

    :param join: the name of the join.
    :param key: the hot key, by the names of the left key columns.
    :param bin: the bin instead, as :meth:`midstream.Job.assignment` has it.
    :param into: by how many partitions its rows are shared; 1 unites it.
    :param spread: the side whose rows are spread, ``"left"`` or ``"right"``: that of which there are more. Rows of the
        other side are copied, so it cannot be one whose rows are kept if they have no partner.

    >>> Divide("orders and payments", {"user": "ann"}, into=4).spread
    'left'
    >>> Divide("orders and payments", into=0)
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: Divide: give the key, or the bin, and only one of them
    """

    join: str
    key: Mapping[str, str | int | bool] | None = None
    bin: int | None = None
    into: int = 2
    spread: str = "left"
    __hash__ = None  # type: ignore[assignment]  # a mapping has no hash

    def __post_init__(self) -> None:
        if (self.key is None) == (self.bin is None):
            raise FlowError("Divide: give the key, or the bin, and only one of them")
        if type(self.into) is not int or self.into < 1:
            raise FlowError(f"Divide: into={self.into!r} must be a whole number from 1 on, the number of partitions")
        if self.spread not in ("left", "right"):
            raise FlowError(f"Divide: spread={self.spread!r} must be 'left' or 'right'")
        for name, value in (self.key or {}).items():
            if type(value) not in (str, int, bool):
                raise FlowError(f"Divide: the key {name!r} is {value!r:.60}; give a text, a whole number or the bin")

    @property
    def stage(self) -> str:
        """The stage of the join, by the join's name."""
        return self.join


@dataclass(frozen=True)
class Insert(Edit):
    """Operators that are inserted into a running flow, written as in a script.

    A source can come with it: ``source`` gets the flow, calls :meth:`Flow.source` as a script does, and returns a
    stream, which ``build`` gets behind the others. Spark's query is then handed over between two epochs.

    ``build`` gets the stream of an output and returns the stream that its readers get instead; a function that ends in
    a sink returns nothing, and the readers keep what they read. It may add any operators, also ``key_by`` and
    ``process``. Their state starts empty, or with what an operator of this name and layout left when it was removed.

    :param build: called with one stream for each output in ``after``, and the one of ``source``. It may be called
        several times. With a source it may be left out: its stream itself then goes to ``before``, which are unions.
    :param after: the output to read: the name of an operator, with a branch as ``"split:left"``; a tuple of several for
        a function of several streams.
    :param before: the readers that get the new stream; default: all readers of the output.
    :param between: ``(after, before)`` as a pair: one edge.
    :param state: the initial state of what is inserted: a ``pyarrow.Table``, a pandas or Spark DataFrame, or a list of
        rows; a dict by operator if several keep state. For a ``process`` the key columns and a column ``value``, or
        several columns that make a dict; for an ``aggregate`` rows of the past; for a ``distinct`` keys of the past.
    :param source: a function of the flow that adds a source.

    >>> from midstream import Flow, Insert, ListSource, MemorySink, Update
    >>> from midstream.testing import ChangeAt, run_local
    >>> flow, out = Flow("numbers"), MemorySink()
    >>> flow.source("in", ListSource([[{"n": 1}, {"n": 2}]] * 2, "n bigint")).sink("out", out)
    >>> even = Insert(lambda rows: rows.filter("even", lambda row: row["n"] % 2 == 0), after="in")
    >>> run = run_local(flow, changes=[ChangeAt.of(0, even, scheduler="epoch")])
    >>> out.rows
    [{'n': 1}, {'n': 2}, {'n': 2}]
    """

    build: Callable[..., Any] | None = None
    after: str | tuple[str, ...] | None = None
    before: str | tuple[str, ...] | None = None
    between: tuple[str, str] | None = None
    state: Any = field(default=None, compare=False, repr=False)
    source: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Remove(Edit):
    """An operator that is removed from a running flow; its readers read its input instead.

    Its state is kept under its name for a later operator of that name and layout. Unions that read a removed source do
    without it; how far it was read is kept under its name, and a later source of that name continues from there.

    :param flush: for windows, outer joins and processes with timers: in the last epoch before the removal, close
        everything open, whatever the watermark, and emit it in the old plan. Default: it stays in the kept state.

    >>> Remove("even").operator
    'even'
    """

    operator: str
    flush: bool = False


@dataclass(frozen=True)
class Rewire(Edit):
    """Other inputs for an operator of a running flow.

    :param operator: the operator that gets other inputs.
    :param to: the output to read, as in :class:`Insert`; for a union a tuple with all of its inputs.
    :param input: which input of a join, 0 for the left or 1 for the right one.

    >>> Rewire("alerts", to="split:left").to
    'split:left'
    """

    operator: str
    to: str | tuple[str, ...]
    input: int | None = None


@dataclass(frozen=True, init=False)
class Tune(Edit):
    """Other values for a job's knobs, from the next epoch on; ``pace`` at once.

    ``pace`` and ``slice`` are lengths of time, ``frame``, ``held_output`` and ``batch`` sizes, ``rows_per_epoch`` and
    ``key_sample`` numbers of rows; ``None`` is the default. They never decide which rows leave, only when.

    >>> Tune(pace="500 ms", frame="1 MiB").knobs
    {'pace': 500000, 'frame': 1048576}
    """

    knobs: Mapping[str, int | None]
    """The values in microseconds, bytes or rows."""
    __hash__ = None  # type: ignore[assignment]  # a mapping has no hash

    def __init__(self, **knobs: str | int | None) -> None:
        if not knobs:
            raise FlowError(f"Tune sets no knob; knobs: {', '.join(KNOBS)}, e.g. Tune(pace='500 ms')")
        object.__setattr__(self, "knobs", values_of(knobs))

    def __repr__(self) -> str:
        return f"Tune({', '.join(f'{name}={value!r}' for name, value in self.knobs.items())})"


@dataclass(frozen=True)
class Redraw(Edit):
    """The steps that the inserts, removals and rewirings of a change stand for, taken together."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"plan: {', '.join(map(str, self.steps))}"


Reassignment = Move | Rescale | Divide
"""An edit that changes which partition owns which bin, and nothing else."""


def check_edits(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits of a change; raises :class:`FlowError` if there is none, or one of an unknown kind.

    >>> check_edits(["FM"])
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: a change is made of edits, found str 'FM'; allowed: Update, Insert, Remove, Rewire, M...
    """
    known = tuple(edits)
    for edit in known:
        if type(edit) is Edit or not isinstance(edit, Edit):
            raise FlowError(
                f"a change is made of edits, found {type(edit).__name__} {edit!r:.60}; allowed: Update, Insert, "
                f"Remove, Rewire, Move, Rescale and Tune, e.g. Update('FM', function)"
            )
        if isinstance(edit, Divide):
            raise FlowError(f"bins of {edit.join!r} are divided by job.migrate(Divide(…)), not by a change")
    if not known:
        raise FlowError("a change needs at least one edit, e.g. job.update(Update('FM', new_function))")
    return known


def updates_in(edits: Iterable[Edit]) -> tuple[Update, ...]:
    """Those edits that give an operator another function."""
    return tuple(edit for edit in edits if isinstance(edit, Update))


def reassignments_in(edits: Iterable[Edit]) -> tuple[Reassignment, ...]:
    """Those edits that change the owners of bins, in order."""
    return tuple(edit for edit in edits if isinstance(edit, Move | Rescale))


def steps_in(edits: Iterable[Edit]) -> tuple[Step, ...]:
    """The steps of a change of the plan, in order."""
    return tuple(step for edit in edits if isinstance(edit, Redraw) for step in edit.steps)


def tuned_by(edits: Iterable[Edit]) -> dict[str, int | None]:
    """The knobs that a change sets; None for one that gets its default. Raises if two edits set the same one."""
    found: dict[str, int | None] = {}
    for edit in edits:
        if isinstance(edit, Tune):
            if twice := sorted(found.keys() & edit.knobs.keys()):
                raise FlowError(f"knob {twice[0]} is tuned twice in one change; give it one value")
            found |= edit.knobs
    return found


def added_by(edits: Iterable[Edit]) -> tuple[str, ...]:
    """The operators that a change adds."""
    return tuple(step.operator.name for step in steps_in(edits) if isinstance(step, Add))


def flushed_by(edits: Iterable[Edit]) -> tuple[str, ...]:
    """The operators that emit all they hold before a change drops them."""
    return tuple(step.name for step in steps_in(edits) if isinstance(step, TakeOut) and step.flush)


def dropped_by(edits: Iterable[Edit]) -> tuple[str, ...]:
    """The operators that a change drops."""
    return tuple(step.name for step in steps_in(edits) if isinstance(step, TakeOut))


def revise(graph: Graph, edits: Sequence[Edit]) -> Graph:
    """The graph after a change. Raises :class:`FlowError` when the change does not fit the graph.

    An operator that is not updated keeps its function, so its inputs must still have all the columns they had when the
    operator got that function; they may have more. A join keeps whole rows in state, so its inputs may not change at
    all. Steps of the plan come first: an update may be of an operator that they add. Knobs are checked, too.
    """
    require_takers(graph, tuned_by(edits))
    steps = steps_in(edits)
    outline = outlined(graph, steps) if steps else graph
    wanted = _by_operator(outline, updates_in(edits))
    if not wanted and not steps:
        return graph
    require_keys(outline)
    added = set(added_by(edits))
    revised: dict[str, Operator] = {}
    payloads = dict(outline.payloads)
    written_for: dict[str, tuple[pa.Schema, ...]] = {}
    for op in outline:
        spec = op.spec
        if (update := wanted.get(op.name)) is not None:
            spec, payloads[op.name] = _updated(op, update)
        inputs = [port_schema(revised, port) for port in op.inputs]
        is_old = op.name in graph and op.name not in added
        before = [graph.schema_of(port) for port in graph[op.name].inputs] if is_old else outline.written_for[op.name]
        needed = outline.written_for.get(op.name, before)
        if len(inputs) == len(before):  # a union takes any number
            _check_inputs(op, before, inputs, None if update is not None else needed)
        if update is None and inputs != list(needed):
            written_for[op.name] = tuple(needed)
        if op.on_error is OnError.BRANCH:
            for takes in inputs:
                check_error_column(takes, f"after the change {op.kind} {op.name!r}")
        schema = op.schema
        if update is not None and update.returns is not None:
            schema = parse_ddl(update.returns)
        else:
            spec, schema = spec.derived(inputs, schema, payloads.get(op.name), f"{op.kind} {op.name!r}")
        revised[op.name] = replace(op, spec=spec, schema=schema)
    return Graph(graph.name, tuple(revised.values()), payloads, written_for)


def _by_operator(graph: Graph, updates: Iterable[Update]) -> dict[str, Update]:
    wanted: dict[str, Update] = {}
    for update in updates:
        if update.operator not in graph:
            names = [op.name for op in graph if op.spec.is_updatable]
            near = closest(str(update.operator), names)
            raise FlowError(
                f"flow {graph.name!r} has no operator {update.operator!r}"
                + (f"; did you mean {near!r}?" if near else ".")
                + f" Operators that can be updated: {', '.join(names) or 'none'}"
            )
        if update.operator in wanted:
            raise FlowError(
                f"operator {update.operator!r} is updated twice in one change; give one Update for each operator"
            )
        wanted[update.operator] = update
    return wanted


def _updated(op: Operator, update: Update) -> tuple[Spec, Any]:
    """The operator's description and payload after an update."""
    what = f"update of {op.kind} {op.name!r}"
    spec = op.spec
    if update.migrate is not None:
        if not spec.keeps_user_state:
            raise FlowError(f"{what}: migrate= is for the state of a process; a {op.kind} has no user-defined state")
        check_callable(update.migrate, op.name, "a key", "its state")
    if update.returns is not None and not spec.declares_columns:
        raise FlowError(f"{what}: the columns of a {op.kind} follow from its input; leave out returns=")
    if update.local is not None and not spec.divides:
        raise FlowError(f"{what}: local= is for transforms; the local runtime runs a {op.kind}'s function as it is")
    return spec.replaced(update.function, update.local, op.name, what)


def _check_inputs(
    op: Operator, before: Sequence[pa.Schema], after: Sequence[pa.Schema], written_for: Sequence[pa.Schema] | None
) -> None:
    """Raise :class:`SchemaError` if an operator cannot take its inputs after the change.

    ``written_for`` are the columns that its function was written for; None if the change replaces the function.
    """
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if not new.equals(old):
            made_for = None if written_for is None else written_for[i]
            op.spec.check_input(InputChange(op.name, op.kind, old, new, made_for))
