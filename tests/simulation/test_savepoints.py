"""Savepoints, forks and rewinds: what comes of them equals a run that stopped at the savepoint, whatever crashes.

The oracle is another job in other folders, which takes the rows up to the savepoint and then those after it, and knows
nothing of savepoints.
"""

from __future__ import annotations

import gc
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.dataset as ds
import pytest

from midstream import (
    DatabaseSink,
    FileSink,
    Flow,
    ListSource,
    NoopSink,
    Update,
    agg,
    committed_files,
    delete_savepoint,
    fork,
    rewind,
    savepoints,
    take_savepoint,
    tumbling,
)
from midstream.checkpoint import sink_files, sweeper
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError
from midstream.runtime.local import runtime as local
from midstream.state import lineage
from midstream.testing import ChangeAt, Faults, ManualClock, run_local
from tests.keyed_oracle import us
from tests.oracle import Row
from tests.power_loss import Disk, Killed, Recorder, Removed
from tests.simulation.keyed_flows import START, at, small_thresholds

pytestmark = pytest.mark.long

SCHEMA = "k string, n int, t timestamp"
STATEFUL = ("total", "windows")
FAULTS = Faults(crash=0.02, repeat=0.1, speculate=0.05, lose_output=0.02)


def rows(first: int, epochs: int, salt: int = 0) -> list[list[Row]]:
    """Rows of some epochs; ``salt`` makes others of the same epochs."""
    return [
        [{"k": "abcd"[(n + salt + i) % 4], "n": 100 * salt + n + i, "t": at(4 * n + i)} for i in range(4)]
        for n in range(first, first + epochs)
    ]


def version(number: int) -> Callable[[Row], Row]:
    def stamp(row: Row) -> Row:
        return {**row, "v": number}

    return stamp


def total(key: str, row: Row, state: Any) -> Row:
    state.set(state.get(0) + row["n"])
    return {**row, "n": state.get()}


@dataclass
class Place:
    """Where a job and its sinks live."""

    root: Path
    seed: int = 0
    faults: Faults | None = None
    called: dict[int, list[int]] = field(default_factory=dict)
    """What a function that is a sink was given, by epoch; it replaces this epoch and later ones."""

    @property
    def checkpoint(self) -> str:
        return str(self.root / "checkpoint")

    @property
    def files(self) -> str:
        return str(self.root / "files")

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.root / "base.db")

    def save(self, table: Any, epoch: int) -> None:
        self.called = {each: values for each, values in self.called.items() if each < epoch}
        self.called[epoch] = sorted(table["n"].to_pylist())

    def flow(self, epochs: Sequence[Sequence[Row]], stamp: Callable[[Row], Row]) -> Flow:
        self.root.mkdir(parents=True, exist_ok=True)
        with closing(self.connect()) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS totals (k TEXT, n BIGINT, t TEXT, v BIGINT, epoch BIGINT)")
        flow = Flow("shop")
        source = flow.source("rows", ListSource([list(each) for each in epochs], SCHEMA, event_time="t"))
        keyed = source.map("stamp", stamp, adds="v int").key_by("by_k", "k")
        totals = keyed.process("total", total)
        totals.sink("files", FileSink(self.files))
        totals.sink("called", self.save)
        totals.sink("database", DatabaseSink(self.connect, "totals"))
        keyed.aggregate("windows", window=tumbling("10 seconds"), n=agg.sum("n")).sink("ended", FileSink(self.ended))
        return flow

    @property
    def ended(self) -> str:
        return str(self.root / "ended")

    def run(
        self,
        epochs: Sequence[Sequence[Row]],
        changes: Sequence[ChangeAt] = (),
        *,
        durable: bool = False,
    ) -> None:
        """One life of the job, over these epochs."""
        run_local(
            self.flow(epochs, version(1)),
            checkpoint=self.checkpoint,
            clock=ManualClock(start_us=us(START)),
            seed=self.seed,
            faults=self.faults,
            changes=changes,
            durable=durable,
        )

    def outcome(self, database: bool = True) -> dict[str, Any]:
        """State, and what is in the sinks."""
        found: dict[str, Any] = {name: _sorted(read_state(self.checkpoint, name).to_pylist()) for name in STATEFUL}
        for folder in (self.files, self.ended):
            files = committed_files(folder)
            plain = ds.dataset(folder).to_table().to_pylist() if files else []
            assert _sorted(ds.dataset(files).to_table().to_pylist() if files else []) == _sorted(plain)
            found[Path(folder).name] = _sorted(plain)
        if database:
            with closing(self.connect()) as connection, connection:
                found["database"] = sorted(connection.execute("SELECT k, n, t, epoch FROM totals").fetchall())
            found["called"] = self.called
        return found


