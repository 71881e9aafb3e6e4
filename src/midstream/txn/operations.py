"""Dependencies between operations on versions, and chains of operations: the finer-grained half of planning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.txn.dependencies import BatchLayout, Units, offsets_of
from midstream.txn.kernels import compiled
from midstream.txn.prepared_batch import PreparedBatch
from midstream.txn.sort import sorted_by

__all__ = ["Operations", "chains", "operations"]

Array = npt.NDArray[Any]

# ── operations on versions ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Operations:
    """The operations of some transactions: units of one operation each, and the origins of versions.

    ``origins`` is by key slot: the operation that wrote the value before the transaction, or -1 for the table's own
    value. ``older`` is by operation: the previous write to the same key.
    """

    units: Units
    owners: Array
    starts: Array
    origins: Array
    older: Array
    key_of: Array  # by unit: the key whose chain it belongs to
    keys: int


def operations(batch: PreparedBatch, layout: BatchLayout, members: Array, *, waiting: bool) -> Operations:
    """Operations and their dependencies; if ``waiting`` (eager aborts), writes wait for the checks of their
    transaction.
    """
    offsets, total = offsets_of(batch)
    lengths = layout.steps[batch.kinds]
    starts = np.cumsum(lengths) - lengths
    owners = np.repeat(np.arange(len(batch)), lengths)
    origins, older, ids, key_of, before, needed, levels = _plan_operations(
        members,
        batch.kinds,
        batch.bases,
        batch.keys,
        layout.slots,
        layout.table,
        layout.checks,
        layout.steps,
        layout.written,
        layout.reads,
        offsets,
        total,
        starts,
        len(owners),
        waiting,
    )
    units = Units(np.arange(len(ids) + 1), ids, before, needed, levels)
    return Operations(units, owners, starts, origins, older, key_of, total)


@compiled
def _plan_operations(
    members: Any,
    kinds: Any,
    bases: Any,
    keys: Any,
    slots: Any,
    table: Any,
    checks: Any,
    steps: Any,
    written: Any,
    reads: Any,
    offsets: Any,
    total: int,
    starts: Any,
    operations: int,
    waiting: bool,
) -> Any:
    last = np.full(total, -1, np.int64)  # by key: the operation that wrote it last
    unit_of = np.full(operations, -1, np.int64)
    origins = np.full(len(keys), -1, np.int64)
    older = np.full(operations, -1, np.int64)
    count = 0
    room = 0
    for x in range(len(members)):
        kind = kinds[members[x]]
        count += steps[kind]
        room += steps[kind] * (slots[kind] + 1 + checks[kind])
    ids = np.empty(count, np.int64)
    key_of = np.full(count, -1, np.int64)
    before = np.zeros(count + 1, np.int64)
    needed = np.empty(room, np.int64)
    levels = np.zeros(count, np.int64)
    unit = 0
    edges = 0
    for x in range(len(members)):
        i = members[x]
        kind, base = kinds[i], bases[i]
        first = unit
        for slot in range(slots[kind]):
            origins[base + slot] = last[keys[base + slot] + offsets[table[kind, slot]]]
        for step in range(steps[kind]):
            o = starts[i] + step
            unit_of[o] = unit
            ids[unit] = o
            begin = edges
            for y in range(reads.shape[2]):
                slot = reads[kind, step, y]
                if slot < 0:
                    break
                if key_of[unit] < 0:
                    key_of[unit] = keys[base + slot] + offsets[table[kind, slot]]
                if origins[base + slot] >= 0:
                    needed[edges] = unit_of[origins[base + slot]]
                    edges += 1
            slot = written[kind, step]
            if slot >= 0:
                key_of[unit] = keys[base + slot] + offsets[table[kind, slot]]
                older[o] = origins[base + slot]
                if origins[base + slot] >= 0:
                    needed[edges] = unit_of[origins[base + slot]]
                    edges += 1
                if waiting:
                    for check in range(checks[kind]):
                        needed[edges] = first + check
                        edges += 1
            elif key_of[unit] < 0:  # a check that reads nothing
                key_of[unit] = keys[base] + offsets[table[kind, 0]]
            level = 0
            for y in range(begin, edges):
                level = max(level, levels[needed[y]] + 1)
            levels[unit] = level
            unit += 1
            before[unit] = edges
        for step in range(checks[kind], steps[kind]):
            slot = written[kind, step]
            last[keys[base + slot] + offsets[table[kind, slot]]] = starts[i] + step
    return origins, older, ids, key_of, before, needed[:edges], levels


# ── chains ────────────────────────────────────────────────────────────────────────────────────────────────────────


def chains(found: Operations) -> tuple[Units, bool]:
    """All operations on one key as one unit, in order. Chains that wait for each other in a cycle become one unit.

    Also returns whether there was such a cycle.
    """
    units = found.units
    label, count, cyclic = _label_chains(found.key_of, units.before, units.needed, found.keys)
    starts, order = sorted_by(label, count)
    before, needed, levels = _join(starts, order, label, units.before, units.needed)
    return Units(starts, units.members[order], before, needed, levels), bool(cyclic)


@compiled
def _label_chains(key_of: Any, before: Any, needed: Any, keys: int) -> Any:
    """Strongly connected components of the chains (Tarjan, without recursion), numbered in dependency order."""
    size = len(key_of)
    degree = np.zeros(keys + 1, np.int64)
    for unit in range(size):
        for y in range(before[unit], before[unit + 1]):
            if key_of[needed[y]] != key_of[unit]:
                degree[key_of[unit] + 1] += 1
    start = np.cumsum(degree)
    fill = start.copy()
    edge = np.empty(start[-1], np.int64)
    used = np.zeros(keys, np.bool_)
    for unit in range(size):
        used[key_of[unit]] = True
        for y in range(before[unit], before[unit + 1]):
            if key_of[needed[y]] != key_of[unit]:
                edge[fill[key_of[unit]]] = key_of[needed[y]]
                fill[key_of[unit]] += 1
    index = np.full(keys, -1, np.int64)
    low = np.zeros(keys, np.int64)
    position = start[:-1].copy()
    label = np.full(keys, -1, np.int64)
    stack = np.empty(keys, np.int64)
    path = np.empty(keys, np.int64)
    height, depth, time, count = 0, 0, 0, 0
    cyclic = False
    for root in range(keys):
        if index[root] >= 0 or not used[root]:
            continue
        path[0] = root
        depth = 1
        index[root] = low[root] = time
        time += 1
        stack[height] = root
        height += 1
        while depth > 0:
            node = path[depth - 1]
            if position[node] < start[node + 1]:
                other = edge[position[node]]
                position[node] += 1
                if index[other] < 0:
                    index[other] = low[other] = time
                    time += 1
                    stack[height] = other
                    height += 1
                    path[depth] = other
                    depth += 1
                elif label[other] < 0:
                    low[node] = min(low[node], index[other])
                continue
            depth -= 1
            if depth > 0:
                low[path[depth - 1]] = min(low[path[depth - 1]], low[node])
            if low[node] == index[node]:
                if stack[height - 1] != node:
                    cyclic = True
                while True:
                    height -= 1
                    other = stack[height]
                    label[other] = count
                    if other == node:
                        break
                count += 1
    labels = np.empty(size, np.int64)
    for unit in range(size):
        labels[unit] = label[key_of[unit]]
    return labels, count, cyclic


@compiled
def _join(starts: Any, order: Any, label: Any, before: Any, needed: Any) -> Any:
    """Dependencies between groups; repeated neighbours in the list are dropped."""
    count = len(starts) - 1
    joined = np.zeros(count + 1, np.int64)
    edges = np.empty(len(needed), np.int64)
    levels = np.zeros(count, np.int64)
    seen = np.full(count, -1, np.int64)
    size = 0
    for group in range(count):
        level = 0
        for x in range(starts[group], starts[group + 1]):
            for y in range(before[order[x]], before[order[x] + 1]):
                other = label[needed[y]]
                if other != group and seen[other] != group:
                    seen[other] = group
                    edges[size] = other
                    size += 1
                    level = max(level, levels[other] + 1)
        levels[group] = level
        joined[group + 1] = size
    return joined, edges[:size], levels
