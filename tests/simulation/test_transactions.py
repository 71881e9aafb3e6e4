"""Ledgers under faults and changes, on the local runtime. Thousands: ``python -m tests.simulation.run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.checkpoint.change_records import Outcome
from tests.simulation.transacted_flows import check_transacted, transacted_case_of


@pytest.mark.long
@pytest.mark.parametrize("block", range(5))
def test_transactions_are_exact_under_faults_and_changes(block: int, tmp_path: Path):
    for seed in range(8 * block, 8 * (block + 1)):
        check_transacted(transacted_case_of(seed, tmp_path / str(seed)))


@pytest.mark.long
def test_changes_do_take_effect(tmp_path: Path):
    applied = 0
    for seed in range(10):
        run = check_transacted(transacted_case_of(seed, tmp_path / str(seed)))
        applied += sum(record.outcome is Outcome.APPLIED for record in run.history)
    assert applied > 3