class Stateful(Place):
    """A job whose sinks keep nothing: all that it writes is recorded."""

    def flow(self, epochs: Sequence[Sequence[Row]], stamp: Callable[[Row], Row]) -> Flow:
        flow = Flow("shop")
        source = flow.source("rows", ListSource([list(each) for each in epochs], SCHEMA, event_time="t"))
        keyed = source.map("stamp", stamp, adds="v int").key_by("by_k", "k")
        keyed.process("total", total).sink("out", NoopSink())
        keyed.aggregate("windows", window=tumbling("10 seconds"), n=agg.sum("n")).sink("ended", NoopSink())
        return flow

    def state(self) -> list[list[str]]:
        return [_sorted(read_state(self.checkpoint, name).to_pylist()) for name in STATEFUL]


def _sorted(found: list[Row]) -> list[str]:
    """Rows without the version that they met, which depends on where in an epoch a change came."""
    return sorted(str({name: value for name, value in row.items() if name != "v"}) for row in found)


@pytest.fixture(autouse=True)
def small() -> Any:
    """Files of state and of sinks are merged, and superseded ones removed, although there are few."""
    # Not by monkeypatch: a test undoes it, and thresholds would then stay small in other tests.
    with small_thresholds(2), patch.object(sink_files, "MERGE_FILES", 3), patch.object(lineage, "MIN_ROWS", 5):
        yield


def told_apart(place: Place, x: int, seed: int, *, durable: bool = False) -> None:
    """A life up to a savepoint after ``x`` epochs, and another one that goes on."""
    rng = random.Random(seed)
    place.run(rows(0, x), [ChangeAt.of(1, Update("stamp", version(2)))] if x > 2 else (), durable=durable)
    take_savepoint(place.checkpoint, "x")
    later = [ChangeAt.of(x + 1, Update("stamp", version(9)))] if rng.random() < 0.7 else []
    place.run(rows(x, rng.randrange(2, 6), salt=3), later, durable=durable)


def oracle_of(root: Path, x: int, after: int) -> Place:
    """A job that stopped after ``x`` epochs, and went on with the rows that count."""
    place = Place(root)
    place.run(rows(0, x), [ChangeAt.of(1, Update("stamp", version(2)))] if x > 2 else ())
    if after:
        place.run(rows(x, after, salt=5))
    return place


@pytest.mark.parametrize("seed", range(4))
def test_a_rewound_job_equals_one_that_stopped_there(tmp_path: Path, seed: int) -> None:
    x = 2 + seed
    place = Place(tmp_path / "job", seed, FAULTS)
    told_apart(place, x, seed)
    beyond = place.outcome()
    assert rewind(place.checkpoint, "x").epoch == x - 1
    stopped = oracle_of(tmp_path / "stopped", x, 0).outcome(database=False)
    assert place.outcome(database=False) == stopped, "sinks in files are taken back at once"
    assert place.outcome()["database"] == beyond["database"], "a database only when the next epoch is written"
    place.run(rows(x, 3, salt=5))
    assert place.outcome() == oracle_of(tmp_path / "oracle", x, 3).outcome()


