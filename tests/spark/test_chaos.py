"""Results are exact although real processes are killed: one short round. ``make chaos`` has many long ones.

The shared session of other tests is not used: these drivers are separate processes, because they are killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import changes, plans
from tests.chaos.processes import Victim
from tests.chaos.run import Kill, Plan, run_round
from tests.spark.conftest import PATIENCE_S

SHORT = Plan(
    kind="driver",
    seed=7,
    steps=3,
    kills=(
        Kill(Victim.WORKER, 0, "state", 0.0),
        Kill(Victim.DRIVER, 1, "sink habits", 0.0),
        Kill(Victim.WORKER, 2, "offsets", 0.1),
    ),
    keeps_local_state=True,
)


@pytest.mark.timeout(4 * PATIENCE_S)  # two JVMs have to start, one after the other
def test_sinks_and_state_are_exact_after_workers_and_the_driver_were_killed(tmp_path: Path) -> None:
    outcome = run_round(SHORT, tmp_path)
    assert outcome.problems == []
    assert (len(outcome.done), outcome.lives) == (3, 2), "nothing was left out"


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("kind", ["worker", "driver"])
def test_changes_are_consistent_whatever_is_killed(kind: str, tmp_path: Path) -> None:
    done, wrong = changes.run_round(kind, seed=1, folder=tmp_path.resolve())
    assert wrong == []
    assert len(done) == 3, "nothing was left out"


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
def test_plans_change_at_random_whatever_is_killed(tmp_path: Path) -> None:
    done = plans.run_round("driver", seed=1, changes=12, folder=tmp_path, apart=(3, 8))
    assert done.problems == []
    assert done.changes >= 12
    assert len(done.kills) >= 2
