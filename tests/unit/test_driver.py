"""The driver of epochs: a committed epoch is final; the user's code never runs under the job's lock; time limits."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from midstream import FileSink, Flow, ListSource, MemorySink, Update
from midstream.change.configuration import first_configuration
from midstream.change.trial import Changes, Request
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.sink_files import SinkFolders
from midstream.checkpoint.sweeper import Sweeper
from midstream.control.messages import ChangeBegun, Commit, Prefetched, PrefetchNoted, WorkerId
from midstream.control.run_book import RunBook
from midstream.errors import CheckpointError, FlowError, JobFailed, MidstreamError
from midstream.flow.model import Graph
from midstream.ids import Digest, Epoch, ExecutorId, StageIndex
from midstream.planner.change_plan import Scheduler
from midstream.runtime import driver as driver_module
from midstream.runtime.driver import Driver
from midstream.runtime.edge import DriverCrashed, EpochEntry
from midstream.runtime.local import runtime as local
from midstream.runtime.local.data import source_epochs
from midstream.storage.blobs import BlobStore
from midstream.testing import ChangeAt, Faults, run_local

EPOCHS = [[{"k": "ab"[n % 2]} for n in range(6)] for _ in range(4)]


@dataclass(frozen=True)
class Tally:
    """Adds to a key's total, and emits what it added."""

    amount: int | None

    def __call__(self, key: Any, row: Any, state: Any) -> Any:
        added = int(state.now.timestamp()) if self.amount is None else self.amount
        state.set(state.get(0) + added)
        return {"k": row["k"], "added": added}


