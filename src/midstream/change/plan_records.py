"""Between plans and the records of their changes: what was recorded, what it means for a graph, and what undoes it.

Pure but for ``load``, which gets users' objects back from the store. Restarts and reverts use the same rule:
:func:`steps_towards`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from midstream.change.configuration import Configuration
from midstream.checkpoint.change_records import (
    NOT_STORED,
    ChangeRecord,
    InsertRecord,
    PlanRecord,
    RemoveRecord,
    RewireRecord,
)
from midstream.data.schema import parse_ddl, to_ddl
from midstream.flow.graph_format import CODEC
from midstream.flow.model import Graph, Operator, Port
from midstream.flow.plan_steps import Add, Connect, Step, TakeOut
from midstream.ids import Digest
from midstream.planner.merged_flow import difference_of

__all__ = [
    "Load",
    "described_operator",
    "is_same_operator",
    "loaded_payload",
    "plan_records",
    "steps_towards",
    "undone_plan",
]

Load = Callable[[Operator, Digest], Any]
"""The user's object of an operator, from the digest of its blob."""

_WHAT = "an operator in the record of a change"


def plan_records(
    before: Configuration,
    after: Configuration,
    replaced: Collection[str],
    sources: Mapping[str, tuple[str, str]],
    flushed: Collection[str] = (),
    states: Mapping[str, Digest] | None = None,
) -> tuple[PlanRecord, ...]:
    """The records of a change of the plan. ``sources`` has the label and the text of the functions of new operators."""
    difference = difference_of(before.graph, after.graph, replaced)
    found: list[PlanRecord] = []
    for name in (*difference.replaced, *difference.removed):
        op = before.graph[name]
        function, takes = before.blobs.get(name, NOT_STORED), _takes(before.graph, op)
        found.append(RemoveRecord(name, _encoded(op), function, takes, name in flushed))
    for op in after.graph:
        if op.name in (*difference.replaced, *difference.added):
            label, source = sources.get(op.name, (op.kind, ""))
            function = after.blobs.get(op.name, NOT_STORED)
            state = (states or {}).get(op.name)
            found.append(InsertRecord(op.name, _encoded(op), function, _takes(after.graph, op), label, source, state))
    for name in difference.rewired:
        inputs = [tuple(map(str, graph[name].inputs)) for graph in (before.graph, after.graph)]
        found.append(RewireRecord(name, *inputs))
    return tuple(found)


def _encoded(op: Operator) -> dict[str, Any]:
    encoded: dict[str, Any] = CODEC.encode(op, Operator)
    return encoded


def _takes(graph: Graph, op: Operator) -> tuple[str, ...]:
    return tuple(to_ddl(schema) for schema in graph.written_for.get(op.name, [graph.schema_of(p) for p in op.inputs]))


def described_operator(record: InsertRecord | RemoveRecord) -> Operator:
    """The operator that a record describes."""
    op: Operator = CODEC.decode(record.described, Operator, _WHAT)
    return op


def _port(text: str) -> Port:
    name, _, branch = text.partition("[")
    return Port(name, branch.removesuffix("]"))


def loaded_payload(op: Operator, data: bytes) -> Any:
    """What an operator runs, or a sink's target, from its blob. Raises whatever the user's modules raise."""
    if op.delivery is not None:
        return pickle.loads(data)
    loaded = op.spec.loaded(data)
    return (loaded, None) if op.spec.divides else loaded


