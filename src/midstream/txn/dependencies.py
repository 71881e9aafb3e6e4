"""Dependency graphs of transactions, components and partitions: what must wait for what within a batch.

All kernels work on ``members``, positions of transactions in order (see :mod:`.prepared_batch`), so that a batch can be
planned in parts. Key numbers are made unique across tables by adding the table's offset.

Temporal dependencies (TD): the previous access to the same key. Parametric (PD): the write whose value an operation
needs from another key. Logical (LD): the checks of the same transaction. A key that is computed at run time may be any
key of its table, so such a transaction waits for all that touch the table, and they for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.txn.kernels import compiled
from midstream.txn.prepared_batch import PreparedBatch
from midstream.txn.program import Program
from midstream.txn.sort import sorted_by

__all__ = ["BatchLayout", "Units", "components", "offsets_of", "partitions", "transactions"]

Array = npt.NDArray[Any]

CALL = 100
"""Cost of a user's function relative to arithmetic: a guess, used only to distribute the measured cost."""


@dataclass(frozen=True)
class BatchLayout:
    """A program's structure as arrays for the kernels: by type, and by type and key slot or step."""

    slots: Array
    flags: Array
    table: Array
    checks: Array
    steps: Array
    written: Array  # key slot that a step writes, -1 for a check
    reads: Array  # key slots that a step reads, by type and step, padded with -1
    windows: Array
    late: Array  # by table: whether any of its keys is computed at run time
    work: Array  # by type and step: relative amount of work

    @staticmethod
    def of(program: Program) -> BatchLayout:
        """The layout of a program."""
        kinds = len(program.types)
        widest = max(len(kind.slots) for kind in program.types)
        longest = max(1, *(len(steps) for steps in program.operations), 1)
        flags = np.zeros((kinds, widest), np.int64)
        table = np.zeros((kinds, widest), np.int64)
        written = np.full((kinds, longest), -1, np.int64)
        reads = np.full((kinds, longest, widest), -1, np.int64)
        work = np.zeros((kinds, longest))
        for kind in range(kinds):
            for slot, flag in enumerate(program.flags[kind]):
                flags[kind, slot] = flag
                table[kind, slot] = program.table_numbers[kind][slot]
            for step, operation in enumerate(program.operations[kind]):
                written[kind, step] = operation.slot
                reads[kind, step, : len(operation.reads)] = operation.reads
                work[kind, step] = 1 + CALL * program.calls(kind, operation)
        return BatchLayout(
            slots=np.array([len(kind.slots) for kind in program.types], np.int64),
            flags=flags,
            table=table,
            checks=np.array([len(kind.requires) for kind in program.types], np.int64),
            steps=np.array([len(steps) for steps in program.operations], np.int64),
            written=written,
            reads=reads,
            windows=np.array([len(kind.windows) > 0 for kind in program.types], np.int64),
            late=np.array([number in program.late_tables for number in range(len(program.tables))], np.bool_),
            work=work,
        )


@dataclass(frozen=True)
class Units:
    """Units of work and their dependencies.

    Unit u is ``members[starts[u]:starts[u + 1]]`` and needs the units ``needed[before[u]:before[u + 1]]``. Its level is
    the length of the longest path to it. A unit's dependencies have smaller numbers.
    """

    starts: Array
    members: Array
    before: Array
    needed: Array
    levels: Array

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def depth(self) -> int:
        """The number of strata."""
        return int(self.levels.max()) + 1 if len(self.levels) else 0

    @cached_property
    def strata(self) -> tuple[Array, Array]:
        """Units by level: the start of each stratum, and the units stratum by stratum."""
        starts, order = sorted_by(self.levels, self.depth)
        return starts, order

    @cached_property
    def dependents(self) -> tuple[Array, Array, Array]:
        """The reverse graph: the units that wait for each unit; and how many units each waits for."""
        after, dependents = _reversed(self.before, self.needed, len(self))
        return after, dependents, np.diff(self.before)


# ── whole transactions ────────────────────────────────────────────────────────────────────────────────────────────


def transactions(batch: PreparedBatch, layout: BatchLayout, members: Array) -> Units:
    """Transactions that run in place: a write waits for earlier readers and the last writer, a read for the last
    writer.
    """
    offsets, total = offsets_of(batch)
    room = int(layout.slots[batch.kinds[members]].sum()) * 4 + len(members)
    before, needed, levels = _plan_transactions(
        members,
        batch.kinds,
        batch.bases,
        batch.keys,
        layout.slots,
        layout.flags,
        layout.table,
        layout.late,
        offsets,
        total,
        room,
    )
    return Units(np.arange(len(members) + 1), members, before, needed, levels)


def partitions(batch: PreparedBatch, layout: BatchLayout, members: Array, count: int) -> tuple[Units, Array]:
    """Transactions that wait for the previous one in each partition they touch, and the partition where each runs."""
    before, needed, levels, home = _plan_partitions(
        members, batch.kinds, batch.bases, batch.keys, layout.slots, layout.flags, count
    )
    return Units(np.arange(len(members) + 1), members, before, needed, levels), home


def components(batch: PreparedBatch, layout: BatchLayout, members: Array) -> Units:
    """Transactions that share keys, directly or through others, as one unit; units share no keys."""
    offsets, total = offsets_of(batch)
    labels, count = _label_components(
        members,
        batch.kinds,
        batch.bases,
        batch.keys,
        layout.slots,
        layout.flags,
        layout.table,
        layout.late,
        offsets,
        total,
    )
    starts, order = sorted_by(labels, count)
    none = np.zeros(count, np.int64)
    return Units(starts, members[order], np.zeros(count + 1, np.int64), none[:0], none)


