"""Prepares a change from edits. All mistakes are found here, before anything is sent."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from midstream.change.configuration import Configuration, state_kept
from midstream.change.initial_state import initial_states, require_no_other_state
from midstream.change.knob_records import after_tuning, described_knobs, tune_record
from midstream.change.plan_records import plan_records
from midstream.change.plan_wait import described_plan, plan_that_waits
from midstream.checkpoint.change_records import NOT_STORED, EditRecord, MoveRecord, RescaleRecord, UpdateRecord
from midstream.control.messages import ChangeBegun
from midstream.data.schema import to_ddl
from midstream.errors import FlowError, FunctionError, SchemaError
from midstream.flow.edits import (
    Edit,
    Move,
    Redraw,
    Rescale,
    Tune,
    Update,
    added_by,
    check_edits,
    dropped_by,
    flushed_by,
    reassignments_in,
    revise,
    steps_in,
    tuned_by,
    updates_in,
)
from midstream.flow.functions import label_of, pack
from midstream.flow.inputs import packed_source
from midstream.flow.knobs import in_words
from midstream.flow.model import Graph, Operator
from midstream.flow.plan_steps import Add
from midstream.flow.sinks import MemorySink
from midstream.flow.source_text import source_text
from midstream.flow.transactions import Transaction
from midstream.ids import Digest, Revision, StageIndex
from midstream.operators.plan_edits import resolved
from midstream.planner.assignment import Assignments
from midstream.planner.carried_assignments import carried, under_plan
from midstream.planner.change_plan import ChangePlan, Scheduler, plan_change
from midstream.planner.division import with_wires
from midstream.planner.merged_flow import MergedFlow, merge
from midstream.planner.programs import StateMigration
from midstream.planner.reassignment import reassigned, stage_names
from midstream.planner.stages import Plan, compile_plan
from midstream.storage.blobs import Blob, BlobStore

HAND_OVER = (
    "hands the sources over: after the running epoch Spark's query ends, and another one continues from there with {}; "
    "sources that stay continue where they are"
)

__all__ = ["PreparedChange", "StoredEdits", "apply", "prepare", "scheduler_of", "stage_of", "store_edits"]


@dataclass(frozen=True)
class PreparedChange:
    """A change that fits the job, and whose functions are stored.

    ``waits_for`` is the reason if it takes effect from the next epoch although its plan would not need to wait.
    """

    before: Configuration
    after: Configuration
    plan: ChangePlan
    edits: tuple[EditRecord, ...]
    merged: MergedFlow
    waits_for: str | None = None
    flush: Configuration | None = None
    """The configuration of the one epoch before ``after`` in which operators emit all that they hold; None without
    such."""

    @property
    def first(self) -> Configuration:
        """The configuration of the first epoch that begins under the change."""
        return self.after if self.flush is None else self.flush

    def with_assignments(self, plan: Plan, assignments: Assignments) -> PreparedChange:
        """The same change with other owners of bins, which are those of the stages of ``plan``."""

        def owned(each: Configuration) -> Configuration:
            return each.with_assignments(under_plan(plan, assignments, each.plan, each.assignments))

        flush = None if self.flush is None else owned(self.flush)
        return replace(self, before=owned(self.before), after=owned(self.after), flush=flush)

    @property
    def hands_over(self) -> bool:
        """Whether the sources change, so that the engine's query has to be exchanged before the next epoch."""
        return not self.before.graph.reads_as(self.after.graph)

    @property
    def from_next_epoch(self) -> bool:
        """Whether the running epoch finishes without the change."""
        return self.plan.from_next_epoch or self.waits_for is not None

    @property
    def begun(self) -> ChangeBegun:
        """The event for the coordinator."""
        stages = stage_of(self.after.plan)
        # What the change removes is in no stage any more, and sinks never are.
        followers = [
            name
            for component in self.plan.components
            for name in component.updated
            if name in stages and any(stages[head] != stages[name] for head in component.heads)
        ]
        return ChangeBegun(
            revision=self.after.revision,
            programs=self.after.programs,
            heads=_by_stage(stages, [name for component in self.plan.components for name in component.heads]),
            followers=_by_stage(stages, followers),
            has_side_entrance=self._has_side_entrance(),
            live=tuple(sorted(self.after.digests())),
        )

    def _has_side_entrance(self) -> bool:
        """Whether rows enter a component behind its heads. They do where streams meet, which is not updated itself."""
        graph = self.merged.graph
        return any(
            (port.operator, name) not in component.edges
            for component in self.plan.components
            for name in component.operators
            if name not in component.heads
            for port in graph[name].inputs
        )

    @property
    def _flushed(self) -> tuple[str, ...]:
        return () if self.flush is None else self.flush.flushed

    def describe(self) -> str:
        """The plan, and the reason if it waits."""
        text = self.plan.describe()
        lines = [text, *(f"  {line}" for line in described_plan(self.before, self.after, self.merged, self._flushed))]
        if self.hands_over:
            lines.append(f"  {HAND_OVER.format(', '.join(sorted(self.after.graph.sources)))}")
        lines += [f"  {line}" for line in _described_moves(self.before, self.after)]
        lines += [f"  {line}" for line in described_knobs(self.before.knobs, self.after.knobs)]
        if self.waits_for is not None and not self.plan.from_next_epoch:
            lines.append(f"  but waits for the next epoch: {self.waits_for}")
        return "\n".join(lines)


