"""What is measured of bins in a job: rows, work, keys and bytes, against the checkpoint's contents."""

from __future__ import annotations

import numpy as np
import pytest

from midstream import Flow, ListSource, MemorySink, agg
from midstream.data.hashing import bins_of, hash_columns
from midstream.data.rows import from_rows
from midstream.ids import Epoch, StageIndex
from midstream.runtime.local.data import source_epochs
from midstream.runtime.local.runtime import runtime_of
from midstream.state.contents import contents

EPOCHS = [[{"k": k % 37, "n": n} for k in range(100 * (n + 1))] for n in range(6)]
STAGE = StageIndex(1)


def flow_of(kind: str) -> Flow:
    flow = Flow("measured")
    rows = flow.source("rows", ListSource(EPOCHS, "k bigint, n bigint", partitions=2)).key_by("by_k", "k")
    if kind == "process":
        rows.process("work", lambda key, row, state: state.set(row["n"]), returns="k bigint").sink("out", MemorySink())
    else:
        rows.aggregate("work", count=agg.count()).sink("out", MemorySink())
    return flow


@pytest.mark.parametrize("kind", ["process", "aggregate"])
@pytest.mark.parametrize("bins", [16, 256, 4096])
def test_weights_are_those_of_the_rows_and_files_of_a_job(kind, bins):
    graph = flow_of(kind).graph
    with runtime_of(graph, partitions=3, bins=bins) as runtime:
        for number, rows in enumerate(source_epochs(graph)):
            runtime.run_epoch(Epoch(number), rows, closing=False)
        measures = runtime._driver.measures
        checkpoint = runtime.checkpoint
        committed = runtime._driver.committed
        assert committed is not None
        lineage = committed.lineages["work"]
        stored = contents(checkpoint.states, lineage)
    weights = measures.weights[STAGE]
    newest = from_rows(EPOCHS[-1], graph["rows"].schema, "rows")
    touched = set(bins_of(hash_columns(newest, ["k"]), bins).tolist())
    assert set(np.flatnonzero(weights.rows_per_s).tolist()) == touched
    assert set(np.flatnonzero(weights.keys).tolist()) == touched == set(lineage.bins())
    stored_in = checkpoint.states.space.bins_of_stored(stored["key"].combine_chunks())
    assert (weights.keys >= np.bincount(stored_in, minlength=bins)).all()
    total = sum(len(rows) for rows in EPOCHS)
    # Epochs are so short that the older ones count almost as much.
    assert weights.rows_per_s.sum() * weights.seconds == pytest.approx(total, rel=0.2)
    pairs = zip(stored["key"].to_pylist(), stored["value"].to_pylist(), strict=True)
    assert weights.nbytes.sum() >= sum(len(key) + len(value) for key, value in pairs)
    assert weights.busy.sum() > 0