class ReplacesAnEpoch:
    """A sink as the docs recommend: an epoch that runs again replaces what it wrote."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[Any]] = {}

    def __call__(self, rows: Any, epoch: int) -> None:
        self.epochs[epoch] = rows.to_pylist()

    def totals(self) -> dict[str, int]:
        found = Counter[str]()
        for rows in self.epochs.values():
            for row in rows:
                found[row["k"]] += row["added"]
        return dict(found)


class SkipsAnEpoch(ReplacesAnEpoch):
    """A sink as some people write it: an epoch that is done is not written again."""

    def __call__(self, rows: Any, epoch: int) -> None:
        self.epochs.setdefault(epoch, rows.to_pylist())


class LateClock:
    """A clock that advances by a second at every reading."""

    def __init__(self) -> None:
        self.seconds = 0

    def wall_us(self) -> int:
        self.seconds += 1
        return 1_000_000 * self.seconds

    def stopwatch_ns(self) -> int:
        return 0


def tally_flow(function: Any, *sinks: Any, epochs: Any = EPOCHS) -> Flow:
    flow = Flow("tally")
    keyed = flow.source("in", ListSource(epochs, "k string", partitions=2)).key_by("key", "k")
    added = keyed.process("P", function, returns="k string, added bigint")
    for number, sink in enumerate(sinks):
        added.sink(f"out{number}", sink)
    return flow


def state_totals(checkpoint: Path) -> dict[str, int]:
    return {row["k"]: int(row["value"]) for row in read_state(str(checkpoint), "P").to_pylist()}


def file_totals(folder: Path) -> dict[str, int]:
    """What a plain reader of a file sink's folder sees."""
    found = Counter[str]()
    for row in ds.dataset(folder).to_table().to_pylist():
        found[row["k"]] += row["added"]
    return dict(found)


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the driver crash, once, at a step of the commit of epoch 1; the next driver may run another script."""

    def crash_at(step: str, script: Graph | None = None) -> None:
        def at(runtime: Any, found: str) -> None:
            if found == step and runtime._epoch == 1 and not crashed:
                crashed.append(step)
                if script is not None:
                    runtime._first = first_configuration(script, runtime.checkpoint.blobs, 2)
                raise DriverCrashed

        crashed: list[str] = []
        monkeypatch.setattr(local._Runtime, "at", at)

    return crash_at


# ── a committed epoch is final ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", ["computed", "sealed", "manifest written", "file in place", "published", "counted"])
@pytest.mark.parametrize("another", ["clock", "script", "change"])
def test_sinks_and_state_agree_after_a_crash_at_any_step_of_a_commit(
    tmp_path: Path, crash_at: Any, step: str, another: str
):
    replaced, skipped, files = ReplacesAnEpoch(), SkipsAnEpoch(), FileSink(tmp_path / "out")
    flow = tally_flow(Tally(None if another == "clock" else 1), replaced, skipped, files)
    crash_at(step, tally_flow(Tally(100), replaced, skipped, files).graph if another == "script" else None)
    changes = [ChangeAt.of(1, Update("P", Tally(100)), scheduler="epoch")] if another == "change" else []

    run_local(flow, clock=LateClock(), checkpoint=str(tmp_path / "c"), changes=changes)

    assert replaced.totals() == file_totals(tmp_path / "out") == state_totals(tmp_path / "c")
    assert list((tmp_path / "out" / "_staged").iterdir()) == []
    if another == "clock" or step not in ("computed", "sealed"):
        assert skipped.totals() == state_totals(tmp_path / "c"), "what a sink has skipped was the same"


def note_calls(monkeypatch: pytest.MonkeyPatch, notes: list[str], owner: Any, name: str, step: str) -> None:
    """Have a method note its calls, and work as before."""
    real = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        notes.append(step)
        return real(*given, **options)

    monkeypatch.setattr(owner, name, call)


def test_the_steps_of_a_commit_come_in_the_order_that_the_driver_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps: list[str] = []
    noted = partial(note_calls, monkeypatch, steps)
    noted(RunBook, "seal", "2 sealed")
    noted(driver_module, "keep_index", "3 index of histories")
    noted(local._Runtime, "secure", "4 log secured")
    noted(Changes, "secure", "4 changes secured")
    noted(Checkpoint, "commit", "5 manifest")
    noted(SinkFolders, "publish", "6 sinks")
    noted(Changes, "committed", "7 changes")
    noted(Sweeper, "after", "8 sweep")
    noted(local._Runtime, "_committed", "9 users")

    flow = tally_flow(Tally(1), FileSink(tmp_path / "out"))
    run_local(flow, checkpoint=str(tmp_path / "c"), audit="k")

    before, *epochs = "".join(f"{step}\n" for step in steps).split("2 sealed\n")
    assert before == "8 sweep\n", "at the start"
    assert len(epochs) == len(EPOCHS)
    order = [
        "3 index of histories",
        *("4 log secured", "4 changes secured"),
        "5 manifest",
        "6 sinks",
        "7 changes",
        "8 sweep",
        "9 users",
    ]
    assert [epoch.split("\n")[:-1] for epoch in epochs] == [order] * len(EPOCHS)


def test_an_epoch_that_is_committed_already_is_not_computed_again(tmp_path: Path, crash_at: Any):
    calls = Counter[int]()

    def counted(rows: Any, epoch: int) -> None:
        calls[epoch] += 1

    crash_at("manifest written")
    run_local(tally_flow(Tally(1), counted), checkpoint=str(tmp_path / "c"))
    assert calls == {0: 1, 1: 1, 2: 1, 3: 1}


def test_an_epoch_that_was_planned_again_for_other_rows_is_computed_again(
    tmp_path: Path, crash_at: Any, monkeypatch: pytest.MonkeyPatch
):
    """As when a power loss destroyed Spark's log, but not the manifest."""
    calls = Counter[int]()

    def counted(rows: Any, epoch: int) -> None:
        calls[epoch] += 1

    def begin(driver: Driver, epoch: Epoch, entry: EpochEntry) -> Any:
        return real_begin(driver, epoch, EpochEntry(entry.clock, f"planned for the {1 + calls[epoch]}. time"))

    crash_at("published")
    real_begin = Driver.begin
    monkeypatch.setattr(Driver, "begin", begin)
    run_local(tally_flow(Tally(1), counted, FileSink(tmp_path / "out")), checkpoint=str(tmp_path / "c"))
    assert calls == {0: 1, 1: 2, 2: 1, 3: 1}
    assert state_totals(tmp_path / "c") == file_totals(tmp_path / "out") == {"a": 12, "b": 12}


def test_a_pending_change_does_not_take_effect_in_an_epoch_that_has_a_manifest(tmp_path: Path, crash_at: Any):
    out = ReplacesAnEpoch()
    crash_at("manifest written")
    change = ChangeAt.of(1, Update("P", Tally(100)), scheduler="epoch")
    run = run_local(tally_flow(Tally(1), out), checkpoint=str(tmp_path / "c"), changes=[change])
    assert run.history[0].epoch == 2
    assert run.history[0].outcome is Outcome.APPLIED
    assert [{row["added"] for row in rows} for rows in out.epochs.values()] == [{1}, {1}, {100}, {100}]


