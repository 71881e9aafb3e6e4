"""Sources that come and go while a flow runs, on the local runtime: no row of any is lost or read twice.

The oracle knows only what each source gives, epoch by epoch of its own: of every source, the rows that leave the job
are its first epochs, in order and without a gap; all of them if the flow has it at the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, ListSource, MemorySink, Remove, State, agg, rewind, tumbling
from midstream.checkpoint import location
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError, FlowError
from midstream.flow.edits import Edit
from midstream.ids import Epoch
from midstream.runtime.edge import DriverCrashed
from midstream.runtime.local.run import LocalRun
from midstream.runtime.local.runtime import _Runtime
from midstream.runtime.local.source_log import SourceLog
from midstream.testing import ChangeAt, Faults, ManualClock, run_local
from tests.oracle import Row

BAD_LUCK = Faults(crash=0.03, speculate=0.03, repeat=0.2, give_up=0.005, crash_driver=0.02, lose=0.2, lose_output=0.03)
NAMES = ("a", "b", "c", "d")
ROWS = 3
COUNTED = "s string, n bigint, total bigint"


def stream(name: str, epochs: int) -> ListSource:
    """Three numbers in each epoch, with the name of the source."""
    rows = [[{"s": name, "n": 10 * epoch + i} for i in range(ROWS)] for epoch in range(epochs)]
    return ListSource(rows, "s string, n bigint", partitions=2)


def count(key: str, row: Row, state: State) -> Row:
    state.set(state.get(0) + 1)
    return {**row, "total": state.get()}


def fails(row: Row) -> Row:
    raise ValueError(f"{row['s']} is not wanted")


def united(lengths: Mapping[str, int]) -> tuple[Flow, MemorySink]:
    """Sources a and b, united, and counted by source."""
    flow, out = Flow("sources"), MemorySink()
    both = flow.source("a", stream("a", lengths["a"])).union("all", flow.source("b", stream("b", lengths["b"])))
    both.key_by("by s", "s").process("count", count, one_to_one=True, returns=COUNTED).sink("out", out)
    return flow, out


@dataclass(frozen=True)
class Comes:
    """A source that comes; with a function that fails at its first row if it is broken."""

    name: str
    epochs: int
    is_broken: bool = False

    def edit(self) -> Edit:
        given = stream(self.name, self.epochs)
        build = (lambda rows: rows.map(f"broken {self.name}", fails)) if self.is_broken else None
        return Insert(build, source=lambda flow: flow.source(self.name, given), before="all")


@dataclass(frozen=True)
class Goes:
    """A source that goes."""

    name: str

    def edit(self) -> Edit:
        return Remove(self.name)


@dataclass(frozen=True)
class Case:
    """Changes of sources, each with its epoch and scheduler; ``lengths`` says how many epochs each source has."""

    seed: int
    lengths: Mapping[str, int]
    changes: tuple[tuple[int, str, tuple[Comes | Goes, ...]], ...]
    faults: Faults | None

    def run(self, checkpoint: Path) -> tuple[LocalRun, MemorySink]:
        flow, out = united(self.lengths)
        wanted = [ChangeAt.of(at, *(each.edit() for each in edits), scheduler=by) for at, by, edits in self.changes]
        options: dict[str, Any] = {"clock": ManualClock(), "checkpoint": str(checkpoint)}
        return run_local(flow, seed=self.seed, faults=self.faults, changes=wanted, **options), out


def case_of(seed: int, *, faults: bool = True) -> Case:
    """Changes that always fit: each adds a source that is not there, removes one of several, or both."""
    rng = random.Random(seed)
    lengths = {name: rng.randint(5, 9) for name in NAMES}
    there, spoilt, changes, at = ["a", "b"], set[str](), [], 0
    for _ in range(rng.randint(1, 4)):
        at += rng.randint(1, 2)
        edits: list[Comes | Goes] = []
        away = [name for name in NAMES if name not in there and name not in spoilt]
        staying = list(there)
        if away and (len(there) == 1 or rng.random() < 0.6):
            edits.append(Comes(name := rng.choice(away), lengths[name], is_broken := rng.random() < 0.2))
            spoilt |= {name} if is_broken else set()
            there += [] if is_broken else [name]
        if len(staying) > 1 and not spoilt.intersection(each.name for each in edits) and rng.random() < 0.5:
            edits.append(Goes(name := rng.choice(staying)))
            there.remove(name)
        if edits:
            changes.append((at, rng.choice(("fries", "epoch", "replay")), tuple(edits)))
    return Case(seed, lengths, tuple(changes), BAD_LUCK if faults else None)


def problems(case: Case, run: LocalRun, out: MemorySink) -> list[str]:
    """What differs from the oracle."""
    found = []
    reads, unsure = {"a", "b"}, set[str]()
    for record, (_, _, edits) in zip(run.history, case.changes, strict=False):
        is_broken = any(isinstance(each, Comes) and each.is_broken for each in edits)
        never_sent = record.outcome is Outcome.REFUSED and "the driver ended" in (record.error or "")
        wanted = Outcome.ROLLED_BACK if is_broken else Outcome.APPLIED
        if record.outcome not in (wanted, Outcome.PENDING) and not never_sent:
            found.append(f"{record.subjects}: {record.outcome}, {record.error}")
        if record.outcome is Outcome.PENDING:
            unsure |= {each.name for each in edits}
        elif record.outcome is Outcome.APPLIED:
            reads |= {each.name for each in edits if isinstance(each, Comes)}
            reads -= {each.name for each in edits if isinstance(each, Goes)}
    rows = [table.to_pylist() for _, table in sorted(out.tables.items())]
    for name in NAMES:
        got = [sorted(row["n"] for row in epoch if row["s"] == name) for epoch in rows]
        got = [epoch for epoch in got if epoch]
        gives = [[10 * epoch + i for i in range(ROWS)] for epoch in range(case.lengths[name])]
        if got != gives[: len(got)]:
            found.append(f"{name} gave {got}")
        if name in reads - unsure and len(got) != len(gives):
            found.append(f"{name} gave {len(got)} of {len(gives)} epochs")
        totals = [row["total"] for epoch in rows for row in epoch if row["s"] == name]
        if sorted(totals) != list(range(1, ROWS * len(got) + 1)):
            found.append(f"{name} was counted {totals}")
    return found


@pytest.mark.long
@pytest.mark.parametrize("block", [*range(3), *(pytest.param(block, marks=pytest.mark.slow) for block in range(3, 40))])
def test_no_row_of_any_source_is_lost_or_read_twice(block: int, tmp_path: Path) -> None:
    skipped = 0
    for seed in range(8 * block, 8 * (block + 1)):
        case = case_of(seed)
        try:
            run, out = case.run(tmp_path / str(seed))
        except FlowError:  # a change was refused because the driver died while it waited, and this one builds on it
            skipped += 1
            continue
        assert not (found := problems(case, run, out)), (seed, case.changes, found)
    assert skipped <= 3


# ── wrong hand-overs ──────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def by_place(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Positions stay in their places, as Spark itself would take them, whoever is there now."""

    def shifted(files: Mapping[str, bytes], epoch: Epoch, before: Any, after: Any) -> dict[str, bytes]:
        found = dict(files)
        for name, data in files.items():
            if name.startswith("offsets/"):
                lines = data.splitlines()
                places = (*lines[2:], *[b"-"] * len(after))[: len(after)]
                found[name] = b"\n".join([*lines[:2], *places])
        return found

    with patch.context() as patched:
        patched.setattr(location, "log_with_sources", shifted)
        yield