def scheduler_of(name: str | Scheduler) -> Scheduler:
    """A scheduler by its name."""
    if name not in list(Scheduler):
        raise FlowError(f"scheduler {name!r} is not known; allowed: {', '.join(Scheduler)}")
    return Scheduler(name)


@dataclass(frozen=True)
class StoredEdits:
    """The digests of the functions and migrations in some edits, by operator."""

    functions: Mapping[str, Digest]
    migrations: Mapping[str, Digest]
    states: Mapping[str, Digest] = field(default_factory=dict)
    """The packed initial states, by operator."""


def store_edits(
    current: Configuration,
    edits: Sequence[Edit],
    store: BlobStore,
    *,
    stored: Mapping[str, Digest] | None = None,
    migrates: Mapping[str, Digest] | None = None,
    states: Mapping[str, Digest] | None = None,
) -> StoredEdits:
    """Pack and store the functions, migrations and initial states in edits, unless they are stored already.

    Separate from :func:`prepare` because only this runs the user's code (``__getstate__``, a table's Spark job), which
    may take long. Raises :class:`FlowError` and stores nothing if the edits do not fit.
    """
    checked = resolved(current.graph, check_edits(edits))
    graph, known = revise(current.graph, checked), states or {}
    packed = initial_states(graph, checked, current.bins, known)
    require_no_other_state(current, packed)
    found = _stored(graph, checked, store, stored or {}, migrates or {})
    return replace(found, states={**known, **{name: store.put(blob) for name, blob in packed.items()}})


def apply(
    configuration: Configuration, edits: Sequence[Edit], stored: StoredEdits, revision: Revision
) -> Configuration:
    """The configuration after edits. Pure: their functions are stored already, and nothing else is stored.

    Raises :class:`FlowError` if the edits do not fit.
    """
    edits = resolved(configuration.graph, check_edits(edits))
    return _applied(configuration, revise(configuration.graph, edits), edits, stored, revision)


def _applied(
    configuration: Configuration, graph: Graph, edits: Sequence[Edit], stored: StoredEdits, revision: Revision
) -> Configuration:
    # An operator whose function could not be stored must not keep the digest of its old function.
    added, dropped = added_by(edits), dropped_by(edits)
    others = {name: digest for name, digest in configuration.blobs.items() if name not in {*added, *dropped}}
    blobs = {**others, **stored.functions}
    migrations = dict(configuration.migrations)
    for name, function in stored.migrations.items():
        migrations[name] = (*migrations.get(name, ()), StateMigration(revision, function))
    plan = compile_plan(graph, configuration.plan.numbers)
    assignments = configuration.assignments
    if added or dropped or steps_in(edits):
        assignments = carried(configuration.plan, assignments, plan, configuration.partitions, configuration.bins)
    return replace(
        configuration,
        plan=plan,
        revision=revision,
        assignments=with_wires(plan, reassigned(plan, assignments, reassignments_in(edits))),
        blobs={name: digest for name, digest in blobs.items() if digest != NOT_STORED},
        migrations=migrations,
        kept=state_kept(configuration, graph),
        knobs=after_tuning(configuration.knobs, tuned_by(edits)),
        initial={**configuration.initial, **stored.states},
    )