def test_the_clock_of_an_epoch_is_the_same_in_every_run(tmp_path: Path, crash_at: Any):
    seen: dict[int, set[int]] = {}

    def clocks(rows: Any, epoch: int) -> None:
        seen.setdefault(epoch, set()).update(row["added"] for row in rows.to_pylist())

    crash_at("sealed")
    run_local(tally_flow(Tally(None), clocks), clock=LateClock(), checkpoint=str(tmp_path / "c"))
    assert [len(found) for found in seen.values()] == [1, 1, 1, 1]


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────


class SlowToPack:
    """A function whose ``__getstate__`` takes as long as a test wants."""

    def __init__(self) -> None:
        self.asked, self.may_go_on = threading.Event(), threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        self.asked.set()
        assert self.may_go_on.wait(60)
        return {}

    def __call__(self, key: Any, row: Any, state: Any) -> Any:
        return {"k": row["k"], "added": 0}


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """The driver of a job whose epochs run when the test calls for them."""
    graph = tally_flow(Tally(1), MemorySink()).graph
    with local.runtime_of(graph, checkpoint=str(tmp_path / "c")) as runtime:
        yield runtime._driver


def requested(update: Update, **options: Any) -> Request:
    return Request((update,), Scheduler.FRIES, by="ann@host", **options)


def test_epochs_continue_while_a_function_is_packed(driver: Driver):
    slow = SlowToPack()
    changing = threading.Thread(target=partial(driver.changing.request, requested(Update("P", slow))))
    changing.start()
    assert slow.asked.wait(60)
    begun = threading.Event()

    def begin() -> None:
        driver.begin(Epoch(0), EpochEntry(0))
        begun.set()

    threading.Thread(target=begin).start()
    try:
        assert begun.wait(60), "the lock was held while __getstate__ ran"
    finally:
        slow.may_go_on.set()
        changing.join(60)
    assert driver.changes.on_trial is not None


def test_a_change_overtaken_by_another_is_checked_again(driver: Driver):
    slow = SlowToPack()
    changing = threading.Thread(target=partial(driver.changing.request, requested(Update("P", slow))))
    changing.start()
    assert slow.asked.wait(60)
    first = driver.changing.request(requested(Update("P", Tally(7)), preflight=False))
    slow.may_go_on.set()
    changing.join(60)
    assert driver.changes.on_trial is first
    assert driver.changes.newest().revision == first.revision + 1, "the other one waits behind it"