def offsets_of(batch: PreparedBatch) -> tuple[Array, int]:
    """The offset of each table's keys when they are numbered across tables, and the total number."""
    sizes = [len(changed) for changed in batch.changed]
    return np.cumsum([0, *sizes], dtype=np.int64)[:-1], sum(sizes)


@compiled
def _plan_transactions(
    members: Any,
    kinds: Any,
    bases: Any,
    keys: Any,
    slots: Any,
    flags: Any,
    table: Any,
    late: Any,
    offsets: Any,
    total: int,
    room: int,
) -> Any:
    count = len(members)
    writer = np.full(total, -1, np.int64)  # by key: the unit that wrote it last
    reader = np.full(total, -1, np.int64)  # by key: head of the list of units that read it since
    width = flags.shape[1]
    next_reader = np.full(count * width, -1, np.int64)
    fence = np.full(len(late), -1, np.int64)  # by table: the last unit with a late key in it
    user = np.full(len(late), -1, np.int64)  # by table with late keys: head of the list of units that used it since
    next_user = np.full(count * width, -1, np.int64)
    before = np.zeros(count + 1, np.int64)
    needed = np.empty(room, np.int64)
    levels = np.zeros(count, np.int64)
    edges = 0
    for x in range(count):
        i = members[x]
        kind, base = kinds[i], bases[i]
        first = edges
        for slot in range(slots[kind]):
            where = table[kind, slot]
            if late[where]:
                if fence[where] >= 0 and fence[where] != x:
                    needed[edges] = fence[where]
                    edges += 1
                if flags[kind, slot] & 4:
                    entry = user[where]
                    while entry >= 0:
                        if entry // width != x:
                            needed[edges] = entry // width
                            edges += 1
                        entry = next_user[entry]
                    user[where] = -1
                    fence[where] = x
                    continue
                next_user[x * width + slot] = user[where]
                user[where] = x * width + slot
            key = keys[base + slot] + offsets[where]
            if flags[kind, slot] & 2:
                entry = reader[key]
                if (entry < 0 or entry // width == x) and writer[key] >= 0 and writer[key] != x:
                    needed[edges] = writer[key]
                    edges += 1
                while entry >= 0:
                    if entry // width != x:
                        needed[edges] = entry // width
                        edges += 1
                    entry = next_reader[entry]
                reader[key] = -1
                writer[key] = x
            else:
                if writer[key] >= 0 and writer[key] != x:
                    needed[edges] = writer[key]
                    edges += 1
                next_reader[x * width + slot] = reader[key]
                reader[key] = x * width + slot
        level = 0
        for y in range(first, edges):
            level = max(level, levels[needed[y]] + 1)
        levels[x] = level
        before[x + 1] = edges
    return before, needed[:edges], levels


@compiled
def _plan_partitions(members: Any, kinds: Any, bases: Any, keys: Any, slots: Any, flags: Any, parts: int) -> Any:
    count = len(members)
    last = np.full(parts, -1, np.int64)
    before = np.zeros(count + 1, np.int64)
    needed = np.empty(count * parts, np.int64)
    levels = np.zeros(count, np.int64)
    home = np.zeros(count, np.int64)
    touched = np.zeros(parts, np.bool_)
    edges = 0
    for x in range(count):
        i = members[x]
        kind, base = kinds[i], bases[i]
        touched[:] = False
        for slot in range(slots[kind]):
            if flags[kind, slot] & 4:
                touched[:] = True
            else:
                touched[keys[base + slot] % parts] = True
        home[x] = -1
        for part in range(parts):
            if touched[part]:
                if home[x] < 0:
                    home[x] = part
                if last[part] >= 0:
                    needed[edges] = last[part]
                    levels[x] = max(levels[x], levels[last[part]] + 1)
                    edges += 1
                last[part] = x
        before[x + 1] = edges
    return before, needed[:edges], levels, home


@compiled
def _root(parent: Any, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@compiled
def _label_components(
    members: Any,
    kinds: Any,
    bases: Any,
    keys: Any,
    slots: Any,
    flags: Any,
    table: Any,
    late: Any,
    offsets: Any,
    total: int,
) -> Any:
    """Union of the keys that one transaction touches; a table with late keys is a single key. Labels by first
    occurrence.
    """
    parent = np.arange(total + len(late))
    home = np.empty(len(members), np.int64)
    for x in range(len(members)):
        i = members[x]
        kind, base = kinds[i], bases[i]
        first = -1
        for slot in range(slots[kind]):
            where = table[kind, slot]
            node = total + where if late[where] else keys[base + slot] + offsets[where]
            node = _root(parent, node)
            if first < 0:
                first = node
            elif first != node:
                parent[node] = first
        home[x] = first
    label = np.full(total + len(late), -1, np.int64)
    labels = np.empty(len(members), np.int64)
    count = 0
    for x in range(len(members)):
        root = _root(parent, home[x])
        if label[root] < 0:
            label[root] = count
            count += 1
        labels[x] = label[root]
    return labels, count


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@compiled
def _reversed(before: Any, needed: Any, count: int) -> Any:
    after = np.zeros(count + 1, np.int64)
    for y in range(len(needed)):
        after[needed[y] + 1] += 1
    after = np.cumsum(after)
    fill = after.copy()
    dependents = np.empty(len(needed), np.int64)
    for unit in range(count):
        for y in range(before[unit], before[unit + 1]):
            dependents[fill[needed[y]]] = unit
            fill[needed[y]] += 1
    return after, dependents
