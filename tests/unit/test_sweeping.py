"""Files of state go when no restart can need them, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream import Flow, ListSource, MemorySink, agg
from midstream.runtime.checkpoint import Checkpoint
from midstream.runtime.looking import read_state
from midstream.runtime.standing import Standing
from midstream.testing import Faults, run_local

EPOCHS = 120


def counting(out: MemorySink) -> Flow:
    flow = Flow("counting")
    words = flow.source("words", ListSource([[{"word": w} for w in "abcde"]] * EPOCHS, "word string"))
    words.key_by("by word", "word").aggregate("count", n=agg.count()).sink("out", out)
    return flow


@pytest.mark.long
def test_only_what_the_last_two_epochs_stand_on_is_left(tmp_path: Path) -> None:
    out = MemorySink()
    flow = counting(out)
    # Attempts that die leave files behind that no manifest names; full sweeps find them.
    run_local(flow, checkpoint=str(tmp_path), faults=Faults(crash=0.05, speculate=0.05))

    checkpoint = Checkpoint.of_any_flow(str(tmp_path))
    manifests = [checkpoint.manifest(epoch) for epoch in (EPOCHS - 2, EPOCHS - 1)]  # type: ignore[arg-type]
    needed = {name for manifest in manifests for name in Standing.of(flow.graph, manifest).files()}
    left = set(checkpoint.states.names())
    assert needed <= left
    swept = {name for name in left - needed if int(name.split("/")[1][:10]) < EPOCHS - 21}
    assert swept == set(), "orphans of long ago are gone"
    assert len(left) < EPOCHS
    assert {row["word"]: row["n"] for row in read_state(str(tmp_path), "count").to_pylist()} == dict.fromkeys(
        "abcde", EPOCHS
    )
