"""State behind operators that keep the key of a key_by, in one stage with them: changes within epochs, and faults."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink, Update, agg
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, run_local
from tests.simulation.changing_check import audited
from tests.simulation.changing_flows import CONSISTENT

pytestmark = pytest.mark.long

Row = dict[str, Any]
BAD_LUCK = Faults(crash=0.05, speculate=0.05, repeat=0.3, give_up=0.002, crash_driver=0.002, lose=0.3, lose_output=0.05)
EPOCHS: list[list[Row]] = [[{"id": 150 * epoch + i, "user": f"u{i % 7}"} for i in range(150)] for epoch in range(3)]
KEPT = [row for epoch in EPOCHS for row in epoch if row["id"] % 5 != 0]


class Count:
    """Numbers the rows of each key, and writes its version on them."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, key: Any, row: Row, state: Any) -> Row:
        state.set(number := state.get(0) + 1)
        return {**row, "mc": self.version, "number": number}


def ran(
    seed: int, scheduler: str, updates: list[Update], folder: Path, faults: Faults
) -> tuple[LocalRun, list[Row], list[Row]]:
    flow, out, totals = Flow("kept"), MemorySink(), MemorySink()
    rows = flow.source("in", ListSource(EPOCHS, "id bigint, user string", partitions=3))
    keyed = rows.key_by("by_user", "user").where("some", "id % 5 <> 0").rename("names", {"user": "who"})
    versioned = keyed.with_columns("FM", fm=1).map("add", lambda row: {**row, "one": 1}, adds="one int")
    counted = versioned.process(
        "MC", Count(1), returns="id bigint, who string, fm int, one int, mc int, number int", one_to_one=True
    )
    counted.sink("out", out)
    versioned.aggregate("totals", n=agg.count(), fm=agg.sum("fm")).sink("totals_out", totals)
    change = ChangeAt.of(0, *updates, scheduler=scheduler)
    run = run_local(
        flow,
        seed=seed,
        changes=[change],
        audit="id",
        clock=ManualClock(),
        faults=faults,
        checkpoint=str(folder / str(seed)),
    )
    return run, out.rows, totals.tables[len(EPOCHS) - 1].to_pylist()


@pytest.mark.parametrize("scheduler", sorted(set(CONSISTENT)))
def test_rows_meet_both_versions_or_none_and_are_counted_once(scheduler: str, tmp_path: Path):
    seen = set()
    for seed in range(6):
        updates = [Update("FM", {"fm": 2}), Update("MC", Count(2))]
        run, rows, totals = ran(seed, scheduler, updates, tmp_path, Faults() if seed % 2 else BAD_LUCK)
        assert {(row["fm"], row["mc"]) for row in rows} <= {(1, 1), (2, 2)}
        assert audited(run).serialisable
        seen |= {row["fm"] for row in rows}
        assert sorted((row["id"], row["who"]) for row in rows) == [(row["id"], row["user"]) for row in KEPT]
        numbers = defaultdict(list)
        for row in rows:
            numbers[row["who"]].append(row["number"])
        assert all(sorted(found) == list(range(1, len(found) + 1)) for found in numbers.values())
        by_user = {row["who"]: row for row in totals}
        assert {user: row["n"] for user, row in by_user.items()} == {
            user: len(found) for user, found in numbers.items()
        }
        assert sum(row["fm"] for row in totals) == sum(row["fm"] for row in rows)
    assert seen == {1, 2}, "no seed changed in the middle of the rows"


def test_an_update_of_one_operator_between_key_and_state(tmp_path: Path):
    for seed in range(6):
        run, rows, _ = ran(seed, "fries", [Update("some", "id % 5 <> 0 AND id >= 0")], tmp_path, BAD_LUCK)
        assert sorted(row["id"] for row in rows) == [row["id"] for row in KEPT]
        assert audited(run).serialisable
