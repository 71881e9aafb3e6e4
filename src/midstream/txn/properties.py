"""Measured properties of a batch, on which the choice of a strategy is based."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.txn.dependencies import BatchLayout, Units, offsets_of
from midstream.txn.kernels import compiled
from midstream.txn.prepared_batch import PreparedBatch

__all__ = ["Properties", "measure"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Properties:
    """Properties of a batch, or of a group in it. Times are in seconds."""

    transactions: int
    operations: int
    cost: float  # of one transaction alone
    abort_ratio: float
    temporal: int  # accesses that wait for an earlier access to the same key
    parametric: int  # values from other keys that an operation waits for
    logical: int  # operations beyond the first of their transaction
    skew: float  # accesses to the most popular key, as a multiple of the average
    depth: int  # number of strata of whole transactions


def measure(
    batch: PreparedBatch, layout: BatchLayout, members: Array, units: Units, *, cost: float, abort_ratio: float
) -> Properties:
    """Measure some transactions, given their whole-transaction units."""
    offsets, total = offsets_of(batch)
    temporal, parametric, busiest, keys, accesses = _count(
        members, batch.kinds, batch.bases, batch.keys, layout.slots, layout.flags, layout.table, layout.steps,
        layout.written, layout.reads, offsets, total,
    )  # fmt: skip
    steps = layout.steps[batch.kinds[members]]
    return Properties(
        transactions=len(members),
        operations=int(steps.sum()),
        cost=cost,
        abort_ratio=abort_ratio,
        temporal=int(temporal),
        parametric=int(parametric),
        logical=int(np.maximum(steps - 1, 0).sum()),
        skew=float(busiest * keys / accesses) if accesses else 1.0,
        depth=units.depth,
    )


@compiled
def _count(
    members: Any, kinds: Any, bases: Any, keys: Any, slots: Any, flags: Any, table: Any, steps: Any, written: Any,
    reads: Any, offsets: Any, total: int,
) -> Any:  # fmt: skip
    uses = np.zeros(total, np.int64)
    temporal = parametric = busiest = distinct = accesses = 0
    for x in range(len(members)):
        i = members[x]
        kind, base = kinds[i], bases[i]
        for step in range(steps[kind]):
            for y in range(reads.shape[2]):
                slot = reads[kind, step, y]
                if slot < 0:
                    break
                known = keys[base + slot] >= 0
                if slot != written[kind, step] and known and uses[keys[base + slot] + offsets[table[kind, slot]]] > 0:
                    parametric += 1
        for slot in range(slots[kind]):
            if keys[base + slot] < 0:
                continue
            key = keys[base + slot] + offsets[table[kind, slot]]
            temporal += 1 if uses[key] > 0 else 0
            distinct += 1 if uses[key] == 0 else 0
            uses[key] += 1
            accesses += 1
            busiest = max(busiest, uses[key])
    return temporal, parametric, busiest, distinct, accesses