@pytest.mark.parametrize("seed", range(4))
def test_a_fork_goes_on_from_the_savepoint_and_the_first_job_does_not_notice(tmp_path: Path, seed: int) -> None:
    x = 2 + seed
    place, new = Place(tmp_path / "job", seed, FAULTS), Place(tmp_path / "new", seed, FAULTS)
    told_apart(place, x, seed)
    before = place.outcome()
    fork(place.checkpoint, "x", new.checkpoint)
    new.run(rows(x, 3, salt=5))
    oracle = oracle_of(tmp_path / "oracle", x, 3)
    wanted, found = oracle.outcome(), new.outcome()
    assert {name: found[name] for name in STATEFUL} == {name: wanted[name] for name in STATEFUL}
    for name in ("files", "ended", "database"):
        later = [row for row in wanted[name] if (row[-1] if name == "database" else _epoch(row)) >= x]
        assert found[name] == later, "sinks of a fork have the epochs after the savepoint"
    assert found["called"] == {epoch: values for epoch, values in wanted["called"].items() if epoch >= x}
    assert place.outcome() == before
    count = Checkpoint.of_any_flow(place.checkpoint).epochs()[-1] + 1
    place.run(rows(count, 2))
    assert place.outcome() != before, "and goes on"


def _epoch(row: str) -> int:
    return int(row.rpartition("'epoch': ")[2].rstrip("}"))


def test_a_fork_survives_its_origin(tmp_path: Path) -> None:
    """Whatever happens to the files of one, the other has its own."""
    place, new = Place(tmp_path / "job"), Place(tmp_path / "new")
    told_apart(place, 4, 1)
    fork(place.checkpoint, "x", new.checkpoint)
    shutil.rmtree(place.checkpoint)
    new.run(rows(4, 3, salt=5))
    wanted = oracle_of(tmp_path / "oracle", 4, 3).outcome()
    assert [new.outcome()[name] for name in STATEFUL] == [wanted[name] for name in STATEFUL]


def test_a_fork_never_touches_the_sinks_of_the_first_job(tmp_path: Path) -> None:
    """Its first manifest would name files of the other job's folder, if it was that job's."""
    place, new = Place(tmp_path / "job"), Place(tmp_path / "new")
    told_apart(place, 3, 1)
    fork(place.checkpoint, "x", new.checkpoint)
    shared = Place(tmp_path / "job")
    shared_flow = shared.flow(rows(3, 1), version(1))
    before = place.outcome()
    with pytest.raises(CheckpointError, match=r"not of this job.*Use another folder"):
        run_local(shared_flow, checkpoint=new.checkpoint, clock=ManualClock(start_us=us(START)))
    assert place.outcome() == before

    class Mixed(Place):
        """Files of its own, but the table of the first job."""

        def connect(self) -> sqlite3.Connection:
            return place.connect()

    mixed = Mixed(tmp_path / "mixed")
    with pytest.raises(CheckpointError, match=r"belongs to sink 'database' of flow 'shop'.*Use another table"):
        run_local(mixed.flow(rows(3, 1), version(1)), checkpoint=new.checkpoint)
    assert place.outcome() == before


def test_a_savepoint_keeps_files_that_would_be_swept_until_it_is_deleted(tmp_path: Path) -> None:
    place = Place(tmp_path / "job")
    place.run(rows(0, 3))
    saved = take_savepoint(place.checkpoint, "x", note="to see", by="ann")
    place.run(rows(3, 8))
    checkpoint = Checkpoint.of_any_flow(place.checkpoint)
    assert not checkpoint.lacks(saved.manifest, saved.digests())
    assert [(each.name, each.epoch, each.by, each.note) for each in savepoints(place.checkpoint)] == [
        ("x", 2, "ann", "to see")
    ]
    told = r"epoch 4 in .* was swept.*It can be rewound to epochs 2, 8, 9 and savepoints 'x'"
    with pytest.raises(CheckpointError, match=told):
        rewind(place.checkpoint, 4)
    assert delete_savepoint(place.checkpoint, "x").epoch == 2
    place.run(rows(11, 1))
    assert checkpoint.lacks(saved.manifest, ()), "what only the savepoint needed is gone"
    assert savepoints(place.checkpoint) == []