def test_tasks_are_told_before_a_change_is_on_disk_and_no_epoch_is_committed_before_it_is(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    asked, may_go_on, settle = threading.Event(), threading.Event(), BlobStore._settle
    told: list[bool] = []

    def slow(store: BlobStore, digests: Collection[Digest]) -> None:
        if threading.current_thread() is changing:
            asked.set()
            assert may_go_on.wait(60)
        settle(store, digests)

    def sealed(*_: Any) -> list[Commit]:
        return [Commit(Epoch(0), driver.changes.newest().revision, (), 1, {})]

    changing = threading.Thread(
        target=partial(driver.changing.request, requested(Update("P", Tally(7)), preflight=False))
    )
    run = driver.begin(Epoch(0), EpochEntry(0))
    assert run is not None
    monkeypatch.setattr(BlobStore, "_settle", slow)
    monkeypatch.setattr(driver, "tell", lambda event: told.append(isinstance(event, ChangeBegun)))
    changing.start()
    assert asked.wait(60)
    assert told == [True], "the disk comes after the tasks"

    monkeypatch.setattr(driver._control, "tell", sealed)
    committing = threading.Thread(target=partial(driver._commit, run, 0.0, 0.0))
    written: list[str] = []
    noted = partial(note_calls, monkeypatch, written)
    noted(ChangeLog, "_append", "change")
    noted(Checkpoint, "commit", "manifest")
    committing.start()
    committing.join(60)
    assert written == ["change", "manifest"], "who needs it on disk does not wait for the other thread"
    may_go_on.set()
    changing.join(60)
    assert len(written) == 2, "once"


def test_a_change_of_a_job_that_is_stopping_is_refused_and_does_not_come_back(driver: Driver):
    slow = SlowToPack()
    refused: list[MidstreamError] = []

    def change() -> None:
        try:
            driver.changing.request(requested(Update("P", slow)))
        except MidstreamError as error:
            refused.append(error)

    changing = threading.Thread(target=change)
    changing.start()
    assert slow.asked.wait(60)
    driver.stopping()
    slow.may_go_on.set()
    changing.join(60)
    assert "is stopping" in str(refused[0])
    assert driver._checkpoint.changes.records() == []


def test_a_time_limit_is_on_record_and_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flow, checkpoint = tally_flow(Tally(1), MemorySink()), str(tmp_path / "c")
    with local.runtime_of(flow.graph, checkpoint=checkpoint) as runtime:
        runtime._driver.changing.request(requested(Update("P", Tally(7)), time_limit_s=1.5, preflight=False))
    limits: list[float] = []
    monkeypatch.setattr(local._Runtime, "start_timer", lambda runtime, seconds, then: limits.append(seconds))
    run = run_local(flow, checkpoint=checkpoint)
    assert limits == [1.5]
    assert run.history[0].outcome is Outcome.APPLIED


def test_an_epoch_that_is_overdue_when_its_sinks_are_done_is_not_committed(tmp_path: Path):
    """A function on the driver cannot always be interrupted; the limit counts nevertheless."""
    out = ReplacesAnEpoch()
    timers: list[Callable[[], None]] = []

    def slow(rows: Any, epoch: int) -> None:
        out(rows, epoch)
        if timers:
            timers.pop()()  # the time is up while the sink is at work

    class Timed(local._Runtime):
        def start_timer(self, seconds: float, then: Callable[[], None]) -> None:
            timers.append(then)

        def _maybe_give_up(self) -> None:
            """Nothing notices that the run is cancelled."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_Runtime", Timed)
        change = ChangeAt.of(1, Update("P", Tally(100)), scheduler="epoch", time_limit="1 second")
        run = run_local(tally_flow(Tally(1), slow), checkpoint=str(tmp_path / "c"), changes=[change])
    assert run.history[0].outcome is Outcome.ROLLED_BACK
    assert "was not done within the time limit of 1 s" in str(run.history[0].error)
    assert "Make the new P faster or set a longer time_limit" in str(run.history[0].error)
    assert out.totals() == state_totals(tmp_path / "c") == {"a": 12, "b": 12}


def test_an_epoch_that_is_to_run_again_when_its_sinks_are_done_is_not_committed(tmp_path: Path):
    """A change by ``replay`` applies to every row that is not committed, however late it comes."""
    out = ReplacesAnEpoch()
    runtimes: list[local._Runtime] = []
    update = Request((Update("P", Tally(100)),), Scheduler.REPLAY, by="ann@host")

    def change_late(rows: Any, epoch: int) -> None:
        out(rows, epoch)
        if epoch == 1 and runtimes:
            runtimes.pop()._driver.changing.request(update)

    class Busy(local._Runtime):
        def _maybe_give_up(self) -> None:
            """Nothing notices that the run is cancelled."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_Runtime", Busy)
        flow = tally_flow(Tally(1), change_late)
        with local.runtime_of(flow.graph, checkpoint=str(tmp_path / "c")) as runtime:
            runtimes.append(runtime)
            for epoch, rows in enumerate(source_epochs(flow.graph)):
                runtime.run_epoch(Epoch(epoch), rows)
    assert out.totals() == state_totals(tmp_path / "c") == {"a": 3 + 900, "b": 3 + 900}


class SlowToOpen:
    """A model that takes as long to load as a test wants: until something is written to a pipe."""

    def __init__(self, pipe: Path) -> None:
        self.pipe = pipe

    def open(self) -> None:
        self.pipe.read_text()

    def __call__(self, key: Any, row: Any, state: Any) -> Any:
        assert state.get() >= 1, "the state that the sample's epoch left"
        self.pipe.with_name("called").touch()
        return {"k": row["k"], "added": 0}