def prepare(
    current: Configuration,
    edits: Sequence[Edit],
    store: BlobStore,
    *,
    revision: Revision,
    scheduler: Scheduler = Scheduler.FRIES,
    stored: Mapping[str, Digest] | None = None,
    migrates: Mapping[str, Digest] | None = None,
    states: Mapping[str, Digest] | None = None,
) -> PreparedChange:
    """Check a change against the job's configuration, and store its functions and the new configuration.

    ``stored``, ``migrates`` and ``states`` are functions, migrations and initial states that are in the store already,
    by operator (see :func:`store_edits`). Raises :class:`FlowError` and stores nothing if the change does not fit.
    """
    edits = resolved(current.graph, check_edits(edits))
    graph = revise(current.graph, edits)
    tuned = tuned_by(edits)
    is_same = graph == current.graph and graph.reads_as(current.graph)
    if is_same and not (updates_in(edits) or reassignments_in(edits)):
        if not tuned:
            raise FlowError("the change changes nothing: the flow has this plan already")
        if after_tuning(current.knobs, tuned) == current.knobs:
            values = ", ".join(f"{name} is {in_words(name, value)}" for name, value in tuned.items())
            raise FlowError(f"the change changes nothing: {values} already")
    replaced = frozenset(added_by(edits)) & frozenset(dropped_by(edits))
    _require_fitting_state(current, graph)
    merged = merge(current.graph, graph, [update.operator for update in updates_in(edits)], replaced)
    plan = plan_change(merged.graph, merged.changed, scheduler)
    plan_waits = None if not merged.difference else plan_that_waits(current, graph, merged)
    waits_for = plan_waits or _state_that_waits(current.graph, graph)
    if reassignments_in(edits):
        waits_for = waits_for or "bins get other owners, and an epoch's rows have one owner each"
    if tuned:
        waits_for = waits_for or "the tasks of an epoch have the same knobs"
    if not (plan.from_next_epoch or waits_for is not None or scheduler is Scheduler.REPLAY):
        _check_outlets(current.graph, graph)
    flushed = flushed_by(edits)
    if flushed:
        waits_for = "operators emit all that they hold in an epoch of its own"
    kept = store_edits(current, edits, store, stored=stored, migrates=migrates, states=states)
    require_no_other_state(current, kept.states)
    after = _applied(current, graph, edits, kept, revision).store(store)
    sources = {
        step.operator.name: (_described_payload(step.operator, step.payload), _source(step.payload))
        for step in steps_in(edits)
        if isinstance(step, Add)
    }
    records = (
        *(_record(edit, current, after, kept) for edit in edits if not isinstance(edit, Redraw | Tune)),
        *([tune_record(current.knobs, tuned)] if tuned else []),
        *plan_records(current, after, replaced, sources, flushed, kept.states),
    )
    flush = replace(current, revision=revision, flushed=flushed).store(store) if flushed else None
    return PreparedChange(current, after, plan, records, merged, waits_for, flush)


def _require_fitting_state(current: Configuration, graph: Graph) -> None:
    """Refuse an operator that could not read the state kept under its name, or held by the operator that it
    replaces."""
    for name, found in state_kept(current, Graph("", ())).items():
        if name not in graph or not graph[name].spec.is_stateful:
            continue
        op = graph[name]
        layouts = [found.operator.spec.state_layout(found.takes), op.spec.state_layout(_takes(graph, op))]
        if name not in current.graph and layouts[0] != layouts[1]:
            raise FlowError(
                f"the state that {found.operator.kind} {name!r} left when it was removed does not fit the new "
                f"{op.kind} of that name: it was kept by\n  {layouts[0]}\nbut the new one has\n  {layouts[1]}\nGive "
                f"it another name, or drop the state first"
            )


def _described_payload(op: Operator, payload: Any) -> str:
    if payload is None or not op.spec.is_updatable:
        return op.kind
    return f"{op.kind} {_label(payload[0] if op.spec.divides else payload)}"


def _record(edit: Edit, before: Configuration, after: Configuration, stored: StoredEdits) -> EditRecord:
    match edit:
        case Update(operator=name, function=function):
            return UpdateRecord(
                operator=name,
                label=_label(function),
                function=after.blobs.get(name, NOT_STORED),
                source=_source(function),
                before=before.blobs.get(name, NOT_STORED),
                returns=_declared(after.graph[name]),
                returned=_declared(before.graph[name]),
                migrate=stored.migrations.get(name),
                takes=tuple(to_ddl(schema) for schema in _takes(after.graph, after.graph[name])),
            )
        case Move(bins=bins, stage=stage):
            return MoveRecord(dict(bins), stage)
        case Rescale(partitions=partitions, stage=stage):
            return RescaleRecord(partitions, stage)
    raise AssertionError(f"nobody resolved the {type(edit).__name__}")


def _described_moves(before: Configuration, after: Configuration) -> list[str]:
    """A line for each stage whose bins get other owners."""
    names, lines = stage_names(after.plan), []
    if len(before.plan.stages) != len(after.plan.stages):
        return []  # their numbers mean other stages now
    for stage, now in after.assignments.items():
        was = before.assignments.get(stage)
        if was is None or was == now:
            continue
        count = sum(old != new for old, new in zip(was.owners, now.owners, strict=True))
        partitions = "" if was.partitions == now.partitions else f"; {was.partitions} → {now.partitions} partitions"
        lines.append(f"{names[stage]}: {count} of {now.bins} bins move{partitions}")
    return lines


