"""Divisions: which bins share the rows of one bin at a join, and where that is possible. Pure.

A row of a join meets its partners in one task, so a hot key keeps one task busy. In a *divided* bin rows of one side
are spread over several bins, and those of the other side are copied to all of them; so every pair comes out once,
wherever its spread row is. The others lend room: their own keys stay with them. As state is addressed by bin, they
are owned, moved and restored like all bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from midstream.data.hashing import bins_of, hash_columns
from midstream.data.schema import type_name
from midstream.errors import FlowError
from midstream.flow.edits import Divide
from midstream.flow.model import Graph, Port
from midstream.ids import BinId, StageIndex, WireId
from midstream.planner.assignment import Assignment, Assignments, DividedBin
from midstream.planner.stages import Plan

__all__ = ["SIDES", "after_division", "bin_of_key", "divided", "in_words", "require_divisible", "under", "with_wires"]

SIDES = ("left", "right")


def require_divisible(plan: Plan, join: str, spread: str) -> tuple[WireId, WireId]:
    """The wires whose rows are spread and copied. Raises :class:`FlowError` if the bins of this operator cannot be
    divided."""
    what = f"{join!r} cannot be divided"
    if join not in plan.graph:
        raise FlowError(f"{what}: the flow has no operator of that name")
    operator = plan.graph[join]
    if operator.kind != "join":
        raise FlowError(f"{what}: it is a {operator.kind}, and only bins of a join are divided")
    copied = 1 - SIDES.index(spread)
    if copied not in operator.spec.copyable_inputs:
        raise FlowError(
            f"{what}: rows of its {SIDES[copied]} side would be in several tasks, none of which could say that such a "
            f"row has no partner"
            + (
                f"; spread='{SIDES[copied]}' spreads them instead"
                if 1 - copied in operator.spec.copyable_inputs
                else ""
            )
        )
    [stage] = [each for each in plan.stages if join in each.operators]
    if stage.index not in plan.exchanged:
        raise FlowError(f"{what}: it is not behind an exchange")
    wires = []
    for number in (1 - copied, copied):
        port = operator.inputs[number]
        found = [wire for wire in plan.wires if wire.target == stage.index and wire.port == port]
        if not found or found[0].key is None:
            raise FlowError(f"{what}: rows of its {SIDES[number]} side pass another operator behind the exchange")
        if found[0].consumers != (join,) or operator.inputs[0] == operator.inputs[1]:
            others = ", ".join(repr(name) for name in found[0].consumers if name != join) or "its other side"
            raise FlowError(f"{what}: rows of its {SIDES[number]} side also go to {others}, in the same tasks")
        wires.append(found[0].id)
    for name in _behind(plan.graph, join):
        if name in stage.operators and plan.graph[name].spec.is_stateful:
            raise FlowError(
                f"{what}: {name!r} keeps state for its results in the same tasks; a key_by between the two helps"
            )
    return wires[0], wires[1]


def _behind(graph: Graph, operator: str) -> Iterable[str]:
    """All operators that get rows of this one, directly or not."""
    seen: set[str] = set()
    waiting = [operator]
    while waiting:
        name = waiting.pop()
        for op in graph:
            if op.name not in seen and any(port.operator == name for port in op.inputs):
                seen.add(op.name)
                waiting.append(op.name)
    return [op.name for op in graph if op.name in seen]


def bin_of_key(plan: Plan, join: str, key: Mapping[str, Any], bins: int) -> BinId:
    """The bin of a key, by the names of the join's left key columns."""
    operator = plan.graph[join]
    names = operator.spec.keys_by_input[0]
    if set(key) != set(names):
        raise FlowError(f"{join!r} is keyed by ({', '.join(names)}), and the key names ({', '.join(key)})")
    schema = plan.graph.schema_of(Port(operator.inputs[0].operator, operator.inputs[0].branch))
    columns = []
    for name in names:
        kind = schema.field(name).type
        try:
            columns.append(pa.array([str(key[name])]).cast(kind))
        except pa.ArrowException as error:
            raise FlowError(f"{join!r}: the key {name!r} is {type_name(kind)}, not {key[name]!r:.60}") from error
    batch = pa.RecordBatch.from_arrays(columns, list(names))
    return BinId(int(bins_of(hash_columns(batch, names), bins)[0]))