def test_state_of_the_sample_is_kept_while_a_model_loads(tmp_path: Path):
    epochs = [[{"k": "ab"[n % 2]} for n in range(6)] for _ in range(80)]
    flow, pipe = tally_flow(Tally(1), MemorySink(), epochs=epochs), tmp_path / "pipe"
    os.mkfifo(pipe)
    with local.runtime_of(flow.graph, partitions=1, checkpoint=str(tmp_path / "c")) as runtime:
        rows = list(source_epochs(flow.graph))
        for epoch in range(4):
            runtime.run_epoch(Epoch(epoch), rows[epoch])
        samples = runtime._driver.samples.files()
        assert samples
        update = requested(Update("P", SlowToOpen(pipe)))
        changing = threading.Thread(target=partial(runtime._driver.changing.request, update))
        changing.start()
        with pipe.open("w"):  # waits until the model is being loaded
            for epoch in range(4, 80):
                runtime.run_epoch(Epoch(epoch), rows[epoch])
            committed = runtime._driver.committed
            assert committed is not None
            assert not set(committed.files()).issuperset(samples), "without the preflight they would have been removed"
        changing.join(60)
        assert (tmp_path / "called").exists()
        assert runtime._driver.changes.on_trial is not None


def test_a_function_is_not_refused_because_the_state_of_its_sample_is_gone(tmp_path: Path):
    flow, checkpoint = tally_flow(Tally(1), MemorySink()), tmp_path / "c"
    with local.runtime_of(flow.graph, partitions=1, checkpoint=str(checkpoint)) as runtime:
        [rows, *_] = source_epochs(flow.graph)
        runtime.run_epoch(Epoch(0), rows)
        samples = runtime._driver.samples.files()
        assert samples
        for name in samples:
            (checkpoint / "state" / name).unlink()
        change = runtime._driver.changing.request(requested(Update("P", Tally(2))))
        assert change.outcome is Outcome.PENDING


# ── blame ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def broken(key: Any, row: Any, state: Any) -> Any:
    raise ValueError("broken")


