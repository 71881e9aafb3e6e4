"""Workloads on Spark: the cases of the simulation, over the same recorded streams, against the same oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.workloads import nexmark, word_count
from midstream import MemorySink
from midstream.testing import run_spark
from tests.oracle import multiset
from tests.simulation.test_workloads import CASES

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("q3", "q5", "q6", "q8", "fries_w1", "fries_w3")]


@pytest.mark.parametrize(
    "name", ["word_count of skewed keys", "ysb", "fries_w2, revised", "fries_w4", "fries_w5", *SLOW]
)
def test_a_flow_produces_what_its_oracle_computes(name: str, spark: Any, tmp_path: Path) -> None:
    case = CASES[name]()
    assert len(case.expected) >= 4
    run_spark(case.flow, spark, checkpoint=str(tmp_path / "checkpoint"))
    case.check()


@pytest.mark.slow
def test_a_generator_feeds_a_flow_directly(spark: Any, tmp_path: Path) -> None:
    """Event times begin when the stream does, so the oracle takes the rows from a second sink."""
    streams = nexmark.SMALL.streams(2_000_000, limit=5000, max_rows_per_epoch=1000)
    out, bids = MemorySink(), MemorySink()
    flow = nexmark.flow("q2", streams, out)
    flow.source("seen", streams.bids).sink("seen bids", bids)
    run_spark(flow, spark, checkpoint=str(tmp_path / "checkpoint"))
    assert (len(bids.rows), len(out.rows) > 50) == (streams.bids.total, True)
    assert multiset(out.rows) == multiset(nexmark.oracle("q2", [], [], bids.rows))


def test_running_totals_of_a_generator_end_at_the_sums(spark: Any, tmp_path: Path) -> None:
    """Spark cuts a generator into epochs as it likes; the last totals must be complete."""
    source, out = word_count.words(1_000_000, keys=300, limit=20_000, max_rows_per_epoch=6000), MemorySink()
    run_spark(word_count.flow(source, out), spark, checkpoint=str(tmp_path / "checkpoint"))
    [totals] = word_count.oracle([pa.Table.from_batches(source.rows(0, 20_000, start_us=0))])
    assert multiset(nexmark.latest(out.rows, "key")) == multiset(totals)
