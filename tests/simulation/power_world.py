"""A job that loses power: runs once while its disk is recorded, and continues from whatever a crash may have left.

The flow has two kinds of state, with so few rows that snapshots, merges and sweeps happen all the time, and it is
changed twice. Everything that was reported as done in the recorded run (an epoch committed, a change recorded) must
survive the crash; and the job must continue to the result of the oracle.
"""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from midstream import Flow, ListSource, MemorySink, Update, agg, tumbling
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.state import lineage
from midstream.testing import ChangeAt, ManualClock, run_local
from tests.keyed_oracle import KeyedOracle, us
from tests.oracle import Row, multiset
from tests.power_loss import Disk, Killed, Operation, Promised, Recorder
from tests.simulation.keyed_flows import START, at, small_thresholds
from tests.simulation.keyed_state import compare_state

SCHEMA = "k string, n int, t timestamp"
EPOCHS: list[list[Row]] = [
    [{"k": "abc"[(3 * n + i) % 3 if i else n % 3], "n": n + i, "t": at(4 * n + i)} for i in range(4)] for n in range(9)
]
RECORDED = 7
"""Number of epochs of the recorded run; after a crash two more are run than were committed."""
CHANGED = (1, 4)
"""Epochs in which the flow is changed."""


def version(number: int) -> Any:
    def stamp(row: Row) -> Row:
        return {**row, "v": number}

    return stamp


def total(key: str, row: Row, state: Any) -> Row:
    state.set(state.get(0) + row["n"])
    state.list().append(row["n"], keep=3)
    return {**row, "n": state.get()}


def flow_of(epochs: Sequence[Sequence[Row]]) -> tuple[Flow, MemorySink, MemorySink]:
    flow, out, windows = Flow("unlucky"), MemorySink(), MemorySink()
    rows = flow.source("rows", ListSource([list(each) for each in epochs], SCHEMA, event_time="t"))
    keyed = rows.map("stamp", version(1), adds="v int").key_by("by_k", "k")
    keyed.process("total", total).sink("out", out)
    keyed.aggregate("windows", window=tumbling("10 seconds"), n=agg.sum("n")).sink("closed", windows)
    return flow, out, windows


@dataclass(frozen=True)
class Committed:
    """The driver was told that an epoch is committed."""

    epoch: int


@dataclass(frozen=True)
class Kept:
    """A user was told that the record of a change is kept."""

    number: int
    outcome: Outcome