def divided(plan: Plan, before: Assignment, edit: Divide) -> Assignment:
    """The assignment after a division, or after its end, if there is to be one share only."""
    wires = require_divisible(plan, edit.join, edit.spread)
    home = edit.bin if edit.key is None else bin_of_key(plan, edit.join, edit.key, before.bins)
    if home is None or not 0 <= home < before.bins:
        raise FlowError(f"there is no bin {home!r} to divide; the bins are 0 to {before.bins - 1}")
    known = next((each for each in before.divided if each.bins[0] == home), None)
    if edit.into == 1:
        if known is None:
            return before
        left = tuple(each for each in before.divided if each != known)
        return replace(before, divided=left, united=_ended(before, [known]))
    if known is not None:
        if (known.join, len(known.bins), known.spread) == (edit.join, edit.into, edit.spread):
            return before
        raise FlowError(f"bin {home} is divided into {len(known.bins)} already; unite it first, with into=1")
    taken = {number for each in before.divided for number in each.bins}
    if home in taken:
        raise FlowError(f"bin {home} has a share of another bin that is divided; unite that first, or move it")
    bins = [home]
    for offset in range(1, before.partitions):
        owner = (before.owners[home] + offset) % before.partitions
        free = next((n for n, each in enumerate(before.owners) if each == owner and n not in taken), None)
        if free is not None and len(bins) < edit.into:
            bins.append(free)
    if len(bins) < edit.into:
        raise FlowError(
            f"bin {home} cannot be divided into {edit.into}: only {len(bins)} partitions have a bin for it; give the "
            f"stage more partitions first"
        )
    new = DividedBin(edit.join, edit.spread, tuple(bins), wires)
    ended = tuple(each for each in before.united if not set(each.bins) & set(bins))
    return replace(before, divided=(*before.divided, new), united=ended)


def _ended(before: Assignment, ending: Iterable[DividedBin]) -> tuple[DividedBin, ...]:
    ending = tuple(ending)
    bins = {number for each in ending for number in each.bins}
    return (*(each for each in before.united if not set(each.bins) & bins), *ending)


def after_division(now: Assignment, wanted: Assignment) -> Assignment:
    """``wanted`` as what follows ``now``: what is not divided any more is to be put together."""
    ending = [each for each in now.divided if each not in wanted.divided]
    bins = {number for each in wanted.divided for number in each.bins}
    united = tuple(each for each in _ended(now, ending) if not set(each.bins) & bins)
    return replace(wanted, united=united)


def in_words(before: Assignment, after: Assignment) -> list[str]:
    """The bins that are divided or united, for people.

    >>> from midstream.planner.assignment import spread
    >>> now = spread(2, 4)
    >>> in_words(now, replace(now, divided=(DividedBin("orders", "left", (1, 2), (WireId(0), WireId(1))),)))
    ['orders: bin 1 is divided; bin 2 gets a share']
    """
    lines = []
    for each in after.divided:
        if each not in before.divided:
            *firsts, last = map(str, each.bins[1:])
            others = f"bins {', '.join(firsts)} and {last} get" if firsts else f"bin {last} gets"
            lines.append(f"{each.join}: bin {each.home} is divided; {others} a share")
    return lines + [f"{each.join}: bin {each.home} is united" for each in before.divided if each not in after.divided]


def with_wires(plan: Plan, assignments: Assignments) -> dict[StageIndex, Assignment]:
    """The same assignments with the wires that lead to divided bins in this plan. Raises :class:`FlowError` if its
    joins cannot be divided."""
    return {stage: under(plan, each) if each.divided or each.united else each for stage, each in assignments.items()}


def under(plan: Plan, assignment: Assignment) -> Assignment:
    """One assignment with the wires of this plan."""
    try:
        found = tuple(
            replace(each, wires=require_divisible(plan, each.join, each.spread)) for each in assignment.divided
        )
    except FlowError as error:
        names = ", ".join(sorted({repr(each.join) for each in assignment.divided}))
        raise FlowError(
            f"bins of {names} are divided, and could not be after that: {error}. Unite them first, with into=1"
        ) from error
    return replace(assignment, divided=found)
