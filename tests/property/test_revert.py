"""Changes, failures, restarts and reverts in any order: what runs is always what a list of dicts says.

The model knows nothing of records, digests or updates. It has a dict for each change that was applied: what each
operator runs (by a mark that is never used twice), the columns that it declares, and the layout of the process's state.
Going back takes an old dict; nothing is ever undone step by step.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, NoopSink, Update
from midstream.change.change import Change
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.revert import taken_back, undoing
from midstream.change.trial import Changes, Request, RunFailure
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import Outcome
from midstream.control.messages import Commit
from midstream.errors import FlowError, SchemaError
from midstream.flow.functions import pack
from midstream.ids import Epoch, Revision
from midstream.metrics import OperatorStats
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore
from tests.examples import examples
from tests.restarts import restored

TYPES = {"k": "string"}
EXTRA = ("a", "b", "c")
OPERATORS = ("A", "B", "L", "F", "P")


@dataclass(frozen=True)
class Marked:
    """A function that is told from all others."""

    mark: int

    def __call__(self, *arguments: Any) -> Any:
        return arguments[0]


def brings(mark: int) -> tuple[str, ...]:
    """The columns that a table brings to the lookup."""
    return ("x", "y") if mark % 2 else ("x",)


def table(mark: int) -> pa.Table:
    return pa.table({"k": ["a"], **{name: pa.array([mark], pa.int32()) for name in brings(mark)}})


def flow() -> Flow:
    made = Flow("f")
    rows = made.source("in", ListSource([[]], "k string, n int"))
    rows = rows.map("A", Marked(0)).map("B", Marked(0)).lookup("L", table(0), on="k", unique=True)
    rows.filter("F", Marked(0)).key_by("key", "k").process("P", Marked(0)).sink("out", NoopSink())
    return made


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────

Ran = dict[str, Any]
"""Of a revision: ``marks`` by operator, ``declared`` columns by operator, the ``layout`` of P's state."""

SCRIPT: Ran = {
    "marks": dict.fromkeys(OPERATORS, 0),
    "declared": {"A": ("k", "n"), "B": ("k", "n"), "P": ("k", "n", "x")},
    "layout": 0,
}


@dataclass
class Asked:
    """Something that was asked for: a change, or to go back to what another one led to."""

    mark: int
    handle: Change | None = None
    operators: tuple[str, ...] = ()
    declared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    migrates: bool = False
    back_to: Asked | None = None
    layout: int = 0
    """Of a revert: the layout that P's state was going to have when it was asked for."""
    revision: int = 1
    ran: Ran | None = None
    """What it led to, once it is applied."""

    def after(self, now: Ran) -> Ran:
        if self.back_to is not None:
            assert self.back_to.ran is not None
            return self.back_to.ran
        return {
            "marks": {**now["marks"], **dict.fromkeys(self.operators, self.mark)},
            "declared": {**now["declared"], **self.declared},
            "layout": self.mark if self.migrates else now["layout"],
        }


def columns(ran: Ran) -> dict[str, tuple[str, ...]]:
    joined = (*ran["declared"]["B"], *brings(ran["marks"]["L"]))
    return {**ran["declared"], "L": joined, "F": joined}


# ── the job and the model side by side ────────────────────────────────────────────────────────────────────────────


