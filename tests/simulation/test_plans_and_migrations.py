"""Changes of the plan during migrations, and migrations during changes of the plan, with faults; and savepoints of jobs
that have had either."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, ListSource, MemorySink, Move, Remove, Rescale, fork, rewind, take_savepoint
from midstream.change.configuration import configuration_of
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.ids import Epoch, StageIndex
from midstream.planner.assignment import Assignment
from midstream.planner.migration import StepStrategy
from midstream.runtime.local.runtime import run_graph
from midstream.testing import ChangeAt, Faults, LocalRun, ManualClock, MigrateAt
from tests.oracle import Row

pytestmark = pytest.mark.long

ROWS, KEYS, TEAMS = 20, 37, 5
COLUMNS = "id bigint, k string, team string, n int, m int"


def numbered(key: str, row: Row, state: Any) -> Row:
    """Number the rows of a key."""
    state.set(state.get(0) + 1)
    return {**row, "n": state.get()}


def by_team(key: str, row: Row, state: Any) -> Row:
    """Number the rows of a team; without it "m" is 0."""
    state.set(state.get(0) + 1)
    return {**row, "m": state.get()}


INSERT = Insert(
    lambda rows: rows.key_by("by team", "team").process("teams", by_team, returns=COLUMNS), between=("count", "out")
)
TAKE_OUT = (Remove("teams"), Remove("by team"))


def rows(first: int, epochs: int) -> list[list[Row]]:
    ids = [[ROWS * epoch + i for i in range(ROWS)] for epoch in range(first, first + epochs)]
    return [
        [
            {"id": n, "k": f"user {7 * n % KEYS}", "team": f"team {3 * n % KEYS % TEAMS}", "n": 0, "m": 0}
            for n in numbers
        ]
        for numbers in ids
    ]


class Job:
    """A flow that numbers the rows of each key; changes also let it number those of each team."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = str(folder), MemorySink()

    def run(
        self,
        first: int,
        epochs: int,
        *changes: ChangeAt | MigrateAt,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> LocalRun:
        self.out = MemorySink()
        flow = Flow("counts")
        source = flow.source("in", ListSource(rows(first, epochs), COLUMNS, partitions=2))
        source.key_by("by k", "k").process("count", numbered, returns=COLUMNS).sink("out", self.out)
        recorded: dict[StageIndex, Assignment] = {}
        if first:  # as starts on Spark do
            checkpoint = Checkpoint.of_any_flow(self.folder)
            manifest = checkpoint.newest_manifest()
            assert manifest is not None
            recorded.update(configuration_of(manifest, checkpoint.blobs).assignments)
        return run_graph(
            flow.graph,
            assignments=recorded,
            changes=changes,
            clock=ManualClock(),
            checkpoint=self.folder,
            seed=seed,
            faults=faults,
            durable=False,
        )

    def state(self, operator: str) -> dict[str, int]:
        shown = read_state(self.folder, operator).to_pylist()
        return {next(iter(row.values())): list(row.values())[-1] for row in shown}

    def owners(self) -> list[tuple[int, ...]]:
        checkpoint = Checkpoint.of_any_flow(self.folder)
        manifest = checkpoint.newest_manifest()
        assert manifest is not None
        found = configuration_of(manifest, checkpoint.blobs).assignments
        return [found[StageIndex(stage)].owners for stage in sorted(found)]


def assert_numbered(found: Sequence[Row], first: int, epochs: int) -> None:
    """Every row is there once; each key's rows are numbered without a gap, each team's as far as they were numbered."""
    given = [row for each in rows(first, epochs) for row in each]
    assert sorted(row["id"] for row in found) == [row["id"] for row in given]
    for column, number in (("k", "n"), ("team", "m")):
        numbers: dict[str, list[int]] = {}
        for row in found:
            if row[number]:
                numbers.setdefault(row[column], []).append(row[number])
        for key, each in numbers.items():
            assert sorted(each) == list(range(1, len(each) + 1)), (column, key)
    assert all(row["n"] for row in found)


def assert_ended(run: LocalRun) -> None:
    for record in run.history:
        assert record.outcome is Outcome.APPLIED or record.error, record


@pytest.mark.parametrize("seed", range(8))
def test_plans_change_during_migrations_and_the_other_way_round(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    epochs, job = 24, Job(tmp_path)
    moved = rng.sample(range(256), 6)
    strategy = rng.choice((StepStrategy.FLUID, StepStrategy.BATCHED))
    scheduler = rng.choice(("fries", "epoch", "replay"))
    # Even seeds migrate first, so that the plan changes between two steps; odd ones change the plan first.
    changes: list[ChangeAt | MigrateAt] = [
        MigrateAt.of(2 if seed % 2 == 0 else 4, Move(dict.fromkeys(moved, 1), "count"), strategy=strategy, queue=True),
        ChangeAt.of(4 if seed % 2 == 0 else 3, INSERT, scheduler=scheduler),
        MigrateAt.of(13, Rescale(3), strategy="batched", queue=True, if_possible=True, cancel=20),
        ChangeAt.of(rng.randrange(14, 17), *TAKE_OUT, scheduler=scheduler),
    ]
    faults = None
    if seed > 1:
        faults = Faults(
            crash=0.01, speculate=0.01, repeat=0.2, give_up=0.003, crash_driver=0.003, lose=0.2, lose_output=0.01
        )
    run = job.run(0, epochs, *changes, seed=seed, faults=faults)
    assert_numbered(job.out.rows, 0, epochs)
    assert_ended(run)
    assert any(row["m"] for row in job.out.rows), "the operator was never there"
    assert not any(row["m"] for row in list(job.out.tables.values())[-1].to_pylist()), "it never went"
    first = next(record for record in run.history if record.migration)
    assert first.outcome is Outcome.APPLIED
    assert first.migration
    assert first.migration.bins == sum(number % 2 == 0 for number in moved), "odd ones are there already"


@pytest.mark.parametrize("strategy", ["fluid", "budgeted"])
def test_a_migration_whose_stage_is_removed_ends_with_the_reason(strategy: str, tmp_path: Path):
    job = Job(tmp_path)
    run = job.run(
        0,
        16,
        ChangeAt.of(1, INSERT, scheduler="epoch"),
        MigrateAt.of(4, Move(dict.fromkeys(range(0, 40, 2), 1), "teams"), strategy=strategy, queue=True),
        ChangeAt.of(7, *TAKE_OUT, scheduler="epoch"),
    )
    assert_numbered(job.out.rows, 0, 16)
    [_, record, gone] = run.history
    assert gone.outcome is Outcome.APPLIED
    assert record.migration
    assert record.migration.steps, "it has begun"
    assert (record.outcome, record.error) == (Outcome.STOPPED, "the flow has none of its stages any more")


@pytest.mark.parametrize("place", [("in", "by k"), ("count", "out")], ids=["before", "behind"])
def test_a_step_is_undone_under_the_plan_that_is_in_force_by_then(place: tuple[str, str], tmp_path: Path):
    """Runs are lost until the step is undone. Meanwhile a change has renumbered stages, or added one."""
    insert = Insert(INSERT.build, between=place)
    met = 0
    for seed in (40, 51, 52, 75):  # in these, the third run is lost after the change has come
        job = Job(tmp_path / str(seed))
        run = job.run(
            0,
            6,
            MigrateAt.of(0, Rescale(3, "count"), strategy="sudden"),
            ChangeAt.of(1, insert, scheduler="epoch"),
            seed=seed,
            faults=Faults(lose_run=0.03),
        )
        assert_numbered(job.out.rows, 0, 6)
        [migration, change] = run.history
        if migration.outcome is Outcome.STOPPED and change.outcome is Outcome.APPLIED:
            assert migration.migration
            assert not migration.migration.steps
            assert [len(set(owners)) for owners in job.owners()] == [2, 2]
            met += change.epoch == 1
    assert met > 2, "no change opened in the epoch whose step was undone; choose other seeds"


def changed(folder: Path) -> Job:
    """A job whose plan was changed live, and with a savepoint after that."""
    job = Job(folder)
    job.run(0, 6, ChangeAt.of(1, INSERT, scheduler="epoch"))
    take_savepoint(job.folder, "changed")
    return job


def moved(folder: Path) -> Job:
    """A job whose bins were moved, and with a savepoint after that."""
    job = Job(folder)
    run = job.run(0, 6, MigrateAt.of(1, Rescale(3), strategy="sudden"))
    assert [record.outcome for record in run.history] == [Outcome.APPLIED]
    take_savepoint(job.folder, "moved")
    return job


def outcome(job: Job, operators: Sequence[str]) -> tuple[list[str], list[dict[str, int]], list[tuple[int, ...]]]:
    found = sorted(str((row["id"], row["n"], row["m"] > 0)) for row in job.out.rows)
    return found, [job.state(name) for name in operators], job.owners()


@pytest.mark.parametrize("way", ["savepoint", "fork", "rewind"])
def test_a_job_whose_plan_was_changed_goes_on_with_it(way: str, tmp_path: Path):
    job, oracle = changed(tmp_path / "job"), changed(tmp_path / "oracle")
    oracle.run(6, 3)
    wanted = outcome(oracle, ["count", "teams"])
    assert all(row["m"] for row in oracle.out.rows)
    if way != "savepoint":  # what comes after the savepoint must not show in what follows from it
        job.run(6, 4, ChangeAt.of(6, *TAKE_OUT, scheduler="epoch"))
        assert not job.out.rows[-1]["m"]
    job = gone_back(job, "changed", way, tmp_path)
    job.run(6, 3)
    assert outcome(job, ["count", "teams"]) == wanted


@pytest.mark.parametrize("way", ["savepoint", "fork", "rewind"])
def test_a_job_whose_bins_were_moved_goes_on_where_they_are(way: str, tmp_path: Path):
    job, oracle = moved(tmp_path / "job"), moved(tmp_path / "oracle")
    oracle.run(6, 3)
    wanted = outcome(oracle, ["count"])
    assert set(wanted[2][0]) == {0, 1, 2}
    if way != "savepoint":
        job.run(6, 4, MigrateAt.of(6, Move({1: 0, 3: 0}), strategy="sudden"))
        assert job.owners() != wanted[2]
    job = gone_back(job, "moved", way, tmp_path)
    job.run(6, 3)
    assert outcome(job, ["count"]) == wanted


def gone_back(job: Job, savepoint: str, way: str, folder: Path) -> Job:
    """The job that goes on from the savepoint."""
    if way == "fork":
        fork(job.folder, savepoint, str(folder / "fork"))
        return Job(folder / "fork")
    if way == "rewind":
        assert rewind(job.folder, savepoint).epoch == Epoch(5)
    return job
