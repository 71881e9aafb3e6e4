"""A message costs the coordinator the same with few tasks as with many: nothing looks at all of them.

Measured as CPU time of this thread, so that other work on the machine hardly shows: with 32 times as many tasks, a look
at all of them for each message takes 32 times as long.
"""

from __future__ import annotations

import pytest

from benchmarks.control_scale_alone import Begin, a_change, a_fast_operation, order_bytes, us_per_message

FEW, MANY = 64, 2048


@pytest.mark.parametrize("begin", [a_change, a_fast_operation])
def test_a_message_costs_the_same_with_many_tasks(begin: Begin):
    few, many = us_per_message(begin, FEW), us_per_message(begin, MANY)
    assert many < 6 * few, f"{few:.1f} µs with {FEW} tasks, {many:.1f} µs with {MANY}"


def test_an_order_is_as_long_with_many_tasks():
    (few, few_whole), (many, many_whole) = order_bytes(16), order_bytes(256)
    assert many / 256 < 1.5 * few / 16
    assert many_whole / 256 > 5 * few_whole / 16, (
        "what it would be with the lineage of all bins: else this says nothing"
    )