class Job:
    def __init__(self, folder: Path) -> None:
        self.store, self.log = BlobStore(str(folder / "blobs")), ChangeLog(str(folder / "changes"))
        self.first = first_configuration(flow().graph, self.store, 2)
        self.changes = self.driver(self.first)
        self.committed = Revision(1)
        self.marks = 0
        self.applied = [Asked(0, ran=SCRIPT)]
        self.waiting: list[Asked] = []
        self.now = SCRIPT
        self.migrations: list[tuple[int, int]] = []

    def driver(self, configuration: Configuration) -> Changes:
        return Changes(configuration, self.store, self.log, stopwatch=lambda: 0.0, wall=lambda: 0.0)

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def as_if(self, until: Asked | None = None) -> Ran:
        """What will run once all that waits has taken effect, up to one of them."""
        now = self.now
        for asked in self.waiting:
            now = self.aim(asked.back_to) if asked.back_to is not None else asked.after(now)
            if asked is until:
                break
        return now

    def aim(self, target: Asked) -> Ran:
        return target.ran or self.as_if(target)

    # ── what may happen ───────────────────────────────────────────────────────────────────────────────────────────

    def change(self, operators: tuple[str, ...], extra: dict[str, tuple[str, ...]], migrates: bool) -> None:
        mark = self.mark()
        declared = {name: ("k", "n", *extra[name]) for name in operators if name in extra}
        asked = Asked(mark, None, operators, declared, migrates and "P" in operators)
        updates = []
        for name in operators:
            ddl = ", ".join(f"{column} {TYPES.get(column, 'int')}" for column in declared.get(name, ()))
            function = table(mark) if name == "L" else Marked(mark)
            step = Marked(mark) if asked.migrates and name == "P" else None
            updates.append(Update(name, function, migrate=step, returns=ddl or None))
        with suppress(SchemaError):  # columns that an operator downstream cannot take: told before anything changes
            self.request(asked, Request(tuple(updates), Scheduler.EPOCH, "ann"))

    def revert(self, target: Asked) -> None:
        mark, expected, aim = self.mark(), self.as_if(), self.aim(target)
        revision = Revision(target.revision if target.handle is None else target.handle.revision)
        if aim == expected:
            with pytest.raises(FlowError, match="there is nothing to revert"):
                self.undoing(revision, {})
            return
        steps = {}
        if aim["layout"] != expected["layout"]:
            with pytest.raises(FlowError, match="pass a migration back"):
                self.undoing(revision, {})
            steps["P"] = Marked(mark)
        undone = self.undoing(revision, steps)
        request = Request(undone.updates, Scheduler.EPOCH, "ann", undone.stored, back_to=undone)
        self.request(Asked(mark, back_to=target, layout=expected["layout"]), request)

    def undoing(self, revision: Revision, steps: dict[str, Any]) -> Any:
        return undoing(self.log.records(), revision, self.changes.newest(), self.store, steps)

    def request(self, asked: Asked, request: Request) -> None:
        asked.handle = self.changes.request(request, self.changes.check(request), 0.0)
        self.waiting.append(asked)

    def commit(self) -> None:
        """An epoch is committed that began with what is on trial; it is applied."""
        opened = self.changes.configuration
        met = tuple(OperatorStats(op.name, rows_in=1) for op in opened.graph)
        self.changes.committed(Commit(Epoch(7), opened.revision, met, 1, {}), opened)
        self.committed = opened.revision
        if self.waiting:
            asked = self.waiting.pop(0)
            assert asked.handle is not None
            assert asked.handle.outcome is Outcome.APPLIED
            after = asked.after(self.now)
            if after["layout"] != self.now["layout"]:
                self.migrations.append((asked.handle.revision, asked.mark))
            self.now = asked.ran = after
            asked.revision, asked.handle = asked.handle.revision, None
            self.applied.append(asked)

    def fail(self) -> None:
        """The epoch of what is on trial fails. Which reverts come to nothing by that, the model must know by itself."""
        if not self.waiting:
            return
        assert self.changes.failed(RunFailure("boom"), self.changes.configuration)
        waiting, self.waiting = self.waiting[1:], []
        for asked in waiting:
            assert asked.handle is not None
            is_refused = asked.handle.outcome is Outcome.REFUSED
            if asked.back_to is not None:
                assert is_refused == self.comes_to_nothing(asked, asked.back_to), asked.handle.error
            if not is_refused:
                self.waiting.append(asked)

    def restart(self) -> None:
        """The driver dies; another one goes on, with what was on trial."""
        found = restored(self.first, self.store, self.log, self.committed)
        self.changes = self.driver(found.configuration)
        assert (found.pending is None) == (not self.waiting)
        del self.waiting[1:]
        if found.pending is not None:
            self.waiting[0].handle = self.changes.resume(found.pending)

    def take_back(self, target: Asked) -> None:
        """The driver dies, and before another one starts, changes are taken back."""
        assert target.ran is not None
        mark = self.mark()
        needs_step = target.ran["layout"] != self.now["layout"]
        steps = {"P": self.store.put(pack(Marked(mark), "P"))} if needs_step else {}
        taken = taken_back(
            self.log.records(),
            Revision(target.revision),
            self.committed,
            self.store,
            steps,
            by="bob",
            now=0.0,
            how="offline",
        )
        assert (taken.record is None) == (target.ran == self.now and not self.waiting)
        for record in taken.changed:
            self.log.keep(record)
        self.waiting.clear()
        if taken.record is not None:
            if needs_step:
                self.migrations.append((taken.record.revision, mark))
            self.now = target.ran
            self.applied.append(Asked(mark, revision=taken.record.revision, ran=target.ran))
        self.restart()

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────

    def comes_to_nothing(self, asked: Asked, target: Asked) -> bool:
        """Whether there is nothing left to undo, or state is in a layout that the revert was not asked for."""
        if target.ran is None and target not in self.waiting:
            return True
        now, aim = self.as_if(), self.aim(target)
        return now == aim or now["layout"] not in (aim["layout"], asked.layout)

    def check(self) -> None:
        runs, migrations = self.now, list(self.migrations)
        if self.waiting:
            asked = self.waiting[0]
            assert asked.handle is self.changes.on_trial
            assert asked.handle is not None
            runs = asked.after(self.now)
            if runs["layout"] != self.now["layout"]:
                migrations.append((asked.handle.revision, asked.mark))
        found = self.changes.configuration
        graph = found.graph
        assert {name: tuple(graph[name].schema.names) for name in OPERATORS} == columns(runs)
        payloads = {name: graph.payloads[name] for name in OPERATORS}
        marks = {name: payload["x"][0].as_py() if name == "L" else payload.mark for name, payload in payloads.items()}
        assert marks == runs["marks"]
        steps = [(step.revision, step.function) for step in found.migrations.get("P", ())]
        assert [(revision, pickle.loads(self.store.get(digest)).mark) for revision, digest in steps] == migrations


WORDS = ("change", "change", "change", "commit", "commit", "revert", "revert", "fail", "restart", "take back")


def some(rng: random.Random, words: tuple[str, ...], least: int) -> tuple[str, ...]:
    return tuple(sorted(set(rng.choices(words, k=rng.randint(least, 2)))))


@pytest.mark.long
@given(seed=st.integers(0, 2**32))
@examples(40)
def test_what_runs_is_what_the_model_says(seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        for word in rng.choices(WORDS, k=20):
            if word == "change":
                extra = {name: some(rng, EXTRA, 0) for name in some(rng, ("A", "B"), 0)}
                job.change(some(rng, (*OPERATORS, "A", "B"), 1), extra, rng.random() < 0.5)
            elif word == "revert":
                job.revert(rng.choice([*job.applied, *job.waiting]))
            elif word == "take back":
                job.take_back(rng.choice(job.applied))
            else:
                getattr(job, word)()
            job.check()