def test_a_fix_requested_while_an_epoch_fails_is_not_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run began under the broken function; it runs again entirely under the fix."""
    out = ReplacesAnEpoch()
    fixes: list[Any] = []

    def fix(runtime: Any, message: Any, to: Any) -> Any:
        if type(message).__name__ == "TaskFailed" and not fixes:
            fixes.append(runtime._driver.changing.request(requested(Update("P", Tally(5)), preflight=False)))
        return real_say(runtime, message, to)

    real_say = local._Runtime.say
    monkeypatch.setattr(local._Runtime, "say", fix)
    run_local(tally_flow(broken, out), checkpoint=str(tmp_path / "c"))
    assert fixes[0].outcome is Outcome.APPLIED
    assert out.totals() == state_totals(tmp_path / "c") == {"a": 60, "b": 60}


# ── on the local runtime as on Spark: preflight, time limits, runs that are lost ──────────────────────────────────────


@dataclass
class Moment:
    """A fault that occurs once, at a step of epoch 2; again only if it is requested again."""

    times: int = 1

    def at(self, runtime: Any) -> bool:
        is_now = runtime._epoch == 2 and self.times > 0
        self.times -= is_now
        return is_now


def changed_in_1(**options: Any) -> ChangeAt:
    return ChangeAt.of(1, Update("P", Tally(100)), scheduler="epoch", **options)


def test_preflight_refuses_a_function_that_fails_on_real_rows_and_the_run_continues(tmp_path: Path):
    out = ReplacesAnEpoch()
    changes = [
        ChangeAt.of(1, Update("P", broken), preflight=True),
        ChangeAt.of(2, Update("P", Tally(5)), preflight=True),
    ]
    run = run_local(tally_flow(Tally(1), out), partitions=1, checkpoint=str(tmp_path / "c"), changes=changes)
    assert [record.outcome for record in run.history] == [Outcome.REFUSED, Outcome.APPLIED]
    assert "ValueError: broken" in str(run.history[0].error)
    assert [row["added"] for row in out.epochs[3]] == [5] * 6


def test_preflight_calls_a_changed_transform_on_no_rows(tmp_path: Path):
    def no_such_column(table: pa.Table) -> pa.Table:
        return table.select(["gone"])

    flow = Flow("f")
    rows = flow.source("in", ListSource(EPOCHS, "k string"))
    rows.transform("sql", lambda df: df, local=lambda table: table).sink("out", MemorySink())
    update = Update("sql", lambda df: df, local=no_such_column)
    with pytest.raises(FlowError, match="transform 'sql' fails on an empty table of its input's columns: KeyError"):
        run_local(flow, changes=[ChangeAt.of(1, update, scheduler="epoch", preflight=True)])


def test_a_change_that_exceeds_its_time_limit_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    moment, pause = Moment(), local._Runtime._pause
    out = ReplacesAnEpoch()

    def time_is_up(runtime: Any) -> None:
        if runtime._timer is not None and moment.at(runtime):
            runtime._timer()
        pause(runtime)

    monkeypatch.setattr(local._Runtime, "_pause", time_is_up)
    change = changed_in_1(time_limit="3 seconds")
    run = run_local(tally_flow(Tally(1), out), checkpoint=str(tmp_path / "c"), changes=[change])
    assert run.history[0].outcome is Outcome.ROLLED_BACK
    assert "was not done within the time limit of 3 s" in str(run.history[0].error)
    assert out.totals() == state_totals(tmp_path / "c") == {"a": 12, "b": 12}


@pytest.mark.parametrize(("losses", "outcome"), [(2, Outcome.APPLIED), (3, Outcome.ROLLED_BACK)])
def test_a_change_is_rolled_back_after_the_third_lost_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: int, outcome: Outcome
):
    moment, out = Moment(losses), ReplacesAnEpoch()

    def lost(runtime: Any) -> None:
        if moment.at(runtime):
            raise local._RunLost("no worker is available")

    monkeypatch.setattr(local._Runtime, "_pause", lost)
    run = run_local(tally_flow(Tally(1), out), checkpoint=str(tmp_path / "c"), changes=[changed_in_1()])
    assert run.history[0].outcome is outcome
    assert out.totals() == state_totals(tmp_path / "c")


def test_a_job_that_ends_with_a_lost_run_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drivers: list[Any] = []
    start_driver = local._Runtime._start_driver

    def started(runtime: Any) -> None:
        start_driver(runtime)
        drivers.append(runtime._driver)

    monkeypatch.setattr(local._Runtime, "_start_driver", started)
    out = ReplacesAnEpoch()
    faults = Faults(lose_run=0.05)
    for seed in range(10):
        run_local(tally_flow(Tally(1), out), seed=seed, faults=faults, checkpoint=str(tmp_path / f"{seed}"))
        assert out.totals() == state_totals(tmp_path / f"{seed}") == {"a": 12, "b": 12}
    assert len(drivers) > 10, "no run was lost"


def test_without_a_fix_the_job_fails(tmp_path: Path):
    with pytest.raises(JobFailed, match="ValueError: broken"):
        run_local(tally_flow(broken, MemorySink()), checkpoint=str(tmp_path / "c"))


def test_an_engine_log_that_goes_back_to_swept_state_is_refused(tmp_path: Path):
    """As when somebody restores an old copy of Spark's folder, but not of the rest."""
    epochs = [[{"k": "ab"[n % 2]} for n in range(6)] for _ in range(80)]
    flow, checkpoint = tally_flow(Tally(1), MemorySink(), epochs=epochs), str(tmp_path / "c")
    run_local(flow, checkpoint=checkpoint)
    message = "continues with epoch 20, but state was committed up to epoch 79, and"
    with (
        local.runtime_of(flow.graph, checkpoint=checkpoint) as runtime,
        pytest.raises(CheckpointError, match=message),
    ):
        runtime._driver.begin(Epoch(20), EpochEntry(0, "other rows"))


@pytest.mark.parametrize(("behind", "is_told"), [(0, True), (1, True), (2, False)])
def test_an_executor_that_finds_files_gone_is_only_told_of_if_they_should_be_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, behind: int, is_told: bool
):
    """Files of the state after the newest two epochs are kept; those of earlier ones are swept while somebody reads."""
    graph = tally_flow(Tally(1), MemorySink()).graph
    with local.runtime_of(graph, checkpoint=str(tmp_path / "c")) as runtime:
        runtime.run_all()
        driver = runtime._driver
        assert driver.committed is not None
        epoch = Epoch(driver.committed.epoch - behind)
        worker = WorkerId("host", 1, ExecutorId("1"))
        driver.hear([PrefetchNoted(Prefetched(worker, StageIndex(1), epoch, (), error="file missing"))])
    assert ("executor 1 could not load ahead: file missing" in caplog.text) is is_told