def steps_towards(graph: Graph, edits: Iterable[PlanRecord], load: Load) -> tuple[Step, ...]:
    """The steps that make those edits of the plan that a graph does not have yet.

    ``graph`` may be from before the edits, from after them, or from between: a script into which some have been put.
    The newest edit of each operator counts. Inputs that no edit knows are the script's own, and stay.
    """
    last: dict[str, InsertRecord | RemoveRecord] = {}
    given: dict[str, list[tuple[Port, ...]]] = {}
    """By operator: all inputs that it has had."""
    gone: dict[str, list[dict[str, Any]]] = {}
    for edit in edits:
        match edit:
            case RewireRecord(operator=name, before=before, after=after):
                chain = given.setdefault(name, [tuple(map(_port, before))])
                chain.append(tuple(map(_port, after)))
            case InsertRecord():
                last[edit.operator] = edit
                given.setdefault(edit.operator, []).append(described_operator(edit).inputs)
            case RemoveRecord():
                last[edit.operator] = edit
                gone.setdefault(edit.operator, []).append(_kind_of(described_operator(edit)))
    steps: list[Step] = []
    for name, edit in last.items():
        is_there = name in graph
        if isinstance(edit, RemoveRecord):
            if is_there:
                steps.append(TakeOut(name, edit.flush))
            given.pop(name, None)
            continue
        op = described_operator(edit)
        if is_there:
            mine = _kind_of(graph[name])
            if mine == _kind_of(op) or mine not in gone.get(name, []):
                continue  # the script has it, or one of its own
            steps.append(TakeOut(name))
        inputs = given.pop(name)[-1]
        takes = tuple(map(parse_ddl, edit.takes))
        payload = None if edit.function == NOT_STORED else load(op, edit.function)
        steps.append(Add(replace(op, inputs=inputs), takes, payload))
    for name, chain in given.items():
        if name in graph and graph[name].inputs in chain[:-1] and graph[name].inputs != chain[-1]:
            steps.append(Connect(name, chain[-1]))
    return tuple(steps)


def is_same_operator(op: Operator, record: InsertRecord | RemoveRecord) -> bool:
    """Whether an operator is of the kind and description that a record has."""
    return _kind_of(op) == _kind_of(described_operator(record))


def _kind_of(op: Operator) -> dict[str, Any]:
    """An operator without the parts that a change may alter."""
    return {"kind": op.kind, "spec": CODEC.encode(op.spec, type(op.spec)), "on_error": op.on_error}


def undone_plan(records: Sequence[ChangeRecord]) -> tuple[PlanRecord, ...]:
    """The edits that undo the plan's changes, given oldest first; each operator comes back as it was at that time."""
    found: list[PlanRecord] = []
    functions: dict[str, tuple[Digest, str | None]] = {}
    for record in reversed(records):
        for update in record.updates:
            functions[update.operator] = (update.before, update.returned)
        for edit in reversed(record.plan_edits):
            match edit:
                case InsertRecord():
                    found.append(RemoveRecord(edit.operator, edit.described, edit.function, edit.takes))
                    functions.pop(edit.operator, None)
                case RemoveRecord():
                    found.append(InsertRecord(edit.operator, edit.described, edit.function, edit.takes, "as it was"))
                    functions[edit.operator] = (edit.function, None)
                case RewireRecord(operator=name, before=before, after=after):
                    found.append(RewireRecord(name, after, before))
    return tuple(_as_it_was(edit, functions) for edit in _net(found))


def _net(edits: Iterable[PlanRecord]) -> list[PlanRecord]:
    """The fewest edits with the same result: operators that came and went again are left out."""
    ends: dict[str, list[InsertRecord | RemoveRecord]] = {}
    chains: dict[str, list[tuple[str, ...]]] = {}
    for edit in edits:
        if isinstance(edit, RewireRecord):
            chains.setdefault(edit.operator, [edit.before]).append(edit.after)
        else:
            ends.setdefault(edit.operator, []).append(edit)
            chains.setdefault(edit.operator, []).append(tuple(map(str, described_operator(edit).inputs)))
    found: list[PlanRecord] = []
    for name, changes in ends.items():
        first, last = changes[0], changes[-1]
        was_there, is_there = isinstance(first, RemoveRecord), isinstance(last, InsertRecord)
        if was_there and is_there and _kind_of(described_operator(first)) == _kind_of(described_operator(last)):
            continue  # only its inputs may differ
        found += [first] if was_there else []
        found += [last] if is_there else []
        inputs, own = chains.pop(name)[-1], tuple(map(str, described_operator(last).inputs))
        if is_there and inputs != own:
            found.append(RewireRecord(name, own, inputs))
    return found + [RewireRecord(name, one[0], one[-1]) for name, one in chains.items() if one[0] != one[-1]]


def _as_it_was(edit: PlanRecord, functions: Mapping[str, tuple[Digest, str | None]]) -> PlanRecord:
    """An operator that was updated before it was removed comes back with the function from before the update."""
    if not isinstance(edit, InsertRecord) or edit.operator not in functions:
        return edit
    function, returned = functions[edit.operator]
    described = edit.described if returned is None else {**edit.described, "schema": returned}
    return InsertRecord(edit.operator, described, function, edit.takes, edit.label, edit.source)