class World:
    """A recorded job in ``folder``."""

    def __init__(self, folder: Path, *, durable: bool = True, seed: int = 0) -> None:
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        self.recorder = Recorder()
        self._folder = folder
        self._durable = durable
        self._seed = seed

    @property
    def operations(self) -> list[Operation]:
        return self.recorder.operations

    def run(self) -> None:
        """Run until all recorded epochs are committed."""
        done = self._done()
        changes = [
            ChangeAt.of(max(epoch, done), Update("stamp", version(2 + index)))
            for index, epoch in enumerate(CHANGED)
            if index >= self._requested()
        ]
        flow, _, _ = flow_of(EPOCHS[done:RECORDED])
        with self.recorder.recording(), self._promising(), few():
            run_local(
                flow,
                checkpoint=str(self.root / "checkpoint"),
                clock=ManualClock(start_us=us(START)),
                seed=self._seed,
                changes=changes,
                durable=self._durable,
            )

    def run_until_killed(self, operation: int) -> None:
        """Run until the process is killed instead of performing an operation."""
        self.recorder.kill_at = operation
        try:
            self.run()
        except Killed:
            pass
        else:
            raise AssertionError(f"the run has ended after {len(self.operations)} operations")
        finally:
            self.recorder.kill_at = None
            gc.collect()  # a dead process has no locks

    def check_recorded(self) -> None:
        """The recording is complete: applying it yields the files that exist."""
        found = {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        found.pop("checkpoint/lock")
        assert Disk(str(self.root)).after(self.operations).files() == found

    def crash(self, end: int, seed: int, operations: Sequence[Operation] | None = None) -> Crashed:
        """Lose power after ``end`` operations."""
        recorded = self.operations[:end] if operations is None else operations[:end]
        place = self._folder / "crashed"
        shutil.rmtree(place, ignore_errors=True)
        Disk(str(self.root)).after(recorded).crash(random.Random(seed), place)
        promises = [operation.what for operation in recorded if isinstance(operation, Promised)]
        return Crashed(place / "checkpoint", promises)

    def _done(self) -> int:
        return _next_epoch(self.root / "checkpoint")

    def _requested(self) -> int:
        return len(ChangeLog(str(self.root / "checkpoint" / "changes")).records())

    @contextmanager
    def _promising(self) -> Iterator[None]:
        commit, append, note = Checkpoint.commit, ChangeLog._append, self.recorder.note

        def committing(checkpoint: Checkpoint, manifest: Manifest) -> None:
            commit(checkpoint, manifest)
            note(Promised(Committed(manifest.epoch)))

        def keeping(log: ChangeLog, record: ChangeRecord) -> None:
            append(log, record)
            note(Promised(Kept(record.number, record.outcome)))

        with patch.object(Checkpoint, "commit", committing), patch.object(ChangeLog, "_append", keeping):
            yield


class Crashed:
    """A checkpoint after a power loss, and what had been reported before."""

    def __init__(self, checkpoint: Path, promises: Sequence[Committed | Kept]) -> None:
        self._checkpoint = checkpoint
        self._promises = promises

    def check(self) -> int:
        """Check that the checkpoint keeps its promises and the job continues exactly; return the epoch it continues
        with.
        """
        start = _next_epoch(self._checkpoint)
        end = min(start + 2, len(EPOCHS))
        committed = max((each.epoch for each in self._promises if isinstance(each, Committed)), default=-1)
        assert start > committed, f"epoch {committed} was committed, and is lost"
        kept = {each.number: each.outcome for each in self._promises if isinstance(each, Kept)}
        found = {record.number: record.outcome for record in ChangeLog(str(self._checkpoint / "changes")).records()}
        for number, outcome in kept.items():
            assert number in found, f"change {number} is lost"
            assert found[number] in (outcome, Outcome.APPLIED), f"change {number} was {outcome}, is {found[number]}"
        flow, out, windows = flow_of(EPOCHS[start:end])
        with few():
            run_local(flow, checkpoint=str(self._checkpoint), clock=ManualClock(start_us=us(START)))
        oracle = KeyedOracle(flow.graph)
        answers = [oracle.epoch({"rows": rows}).sinks for rows in EPOCHS[:end]]
        for name, sink in (("out", out), ("closed", windows)):
            assert sorted(sink.tables) == list(range(start, end))
            for epoch in range(start, end):
                assert _plain(sink.tables[epoch].to_pylist()) == _plain(answers[epoch][name])
        assert {row["v"] for row in out.rows} <= {1 + len(found)}, "a recorded change is in effect"
        assert compare_state(str(self._checkpoint), flow.graph, oracle, "") > 4
        return start


def _next_epoch(checkpoint: Path) -> int:
    flow, _, _ = flow_of(EPOCHS[:1])
    newest = Checkpoint.look(str(checkpoint), flow.graph).newest_manifest()
    return 0 if newest is None else newest.epoch + 1


def _plain(rows: Sequence[Row]) -> Any:
    """Rows without their version stamp, which the oracle does not have."""
    return multiset([{name: value for name, value in row.items() if name != "v"} for row in rows])


@contextmanager
def few() -> Iterator[None]:
    """Thresholds so small that state files are rewritten and removed although there are few."""
    with ExitStack() as stack:
        stack.enter_context(small_thresholds(2))
        stack.enter_context(patch.object(lineage, "MIN_ROWS", 5))
        yield