def test_a_job_can_be_rewound_to_an_epoch_that_is_still_whole(tmp_path: Path) -> None:
    place = Place(tmp_path / "job")
    place.run(rows(0, 4), [ChangeAt.of(1, Update("stamp", version(2)))])
    place.run(rows(4, 1, salt=3))
    rewind(place.checkpoint, 3)
    place.run(rows(4, 2, salt=5))
    assert place.outcome() == oracle_of(tmp_path / "oracle", 4, 2).outcome()


def test_changes_after_the_epoch_no_longer_count(tmp_path: Path) -> None:
    place = Place(tmp_path / "job")
    place.run(rows(0, 3))
    take_savepoint(place.checkpoint, "x")
    place.run(rows(3, 4), [ChangeAt.of(3, Update("stamp", version(7))), ChangeAt.of(5, Update("stamp", version(8)))])
    rewind(place.checkpoint, "x", by="ann")
    place.run(rows(3, 3), [ChangeAt.of(4, Update("stamp", version(5)))])
    records = Checkpoint.of_any_flow(place.checkpoint).changes.records()
    assert [(each.revision, each.outcome) for each in records] == [
        (2, Outcome.REWOUND),
        (3, Outcome.REWOUND),
        (4, Outcome.APPLIED),
    ]
    assert records[0].error == "ann rewound the job to epoch 2 (savepoint 'x')"
    place.run(rows(6, 1))
    with closing(place.connect()) as database, database:
        found = database.execute("SELECT DISTINCT epoch, v FROM totals WHERE epoch <> 4 ORDER BY epoch").fetchall()
    assert found == [(0, 1), (1, 1), (2, 1), (3, 1), (5, 5), (6, 5)]


