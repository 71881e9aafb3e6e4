"""The examples of moved state and of a deployed script, on the local runtime, compared with sums made by hand."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from examples import deploying, moving_state
from midstream import MemorySink, Rescale
from midstream.change.configuration import first_configuration
from midstream.change.deployment import deployment_of
from midstream.storage.blobs import BlobStore
from midstream.testing import ChangeAt, MigrateAt, run_local

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", range(3))
def test_visits_are_numbered_without_a_gap_while_their_counts_move(seed: int) -> None:
    source, out = moving_state.visits(rate=1_000, limit=6_000, max_rows_per_epoch=300), MemorySink()
    moves = [MigrateAt.of(2, Rescale(4), budget="1 MB"), MigrateAt.of(5, Rescale(2), strategy="sudden", queue=True)]
    run = run_local(moving_state.build(source, out), seed=seed, changes=moves)
    assert [str(record.outcome) for record in run.history] == ["applied", "applied"]
    assert len(out.rows) == 6_000
    assert moving_state.misnumbered(out.rows) == []


@pytest.mark.parametrize("numbers", [[1, 3], [1, 1, 2], [2]])
def test_a_wrong_number_is_found(numbers: list[int]) -> None:
    assert moving_state.misnumbered({"visitor": 7, "number": number} for number in numbers) == [7]


def test_totals_go_on_under_the_deployed_script(tmp_path: Path) -> None:
    source, out = deploying.sales(rate=1_000, limit=3_000, max_rows_per_epoch=500), MemorySink()
    runs = first_configuration(deploying.first(source, out).graph, BlobStore(str(tmp_path)), 2)
    edits = deployment_of(runs, deploying.second(source, out).graph).edits
    run = run_local(deploying.first(source, out), changes=[ChangeAt.of(2, *edits, scheduler="epoch")])
    [record] = run.history
    assert (str(record.outcome), record.epoch) == ("applied", 3)

    wanted: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    rows = [row for batch in source.rows(0, 3_000, start_us=0) for row in batch.to_pylist()]
    for index, row in enumerate(rows):
        is_new = index >= 3 * 500
        if not is_new or row["cents"] > 0:
            for place, amount in enumerate((1, row["cents"], row["cents"] // (8 if is_new else 10))):
                wanted[row["shop"]][place] += amount
    found: dict[int, dict[str, Any]] = {row["shop"]: row for row in out.rows}
    assert {shop: [row["n"], row["cents"], row["fee"]] for shop, row in found.items()} == wanted