def _declared(op: Operator) -> str | None:
    """The columns of an operator, if the user declares them."""
    return to_ddl(op.schema) if op.spec.declares_columns else None


def _state_that_waits(before: Graph, after: Graph) -> str | None:
    """Why a change must wait for a built-in operator with state, which takes one layout of rows per epoch."""
    for op in before:
        if op.name not in after:
            continue
        has_layout = op.spec.is_stateful and not op.spec.keeps_user_state
        if has_layout and _takes(before, op) != _takes(after, after[op.name]):
            return f"{op.kind} {op.name!r} gets other columns, and can have only one kind of rows in an epoch"
    return None


def _check_outlets(before: Graph, after: Graph) -> None:
    """Refuse new columns for what Spark itself reads within an epoch: its plan is made when the epoch begins."""
    for op in before:
        if op.name in after and op.spec.is_outlet and _takes(before, op) != _takes(after, after[op.name]):
            [found] = _takes(after, after[op.name])
            raise SchemaError(
                f"the change gives {op.kind} {op.name!r} other columns, ({to_ddl(found)}), within an epoch; "
                f"use scheduler='epoch' or 'replay', so that every epoch has rows of one kind"
            )


def _takes(graph: Graph, op: Operator) -> list[Any]:
    return [graph.schema_of(port) for port in op.inputs]


def _stored(
    graph: Graph,
    edits: Sequence[Edit],
    store: BlobStore,
    stored: Mapping[str, Digest],
    migrates: Mapping[str, Digest],
) -> StoredEdits:
    """Pack the functions or tables of updates and of what is inserted, and migrations, then store what is not stored.

    ``graph`` is the one after the change.
    """
    blobs: dict[str, Blob | Digest] = {}
    steps: dict[str, Blob | Digest] = {}
    updates = updates_in(edits)
    for name in added_by(edits):
        packed = stored.get(name) or _packed_payload(graph, name)
        if packed is not None:
            blobs[name] = packed
    for update in updates:
        name, spec = update.operator, graph[update.operator].spec
        if name in stored:
            blobs[name] = stored[name]
        else:
            # A transform may hold DataFrames, which cannot be stored. Then a restart uses the script's function.
            packed = spec.packed(graph.payloads[name], name)
            blobs[name] = NOT_STORED if packed is None else packed
        if update.migrate is not None:
            steps[name] = migrates.get(name) or pack(update.migrate, name)
    return StoredEdits(
        {name: _kept(store, blob) for name, blob in blobs.items()},
        {name: _kept(store, blob) for name, blob in steps.items()},
    )


def _packed_payload(graph: Graph, name: str) -> Blob | None:
    """What an inserted operator runs, or the target of an inserted sink, if it can be stored."""
    op, payload = graph[name], graph.payloads.get(name)
    if op.spec.reads_stream:
        return packed_source(payload, name)
    if op.delivery is None:
        return op.spec.packed(payload, name)
    if isinstance(payload, MemorySink):  # what it holds belongs to this process
        return None
    with contextlib.suppress(FunctionError):
        return pack(payload, name)
    return None


def _kept(store: BlobStore, blob: Blob | Digest) -> Digest:
    return store.put(blob) if isinstance(blob, Blob) else blob


def _label(function: Any) -> str:
    if isinstance(function, Transaction):
        return function.name
    if isinstance(function, str):
        return function
    if isinstance(function, Mapping):
        return ", ".join(f"{value} AS {name}" for name, value in function.items())
    if isinstance(function, list | tuple):
        return ", ".join(_label(one) for one in function)
    return label_of(function) if callable(function) else f"a table of {len(function)} rows"


def _source(function: Any) -> str:
    """The text of a payload's functions; shown in the history."""
    if isinstance(function, list | tuple):
        return "\n".join(_source(one) for one in function)
    return source_text(function.function if isinstance(function, Transaction) else function)


def stage_of(plan: Plan) -> dict[str, StageIndex]:
    """The stage that hosts each operator."""
    return {name: stage.index for stage in plan.stages for name in stage.operators}


def _by_stage(stages: Mapping[str, StageIndex], names: Sequence[str]) -> dict[StageIndex, tuple[str, ...]]:
    found: dict[StageIndex, list[str]] = defaultdict(list)
    for name in names:
        found[stages[name]].append(name)
    return {stage: tuple(those) for stage, those in sorted(found.items())}
