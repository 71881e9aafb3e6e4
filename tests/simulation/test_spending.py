"""The example of keyed state, compared with counts made by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from examples.spending import build, payments
from midstream import MemorySink
from midstream.checkpoint.inspection import read_state
from midstream.testing import run_local


def test_the_example_counts_correctly(tmp_path: Any) -> None:
    source = payments(rate=300, users=40, limit=3000, max_rows_per_epoch=700)
    alerts, turnover = MemorySink(), MemorySink()
    run_local(build(source, alerts, turnover), checkpoint=str(tmp_path))
    rows = [row for batch in source.rows(0, 3000, start_us=0) for row in batch.to_pylist()]

    totals: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        totals[row["user"]].append(row["amount"])
    spent = {row["user"]: row for row in read_state(str(tmp_path), "spent").to_pylist()}
    assert {user: (row["n"], row["largest"], row["recent"]) for user, row in spent.items()} == {
        user: (len(amounts), max(amounts), amounts[-3:]) for user, amounts in totals.items()
    }

    watermark = max(row["event_time"] for row in rows).timestamp() - 0.2
    by_second: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows:
        second = int(row["event_time"].timestamp())
        if second + 1 <= watermark:
            by_second[row["merchant"], second] += 1
    assert {(row["merchant"], int(row["window_start"].timestamp())): row["n"] for row in turnover.rows} == by_second
    assert alerts.rows
    assert all(row["payments"] >= 5 for row in alerts.rows)