def test_copies_of_state_from_before_a_rewind_do_not_count(tmp_path: Path) -> None:
    """They may hold an epoch that was taken back, under the same digest as one that counts."""
    place = Place(tmp_path / "job")
    place.run(rows(0, 2))
    names = [Checkpoint.of_any_flow(place.checkpoint).identity.copies]
    take_savepoint(place.checkpoint, "x")
    for _ in range(2):
        place.run(rows(2, 2))
        rewind(place.checkpoint, "x")
        names.append(Checkpoint.of_any_flow(place.checkpoint).identity.copies)
    assert len(set(names)) == 3
    assert len({Checkpoint.of_any_flow(place.checkpoint).identity.job, names[0]}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_savepoints_of_a_running_job_at_any_step_of_its_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The driver takes them between the steps of a commit, while tasks run, and while it sweeps."""
    rng, at_step = random.Random(seed), local._Runtime.at
    taken: dict[str, int] = {}

    def at_saving(runtime: Any, step: str) -> None:
        if runtime.checkpoint.newest_manifest() is not None and rng.random() < 0.1:
            saved = runtime._driver.savepoint(f"s{len(taken)}", by="ann", note=step)
            taken[saved.name] = saved.epoch
        at_step(runtime, step)

    monkeypatch.setattr(local._Runtime, "at", at_saving)
    monkeypatch.setattr(sweeper, "FULL_SWEEP_EVERY", 100)  # which would find savepoints on disk
    place = Stateful(tmp_path / "job", seed, FAULTS)
    place.run(rows(0, 16), [ChangeAt.of(3, Update("stamp", version(2))), ChangeAt.of(6, Update("stamp", version(3)))])
    monkeypatch.undo()
    with small_thresholds(2):
        place.run(rows(16, 2))
    assert len(set(taken.values())) > 2
    for name, epoch in taken.items():
        new, oracle = Stateful(tmp_path / name), Stateful(tmp_path / f"oracle of {name}")
        fork(place.checkpoint, name, new.checkpoint)
        new.run(rows(epoch + 1, 1, salt=5))
        oracle.run([*rows(0, epoch + 1), *rows(epoch + 1, 1, salt=5)])
        assert new.state() == oracle.state(), f"{name} of epoch {epoch}"


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_at(step: int, do: Callable[[], Any]) -> bool:
    """Run until the process is killed instead of a system call; False if there are not so many."""
    recorder = Recorder()
    recorder.kill_at = step
    try:
        with recorder.recording():
            do()
    except Killed:
        gc.collect()  # a dead process has no locks
        return True
    return False


@pytest.mark.slow
def test_a_rewind_that_is_killed_at_any_step_is_finished_by_the_next_one(tmp_path: Path) -> None:
    x, step, refused = 3, 0, 0
    stopped = oracle_of(tmp_path / "stopped", x, 0).outcome(database=False)
    while True:
        place = Place(tmp_path / f"job{step}")
        told_apart(place, x, 2)
        before = place.outcome(database=False)
        if not killed_at(step, partial(rewind, place.checkpoint, "x")):
            break
        try:
            Checkpoint.look(place.checkpoint, place.flow([[]], version(1)).graph)
            is_refused = False
        except CheckpointError as error:
            is_refused = "rewind of the checkpoint" in str(error)
        refused += is_refused
        if not is_refused:  # not begun, or done
            assert place.outcome(database=False) in (before, stopped)
        if is_refused or place.outcome(database=False) != stopped:
            rewind(place.checkpoint, "x")
        assert place.outcome(database=False) == stopped
        place.run(rows(x, 1, salt=5))
        step += 1
    assert step > 40
    assert refused > 30


def test_a_rewind_survives_a_power_loss_at_any_step(tmp_path: Path) -> None:
    x, place, oracle = 3, Stateful(tmp_path / "job"), Stateful(tmp_path / "oracle")
    place.root.mkdir()
    recorder = Recorder()
    with recorder.recording():
        told_apart(place, x, 2, durable=True)
        begin = len(recorder.operations)
        rewind(place.checkpoint, "x")
    oracle.run(rows(0, x), [ChangeAt.of(1, Update("stamp", version(2)))])
    assert place.state() == oracle.state()
    assert len(recorder.operations) > begin + 15
    oracle.run(rows(x, 2, salt=5))
    removed = [i for i, each in enumerate(recorder.operations) if isinstance(each, Removed)]
    [over] = [i for i in removed if str(recorder.operations[i]).endswith("rewind.json')")]
    last = len(recorder.operations)
    for number, end in enumerate([*range(begin, last), *[over + 1] * 8, *[last] * 8]):
        crashed = Stateful(tmp_path / f"crashed{number}")
        Disk(str(place.root)).after(recorder.operations[:end]).crash(random.Random(number), crashed.root)
        checkpoint = Checkpoint.of_any_flow(crashed.checkpoint)
        is_under_way = checkpoint.rewind_under_way() is not None
        is_begun = is_under_way or checkpoint.epochs()[-1] == x - 1
        assert is_begun or end <= over, "what was removed has come back"
        assert not is_under_way or end < last, "a rewind that has returned is done"
        if is_under_way or not is_begun:
            rewind(crashed.checkpoint, "x")
        crashed.run(rows(x, 2, salt=5))
        assert crashed.state() == oracle.state(), f"after {end} operations"


@pytest.mark.slow
def test_a_fork_that_is_killed_at_any_step_is_finished_by_the_next_one(tmp_path: Path) -> None:
    place = Place(tmp_path / "job")
    told_apart(place, 4, 1)
    before, step, resumed = place.outcome(), 0, 0
    wanted = oracle_of(tmp_path / "oracle", 4, 1).outcome()
    while True:
        new = Place(tmp_path / f"new{step}")
        if not killed_at(step, partial(fork, place.checkpoint, "x", new.checkpoint)):
            break
        identity = Path(new.checkpoint, "midstream.json")
        if not identity.exists():
            if Path(new.checkpoint, "fork.json").exists():
                resumed += 1
                with pytest.raises(CheckpointError, match="holds other things"):
                    new.run(rows(4, 1, salt=5))
            fork(place.checkpoint, "x", new.checkpoint)
        new.run(rows(4, 1, salt=5))
        assert [new.outcome()[name] for name in STATEFUL] == [wanted[name] for name in STATEFUL]
        step += 1
    assert step > 20
    assert resumed > 10
    assert place.outcome() == before
