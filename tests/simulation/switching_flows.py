"""A change among many small slices, with competing attempts: all attempts of a task must switch at the same row."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from midstream import Flow, ListSource, MemorySink, Update
from midstream.runtime.local import tasks as local_tasks
from midstream.testing import ChangeAt, Faults, ManualClock, run_local
from tests.simulation.changing_check import attempts_of

ROWS = 200


class Switched(NamedTuple):
    """What a run has shown: attempts that were compared, and those of them that switched in the middle of a task."""

    compared: int
    in_the_midst: int


def check_switching(seed: int, folder: Path) -> Switched:
    """Run the case that a seed stands for."""
    flow = Flow("f")
    rows = flow.source("in", ListSource([[{"id": i} for i in range(ROWS)]], "id bigint", partitions=4))
    rows.map("m", lambda row: row).sink("out", MemorySink())
    with patch.object(local_tasks, "MAX_SLICE", 10):
        run_local(
            flow,
            seed=seed,
            faults=Faults(speculate=0.08, crash=0.01, repeat=0.2),
            clock=ManualClock(),
            checkpoint=str(folder),
            changes=[ChangeAt.of(0, Update("m", lambda row: row))],
            audit="id",
        )
    compared = switched = 0
    for first, *others in attempts_of(str(folder), flow.graph).values():
        assert all(other == first for other in others), f"seed {seed}: attempts of a task differ"
        compared += len(others)
        switched += bool(others) and len({revision for _, operator, revision in first if operator == "m"}) == 2
    return Switched(compared, switched)