@contextmanager
def behind_what_was_planned(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The new query goes on behind the newest epoch that was planned, whether it is committed or not."""

    def load(log: SourceLog) -> None:
        planned = dict(log._read)
        loaded(log)
        newest = log._newest()
        if newest + 1 in planned:
            log._read[newest] = {**log._read.get(newest, {}), **planned[Epoch(newest + 1)]}

    loaded = SourceLog._load
    with patch.context() as patched:
        patched.setattr(SourceLog, "_load", load)
        yield


@pytest.mark.long
@pytest.mark.parametrize("wrong", [by_place, behind_what_was_planned])
def test_the_simulation_catches_wrong_hand_overs(wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught, made = 0, 0
    for seed in range(12):
        case = case_of(seed)
        with wrong(monkeypatch):
            run, out = case.run(tmp_path / str(seed))
        made += any(record.outcome is Outcome.APPLIED for record in run.history)
        caught += bool(problems(case, run, out))
    assert caught >= 0.2 * made > 1, f"{caught} of {made} are caught"


STEPS = ("computed", "sealed", "manifest written", "published", "counted", "log written", "log in use")


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_that_dies_at_a_step_leaves_the_old_sources_or_the_new_ones(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies at this step once for each change that is in progress then."""
    died = set[int]()

    def at(runtime: _Runtime, reached: str) -> None:
        change = runtime._driver.changes.on_trial
        if reached == step and change is not None and change.record.number not in died:
            died.add(change.record.number)
            raise DriverCrashed

    monkeypatch.setattr(_Runtime, "at", at)
    lengths = dict.fromkeys(NAMES, 7)
    changes = ((1, "fries", (Comes("c", 7), Goes("a"))), (4, "epoch", (Comes("a", 7),)), (6, "fries", (Goes("b"),)))
    case = Case(3, lengths, changes, None)
    run, out = case.run(tmp_path)
    assert died == {1, 2, 3}
    assert [record.outcome for record in run.history] == [Outcome.APPLIED] * 3
    assert problems(case, run, out) == []


def test_a_source_that_comes_back_continues_where_it_was_removed(tmp_path: Path) -> None:
    case = Case(0, dict.fromkeys(NAMES, 6), ((1, "fries", (Goes("b"),)), (3, "fries", (Comes("b", 6),))), None)
    run, out = case.run(tmp_path)
    assert [record.outcome for record in run.history] == [Outcome.APPLIED] * 2
    epochs = [sorted(row["n"] // 10 for row in table.to_pylist() if row["s"] == "b") for table in out.tables.values()]
    assert [set(each) for each in epochs] == [{0}, {1}, set(), set(), {2}, {3}, {4}, {5}]


def test_a_source_with_another_definition_continues_where_the_old_one_was(tmp_path: Path) -> None:
    """Removed and inserted under its name, in one change: rows of the new stream follow, from the same position on."""
    flow, out = united(dict.fromkeys(NAMES, 4))
    wider = ListSource([[{"s": "b", "n": 100 * epoch}] for epoch in range(6)], "s string, n bigint")
    again = Insert(source=lambda flow: flow.source("b", wider), before="all")
    run = run_local(flow, changes=[ChangeAt.of(1, Remove("b"), again)], checkpoint=str(tmp_path), clock=ManualClock())
    assert [record.outcome for record in run.history] == [Outcome.APPLIED]
    epochs = [sorted(row["n"] for row in table.to_pylist() if row["s"] == "b") for table in out.tables.values()]
    assert epochs == [[0, 1, 2], [10, 11, 12], [200], [300], [400], [500]]


def test_the_watermark_waits_for_an_added_source_and_not_for_a_removed_one(tmp_path: Path) -> None:
    def times(first: int, epochs: int) -> ListSource:
        rows = [[{"k": "x", "at": 60_000_000 * (first + epoch)}] for epoch in range(epochs)]
        return ListSource(rows, "k string, at timestamp", event_time="at")

    flow, out = Flow("timed"), MemorySink()
    rows = flow.source("a", times(0, 8)).union("all", flow.source("b", times(0, 2)))
    rows.key_by("by k", "k").aggregate("w", window=tumbling("1 minute"), n=agg.count()).sink("out", out)
    late = Insert(source=lambda flow: flow.source("c", times(3, 6)), before="all")
    changes = [ChangeAt.of(2, Remove("b")), ChangeAt.of(4, late)]
    run = run_local(flow, changes=changes, checkpoint=str(tmp_path), clock=ManualClock(), close_windows=True)
    assert [record.outcome for record in run.history] == [Outcome.APPLIED] * 2
    checkpoint = Checkpoint.of_any_flow(str(tmp_path))
    manifests = [checkpoint.manifest(epoch) for epoch in checkpoint.epochs()]
    marks = [each.watermark for each in manifests if each is not None and each.watermark is not None]
    assert marks == sorted(marks)  # it never goes back, although c begins behind it
    assert marks[3] == 180_000_000  # b, which has ended, no longer holds it up
    late_rows = sum(stats.rows_late for each in run.progress for stats in each.operators)
    assert sum(row["n"] for row in out.rows) + late_rows == 8 + 2 + 6


def test_a_rewind_does_not_cross_a_hand_over(tmp_path: Path) -> None:
    case = Case(0, dict.fromkeys(NAMES, 6), ((1, "fries", (Goes("b"),)),), None)
    case.run(tmp_path)
    with pytest.raises(CheckpointError, match=r"epoch 0 .* had other sources.*rewound to epochs 2, 3, 4\."):
        rewind(str(tmp_path), 0)
    assert rewind(str(tmp_path), 3).epoch == 3
