"""A job on the local runtime whose epochs a test runs one by one, with everything that moves state or controls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from midstream import Flow, ListSource, MemorySink
from midstream.change.change import Change
from midstream.change.trial import Request
from midstream.checkpoint.change_records import ChangeRecord
from midstream.control.placement import ExecutorShare
from midstream.data.hashing import bins_of, hash_columns
from midstream.engine.clock import ManualClock
from midstream.errors import MidstreamError
from midstream.flow.edits import Edit
from midstream.flow.knobs import KNOBS
from midstream.flow.model import Graph
from midstream.ids import Epoch, StageIndex
from midstream.observation import Observation
from midstream.planner.assignment import Assignment
from midstream.planner.change_plan import Scheduler
from midstream.runtime.control_desk import ControlDesk
from midstream.runtime.controller_desk import ControllerDesk
from midstream.runtime.local.data import source_epochs
from midstream.runtime.local.runtime import _Runtime, runtime_of
from midstream.runtime.migration_desk import MigrationDesk
from midstream.runtime.steered_job import SteeredJob
from midstream.runtime.steering import JobSteering

EPOCHS, ROWS = 60, 40
BEGIN = datetime(2026, 5, 1, tzinfo=UTC)
"""The event time of epoch 0; each epoch is a minute."""


def numbered(key: Any, row: Any, state: Any) -> dict[str, Any]:
    """Number the rows of each key."""
    state.set(state.get(0) + 1)
    return {"k": row["k"], "n": state.get()}


def users_of(epoch: int) -> list[str]:
    """The user of each row of an epoch. User 0 has as many rows as all others together."""
    return [f"user {0 if i % 2 else (ROWS * epoch + i) % 50}" for i in range(ROWS)]


def bin_of(key: str) -> int:
    """The bin of a key of one string column."""
    return int(bins_of(hash_columns(pa.record_batch({"k": pa.array([key])}), ["k"]))[0])


class SteppedJob(SteeredJob):
    """Numbers the rows of each user, in the stage "by user"; then passes them through the stage "by length"."""

    name, id = "counts", "0123456789abcdef0123456789abcdef"

    def __init__(self, runtime: _Runtime, flow: Flow, out: MemorySink) -> None:
        self.runtime, self.out = runtime, out
        self.epoch = runtime._found
        self._rows = list(source_epochs(flow.graph))
        self._controllers = ControllerDesk(JobSteering(self), time_limit_s=None)
        self.observed: Callable[[Observation], Observation] = lambda seen: seen
        """What controllers get of an observation: its clock stands still, so a test says what a measure would say."""
        self.has_ended = False

    @property
    def _migrating(self) -> MigrationDesk:
        return self.runtime._driver.migrating

    @property
    def _controlling(self) -> ControlDesk:
        return self.runtime._driver.controlling

    @property
    def _steering(self) -> ControllerDesk:
        return self._controllers

    @property
    def knobs(self) -> dict[str, int | None]:
        """The value of every knob."""
        tuned = self.runtime._driver.changes.configuration.knobs
        return {name: tuned.get(name, knob.default) for name, knob in KNOBS.items()}

    @property
    def graph(self) -> Graph:
        """The running flow."""
        return self.runtime._driver.changes.configuration.graph

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes in progress."""
        return self.runtime._driver.changes.in_progress

    def _require_running(self) -> None:
        if self.has_ended:
            raise MidstreamError("the job has ended")

    @property
    def executors(self) -> tuple[ExecutorShare, ...]:
        """Those of the runtime."""
        assignments = self.runtime._driver.changes.configuration.assignments
        return self.runtime.placement.shares(assignments, self.runtime.executors.names)

    def run(self, epochs: int = 1) -> None:
        """Run the next epochs."""
        for _ in range(epochs):
            self.runtime.run_epoch(self.epoch, self._rows[self.epoch])
            self.epoch = Epoch(self.epoch + 1)
            self._controllers.observe(self.observed(self.runtime._observations[-1]))

    def update(self, *edits: Edit, by: str = "test", note: str | None = None) -> Change:
        """Change the job."""
        request = Request(edits, Scheduler.FRIES, by, preflight=False, note=note)
        return self.runtime._driver.changing.request(request)

    def history(self) -> list[ChangeRecord]:
        """All changes and migrations."""
        return self.runtime.checkpoint.changes.records()

    def owners(self, stage: int = 1) -> Assignment:
        """The owners of bins in an epoch that begins now."""
        return self.runtime._driver.changes.configuration.assignments[StageIndex(stage)]

    def assert_gapless(self) -> None:
        """Each user's rows have been numbered without a gap or a repetition."""
        numbers: dict[str, list[int]] = {}
        for row in self.out.rows:
            numbers.setdefault(row["k"], []).append(row["n"])
        assert sum(map(len, numbers.values())) == ROWS * self.epoch
        assert all(sorted(found) == list(range(1, len(found) + 1)) for found in numbers.values())


@contextmanager
def stepped_job(folder: Path, *, two: bool = False, timed: bool = True, **options: Any) -> Iterator[SteppedJob]:
    """A job on a folder, which may have one already; with ``two`` stages."""
    flow, out = Flow("counts"), MemorySink()
    epochs = [
        [{"k": user, "at": BEGIN + timedelta(minutes=epoch)} for user in users_of(epoch)] for epoch in range(EPOCHS)
    ]
    rows = flow.source(
        "in", ListSource(epochs, "k string, at timestamp", partitions=2), event_time="at" if timed else None
    )
    counted = rows.key_by("by user", "k").process("count", numbered, returns="k string, n int")
    if two:
        counted = counted.map(
            "measure", lambda row: {**row, "length": len(row["k"])}, returns="k string, n int, length int"
        )
        counted = counted.key_by("by length", "length").process(
            "pass", lambda key, row, state: {"k": row["k"], "n": row["n"]}, returns="k string, n int"
        )
    counted.sink("out", out)
    clock = ManualClock(round(1e6 * (BEGIN + timedelta(days=1)).timestamp()))
    with runtime_of(flow.graph, checkpoint=str(folder / "checkpoint"), clock=clock, **options) as runtime:
        yield SteppedJob(runtime, flow, out)
