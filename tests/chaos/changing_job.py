"""The driver of a round of changes: ``python -m tests.chaos.changing_job FOLDER MASTER [LOCAL_STATE]``.

It changes four operators together, again and again, while its processes are killed. Version v of three of them puts v
on the rows that they meet, and the ledger adds other amounts; the state of the second one says which version's layout
it has, and both the function and the migration insist on it. Started again in the same folder, it goes on with the
versions that are in force.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from midstream import FileSink, Flow, State, Update
from midstream.checkpoint.change_records import Outcome
from tests.chaos.job import PARTITIONS, ledger_of, session
from tests.ledger import Add

Row = dict[str, Any]

EPOCHS = 14
ROWS = 600
KEYS = 11
OUTCOME_S = 180.0
PER_ROW_S = 0.001
"""The cost of a row, so that epochs last long enough to be changed."""


class Mark:
    """Puts its version on rows."""

    def __init__(self, column: str, version: int) -> None:
        self.column = column
        self.version = version

    def __call__(self, row: Row) -> Row:
        """Mark a row, slowly."""
        time.sleep(PER_ROW_S)
        return {**row, self.column: self.version}


class Count:
    """Numbers the rows of a key. State: how many there were, and the version of its layout."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, key: int, row: Row, state: State) -> Row:
        """Count a row; raise if the layout is another version's."""
        seen, layout = state.get((0, self.version))
        if layout != self.version:
            raise AssertionError(f"state of version {layout} met version {self.version}")
        state.set((seen + 1, layout))
        return {**row, "b": self.version, "seen": seen + 1}


class Migrate:
    """Migrates state from the previous version to this one."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, key: int, state: State) -> None:
        """Migrate a key; raise if its state is not the previous version's."""
        seen, layout = state.get()
        if layout != self.version - 1:
            raise AssertionError(f"state of version {layout} is migrated to version {self.version}")
        state.set((seen, self.version))


def build(numbers: Any, out: Path) -> Flow:
    """Version 1 of the flow."""
    flow = Flow("changing")
    source = flow.source("numbers", numbers)
    marked = source.map("A", Mark("a", 1), adds="a int")
    counted = marked.key_by("by k", "k").process(
        "B", Count(1), returns="n bigint, k bigint, a int, b int, seen int", one_to_one=True
    )
    counted.map("C", Mark("c", 1), adds="c int").sink("out", FileSink(out))
    ledger_of(out.parent).keep(source.key_by("by k too", "k"), "n")
    return flow


def updates(version: int) -> tuple[Update, ...]:
    """Updates of all operators to this version."""
    return (
        Update("A", Mark("a", version)),
        Update("B", Count(version), migrate=Migrate(version)),
        Update("C", Mark("c", version)),
        Update("ledger", Add("n", version)),
    )


def version_of(job: Any) -> int:
    """The newest version in force or pending."""
    made = [record for record in job.history() if record.outcome in (Outcome.APPLIED, Outcome.PENDING)]
    return 1 + len(made)


def main(place: str, master: str, local_state: str | None = None) -> None:
    """Run and change the job until there are enough epochs."""
    folder, spark = Path(place), session(master)
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2)
    numbers = source.load().selectExpr("value AS n", f"value % {KEYS} AS k")
    ledger_of(folder).create()
    job = build(numbers, folder / "out").start(
        spark, checkpoint=str(folder / "checkpoint"), partitions=PARTITIONS, local_state=local_state
    )
    rng = random.Random()
    while job.metrics.epochs == 0 or job.progress[-1].epoch < EPOCHS - 1:
        change = job.update(*updates(version_of(job) + 1))
        change.wait(OUTCOME_S)
        job.await_termination(rng.random() * 0.3)  # raises if it has failed
    job.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
