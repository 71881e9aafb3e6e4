"""SMQ on the local runtime: its plan changes while tasks and the driver crash, and every number goes through one plan.

The oracle is used on Spark as well, by ``benchmarks.plan_changes`` and ``tests.chaos.plans``; so it is tested here: it
must find whatever is wrong with a result.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.workloads import smq
from benchmarks.workloads.smq.flow import COUNTED
from midstream import ListSource, MemorySink
from midstream.data.schema import parse_ddl
from midstream.testing import ChangeAt, Faults, run_local

ROWS, EPOCHS, PARTITIONS = 400, 14, 2
ENDS = [ROWS * (epoch + 1) for epoch in range(EPOCHS)]
TENTH, FIFTH, BOTH = smq.Plan(nth=10), smq.Plan(nth=5), smq.Plan(nth=5, has_tally=True)
COURSE = (smq.BASE, FIFTH, TENTH, smq.BASE, smq.Plan(has_tally=True), BOTH, FIFTH, smq.Plan(has_tally=True))
CHANGES = tuple(map(smq.Change, COURSE, COURSE[1:]))


def source() -> ListSource:
    batch = pa.concat_batches(list(smq.numbers(1000.0).rows(0, ENDS[-1], 0))).select(["n", "instance", "digit"])
    return ListSource.of(
        batch.to_pylist(), schema="n bigint, instance bigint, digit bigint", epoch_rows=ROWS, partitions=PARTITIONS
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_every_number_goes_through_one_plan_whatever_crashes(seed: int) -> None:
    out = MemorySink()
    changes = [ChangeAt.of(1 + 2 * number, *change.edits()) for number, change in enumerate(CHANGES[:6])]
    rough = Faults(crash=0.02, speculate=0.05, repeat=0.05, give_up=0.005)
    run = run_local(smq.flow(source(), out, 0.0), seed=seed, changes=changes, faults=rough)
    made = [record for record in run.history if record.outcome == "applied"]
    assert len(made) == 6
    epochs = [(change, record.epoch or 0) for change, record in zip(CHANGES, made, strict=False)]
    found = smq.verdict(pa.concat_tables(out.tables.values()), ENDS, epochs, partitions=PARTITIONS)
    assert found.is_exact, found
    assert found.rows > ROWS


def result(*changes: tuple[smq.Change, int, tuple[float, ...]]) -> pa.Table:
    """What a right run gives: changes with the epoch and how far each share has come when it goes over."""
    columns: dict[str, list[object]] = {name: [] for name in parse_ddl(COUNTED).names}
    counts: dict[tuple[str, int], int] = {}
    for epoch in range(EPOCHS):
        plans = [change.after for change, at, _ in changes if at < epoch]
        before = plans[-1] if plans else smq.BASE
        here = [(change, seams) for change, at, seams in changes if at == epoch]
        for number, (start, end) in enumerate(
            smq.numbers(1.0, partitions=PARTITIONS).split(ENDS[epoch] - ROWS, ENDS[epoch])
        ):
            for n in range(start, end):
                plan = before
                if here and n >= start + here[0][1][number] * (end - start):
                    plan = here[0][0].after
                if n % plan.nth == 0:
                    row = {"n": n, "instance": n // 10 % 80, "digit": n // 800 % 10, "at": float(n), "tally": None}
                    for key, name in (("instance", "count"), *([("digit", "tally")] if plan.has_tally else [])):
                        counts[key, row[key]] = counts.get((key, row[key]), 0) + 1  # type: ignore[index, arg-type]
                        row[name] = counts[key, row[key]]  # type: ignore[index]
                    for name, values in columns.items():
                        values.append(row[name])
    return pa.table(columns, schema=parse_ddl(COUNTED))


FILTERED = smq.Change(smq.BASE, FIFTH)
RESULT = result((FILTERED, 5, (0.25, 0.5)))


def judged(rows: pa.Table, epoch: int = 5, tolerance: int = 0) -> smq.Verdict:
    return smq.verdict(rows, ENDS, [(FILTERED, epoch)], partitions=PARTITIONS, tolerance=tolerance)


def test_a_right_result_is_exact_and_its_seam_is_found() -> None:
    found = judged(RESULT)
    assert found.is_exact
    # The shares are 2000–2199 and 2200–2399; they go over at 2050 and 2300, and only every fifth number comes after it.
    assert found.seams == [smq.Seam(5, 2299.0, 2055.0)]


def test_a_change_between_two_epochs_has_its_seam_between_them() -> None:
    found = judged(result((FILTERED, 5, (0.0, 0.0))))
    assert found.is_exact
    assert found.seams == [smq.Seam(5, 1999.0, 2005.0)]


def test_with_a_tolerance_a_change_may_have_come_an_epoch_earlier() -> None:
    assert judged(RESULT, epoch=6, tolerance=1).is_exact
    assert judged(RESULT, epoch=6).lost > 0
    late = result((FILTERED, 6, (0.25, 0.5)))
    assert judged(late, epoch=6, tolerance=1).is_exact
    assert [seam.epoch for seam in judged(late, epoch=6, tolerance=1).seams] == [6]


def without(row: int) -> pa.Table:
    return pa.concat_tables([RESULT.slice(0, row), RESULT.slice(row + 1)])


def with_column(name: str, at: int, value: object) -> pa.Table:
    values = RESULT[name].to_pylist()
    values[at] = value
    return RESULT.set_column(
        RESULT.schema.get_field_index(name), name, pa.array(values, RESULT.schema.field(name).type)
    )


def test_the_oracle_finds_what_is_wrong() -> None:
    assert judged(without(700)).lost == 1
    assert any("one by one" in problem for problem in judged(without(700)).problems)
    last = RESULT.num_rows - 1
    assert judged(pa.concat_tables([RESULT, RESULT.slice(last)])).doubled == 1
    assert not judged(with_column("count", 700, 99)).is_exact
    assert judged(with_column("tally", 700, 1)).problems
    through_both = result((FILTERED, 5, (0.25, 0.5)), (smq.Change(FIFTH, smq.BASE), 6, (0.25, 0.25)))
    assert judged(through_both).doubled > 0


def test_the_oracle_finds_counts_that_are_out_of_order() -> None:
    n = RESULT["n"].to_pylist()
    n[0], n[1] = n[1], n[0]
    swapped = RESULT.set_column(0, "n", pa.array(n))
    assert any("out of order" in problem for problem in judged(swapped).problems)


def test_a_share_switches_plans_once() -> None:
    # As if the plan went back for a stretch in the epoch of the change.
    n = np.arange(2100, 2140)
    back = RESULT.filter(pa.array(~np.isin(RESULT["n"].to_numpy(), n)))
    stretch = pa.table(
        {"n": n, "instance": n // 10 % 80, "digit": n // 800 % 10, "at": n * 1.0, "count": n, "tally": [None] * len(n)},
        schema=RESULT.schema,
    )
    assert judged(pa.concat_tables([back, stretch])).doubled > 0
