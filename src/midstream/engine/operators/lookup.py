"""lookup: each row with its matches in a static table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from midstream.engine.bad_rows import Aside, Screen
from midstream.engine.operators.base import ONLY, OperatorStep
from midstream.engine.resources import LookupTable
from midstream.flow.model import How, Lookup, Operator


def lookup_step(operator: Operator, spec: Lookup, table: LookupTable) -> OperatorStep:
    """The step of a lookup. Output rows keep the order of the stream's rows, then that of the table."""
    mine = tuple(stream for stream, _ in spec.on)

    screen = Screen(Aside(operator), keys=mine, max_key=None)

    def step(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        batch, aside = screen(batch)
        left, right = table.index.probe(batch, mine)
        if spec.how is How.LEFT:
            left, right = _keep_unmatched(batch.num_rows, left, right)
        whole = len(left) == batch.num_rows and bool((left == np.arange(len(left))).all())
        kept = batch if whole else batch.take(pa.array(left))
        matches = pa.array(right, mask=right < 0)  # a null index takes a null
        added = [column.combine_chunks().take(matches) for column in table.added.columns]
        return {ONLY: pa.RecordBatch.from_arrays([*kept.columns, *added], schema=operator.schema), **aside}

    return step


def _keep_unmatched(
    rows: int, left: np.ndarray[tuple[int], np.dtype[np.int64]], right: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Add every row that matched nothing, paired with -1, where its matches would have been."""
    missing = np.setdiff1d(np.arange(rows), left)
    left = np.concatenate([left, missing])
    right = np.concatenate([right, np.full(len(missing), -1)])
    order = np.argsort(left, kind="stable")
    return left[order], right[order]
