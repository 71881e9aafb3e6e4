"""Control operations under faults: Chi's theorems, and failures at every step.

Theorem 1: an operation ends, and operators complete in the order of the stream. Theorem 2: a blocking operation that
touches state only in ``complete`` gives what one gets by letting the flow run dry, applying it, and going on.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from midstream import ControlContext, ControlMessage, ControlOperation, Flow, ListSource, MemorySink, Rescale, Update
from midstream.checkpoint.control_log import ControlOutcome
from midstream.ids import Epoch
from midstream.runtime.edge import DriverCrashed, EpochEntry
from midstream.runtime.local import runtime as local
from midstream.runtime.local.data import source_epochs
from midstream.runtime.local.runtime import runtime_of
from midstream.testing import ChangeAt, ControlAt, Faults, LocalRun, ManualClock, MigrateAt, run_local
from tests.simulation.flows import check, random_case, random_faults
from tests.simulation.keyed_flows import check_keyed, keyed_case_of
from tests.simulation.traced_controls import check_traces, random_controls

pytestmark = pytest.mark.long

BAD_LUCK = Faults(crash=0.02, speculate=0.03, repeat=0.3, give_up=0.01, crash_driver=0.01, lose=0.2, lose_output=0.02)
ROWS = 20


# ── Theorem 1 ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_operations_end_and_complete_in_the_order_of_the_stream():
    found: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        case = random_case(rng)
        case.faults = random_faults(rng)
        epochs = max(map(len, case.epochs.values()))
        case.controls = random_controls(rng, epochs)
        check(case)  # what the flow gives is not disturbed
        ends = epochs > 1 and not case.faults.crash_driver
        found += check_traces(case.flow.graph, case.controls, ends=ends)
    assert min(found[mode] for mode in ("blocking", "in-band", "fast")) >= 15, found


def test_operations_on_flows_with_state(tmp_path: Path):
    found: Counter[str] = Counter()
    for seed in range(14):
        case = keyed_case_of(seed, tmp_path / str(seed))
        epochs = sum(life.epochs for life in case.lives)
        case.controls = random_controls(random.Random(seed), epochs)
        check_keyed(case)
        found += check_traces(case.flow.graph, case.controls, ends=False)
    assert sum(found.values()) >= 10, found


# ── Theorem 2 ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Affine(ControlOperation):
    """Makes ``factor * value + term`` of the value of each key; not commutative, so each must be applied once, and in
    its turn."""

    mode = "blocking"

    def __init__(self, factor: int, term: int) -> None:
        self.factor, self.term = factor, term

    def prepare(self, graph: Any) -> dict[str, Any]:
        return {"sum": (self.factor, self.term)}

    def complete(self, ctx: ControlContext) -> dict[str, Any]:
        factor, term = ctx.configuration
        before = {}
        for key, state in ctx.state.items():
            before[key] = state.get()
            state.set(factor * state.get() + term)
        return before


class ReachesTooEarly(Affine):
    """The same, but it looks at state when the first message comes."""

    def next(self, ctx: ControlContext, message: ControlMessage) -> None:
        ctx.state.of("k1")


class RaisesAtOne(Affine):
    """The same, but it fails at the last partition, when it has changed state there."""

    def complete(self, ctx: ControlContext) -> dict[str, Any]:
        found = super().complete(ctx)
        if ctx.partition == 1:
            raise ValueError("not here")
        return found


def add_up(key: Any, row: dict[str, Any], state: Any) -> dict[str, Any]:
    state.set(state.get(0) + row["n"])
    return {"epoch": row["epoch"], "k": key, "id": row["id"], "n": state.get()}


def add_double(key: Any, row: dict[str, Any], state: Any) -> dict[str, Any]:
    state.set(state.get(0) + 2 * row["n"])
    return {"epoch": row["epoch"], "k": key, "id": row["id"], "n": state.get()}


class World:
    """A flow that adds up numbers by key, and the oracle that does the same row by row."""

    def __init__(self, folder: Path, epochs: int = 8) -> None:
        self.folder, self.out = str(folder / "checkpoint"), MemorySink()
        self.rows: list[list[dict[str, Any]]] = [
            [{"epoch": epoch, "id": ROWS * epoch + i, "k": f"k{(7 * epoch + i) % 9}", "n": i} for i in range(ROWS)]
            for epoch in range(epochs)
        ]

    def flow(self, sources: int = 1) -> Flow:
        flow = Flow("sums")
        source = flow.source("in", ListSource(self.rows, "epoch int, id int, k string, n bigint", partitions=sources))
        moved = source.map("same", lambda row: row)
        moved.key_by("by k", "k").process("sum", add_up, returns="epoch int, k string, id int, n bigint").sink(
            "out", self.out
        )
        return flow

    def run(self, *changes: ControlAt | ChangeAt | MigrateAt, **more: Any) -> LocalRun:
        flow = self.flow(more.pop("sources", 1))
        return run_local(flow, changes=changes, clock=ManualClock(), checkpoint=self.folder, **more)

    def check(self, run: LocalRun, operations: dict[int, tuple[int, int]]) -> list[dict[str, int]]:
        """Compare all rows with those of a flow that is frozen and drained before each operation; ``operations`` are
        those that must count, by number. Returns the state that each of them must have found."""
        due: dict[int, list[int]] = defaultdict(list)
        for record in run.controls:
            if record.outcome is ControlOutcome.COMPLETE and record.number in operations:
                assert record.epoch is not None
                due[record.epoch].append(record.number)
        sums: dict[str, int] = {}
        expected, seen = [], []
        for epoch, rows in enumerate(self.rows):
            for row in rows:
                sums[row["k"]] = sums.get(row["k"], 0) + row["n"]
                expected.append({"epoch": epoch, "k": row["k"], "id": row["id"], "n": sums[row["k"]]})
            for number in sorted(due[epoch]):
                seen.append(dict(sums))
                factor, term = operations[number]
                sums = {key: factor * value + term for key, value in sums.items()}
        assert sorted(self.out.rows, key=lambda row: row["id"]) == expected
        return seen


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 25))])
def test_blocking_operations_equal_freeze_drain_apply_resume(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    world = World(tmp_path)
    wanted = {number: (rng.randint(-2, 3), rng.randint(-5, 5)) for number in range(1, 5)}
    controls = [ControlAt(rng.randrange(6), Affine(*each)) for each in wanted.values()]
    controls.sort(key=lambda each: each.epoch)
    by_number = {
        number: (each.operation.factor, each.operation.term)
        for number, each in enumerate(controls, 1)
        if isinstance(each.operation, Affine)
    }
    moves = [MigrateAt.of(rng.randrange(6), Rescale(3), strategy="sudden", if_possible=True)]
    run = world.run(
        *controls,
        *(moves if seed % 2 else []),
        seed=seed,
        faults=BAD_LUCK if seed % 5 else None,
        executors=1 + seed % 2,
    )
    done = [record for record in run.controls if record.outcome is ControlOutcome.COMPLETE]
    assert len(done) == len(controls) or any(record.restarts for record in run.controls)
    seen = world.check(run, by_number)
    results = {
        each.handle.number: each.handle.result(0)
        for each in controls
        if each.handles and each.handle.is_over and each.handle.error is None
    }
    in_order = sorted(done, key=lambda record: (record.epoch, record.number))
    for record, before in zip(in_order, seen, strict=True):
        if record.number in results:
            assert results[record.number] == before


@pytest.mark.parametrize("kind", [ReachesTooEarly, RaisesAtOne])
@pytest.mark.parametrize("faults", [None, BAD_LUCK], ids=["calm", "faults"])
def test_an_operation_that_fails_leaves_nothing_behind(kind: type[Affine], faults: Faults | None, tmp_path: Path):
    for seed in range(4):
        world = World(tmp_path / str(seed), epochs=6)
        good, bad = ControlAt(1, Affine(2, 1)), ControlAt(2, kind(10, 10))
        run = world.run(good, bad, seed=seed, faults=faults)
        [first, second] = run.controls
        assert first.outcome is ControlOutcome.COMPLETE
        assert second.outcome is ControlOutcome.FAILED
        assert second.epoch is None
        assert second.error is not None
        assert ("cannot reach state" if kind is ReachesTooEarly else "ValueError: not here") in second.error
        world.check(run, {1: (2, 1)})


@pytest.mark.parametrize("mode", ["in-band", "fast"])
@pytest.mark.parametrize("handler", ["begin", "next", "complete", "dispose", "merge", "finish"])
def test_a_failure_of_an_operation_that_does_not_block_does_not_even_end_the_run(
    mode: str, handler: str, tmp_path: Path
):
    class Raises(ControlOperation):
        def complete(self, ctx: ControlContext) -> Any:
            ctx.send([1])
            return [ctx.operator]

    def fail(*_: Any) -> Any:
        raise ValueError("on purpose")

    setattr(Raises, handler, fail)
    Raises.mode = mode
    world, control = World(tmp_path), ControlAt(2, Raises())
    run = world.run(control)
    world.check(run, {})
    assert "ValueError: on purpose" in str(control.handle.error)
    assert not any("Abandoned" in line for line in run.story)


@pytest.mark.parametrize(
    ("mode", "handler", "says"),
    [
        ("blocking", "begin", "begin cannot reach state, because rows may still come"),
        ("blocking", "dispose", "dispose cannot reach state"),
        ("in-band", "complete", "runs in the middle of an epoch, where state cannot be reached; use mode='blocking'"),
        ("fast", "complete", "runs in the middle of an epoch"),
    ],
)
def test_state_is_reached_where_it_may_be_and_nowhere_else(mode: str, handler: str, says: str, tmp_path: Path):
    class Touches(ControlOperation):
        def prepare(self, graph: Any) -> dict[str, Any]:
            return {"sum": None}

    def touch(self: Any, ctx: ControlContext, *_: Any) -> None:
        for _, state in ctx.state.items():
            state.set(10**6)

    setattr(Touches, handler, touch)
    Touches.mode = mode
    world, control = World(tmp_path), ControlAt(2, Touches())
    run = world.run(control)
    assert says in str(control.handle.error)
    world.check(run, {})


def test_state_that_a_handler_keeps_cannot_be_used_after_complete(tmp_path: Path):
    """It is committed as complete has left it; what is set later is refused, or at least does not count."""

    class Keeps(Affine):
        def complete(self, ctx: ControlContext) -> dict[str, Any]:
            ctx.variables["kept"] = [state for _, state in ctx.state.items()]
            return super().complete(ctx)

        def dispose(self, ctx: ControlContext) -> None:
            for state in ctx.variables.get("kept", ()):
                state.set(10**6)

    world, control = World(tmp_path), ControlAt(2, Keeps(3, 1))
    run = world.run(control)
    [record] = run.controls
    world.check(run, {1: (3, 1)} if record.outcome is ControlOutcome.COMPLETE else {})


def test_a_message_with_too_large_a_value_is_refused(tmp_path: Path):
    class Sends(ControlOperation):
        result_limit = 1000
        mode = "blocking"

        def complete(self, ctx: ControlContext) -> Any:
            ctx.send(bytes(100_000))

    world, control = World(tmp_path), ControlAt(2, Sends())
    run = world.run(control)
    assert "a value to send" in str(control.handle.error)
    assert "1,000 are allowed" in str(control.handle.error)
    world.check(run, {})


def test_a_change_waits_while_operations_travel_among_rows(tmp_path: Path):
    for seed in range(10):
        world = World(tmp_path / str(seed), epochs=5)
        run = world.run(ControlAt(1, Affine(1, 1)), ChangeAt.of(2, Update("sum", add_double)), seed=seed)
        [record] = run.history
        assert str(record.outcome) == "applied"
        assert [each.outcome for each in run.controls] == [ControlOutcome.COMPLETE]


# ── where messages are among rows ─────────────────────────────────────────────────────────────────────────────────


class Positions(ControlOperation):
    """How many rows an operator had taken when each message came, and how many it had given when it completed."""

    def next(self, ctx: ControlContext, message: ControlMessage) -> None:
        ctx.variables.setdefault("rows", []).append((message.sender, ctx.stats.rows_in))

    def complete(self, ctx: ControlContext) -> Any:
        return {ctx.operator: {ctx.partition: [ctx.variables["rows"], ctx.stats.rows_out]}}

    def merge(self, one: Any, other: Any) -> Any:
        return {key: {**one.get(key, {}), **other.get(key, {})} for key in {*one, *other}}


def test_a_message_is_handled_between_the_rows_between_which_it_was_sent(tmp_path: Path):
    """Sources send it before their first row; later stages when it has come from all senders, among their rows."""
    for seed in range(6):
        rows = [[{"n": 10 * epoch + i} for i in range(30)] for epoch in range(4)]
        flow, out, control = Flow("positions"), MemorySink(), ControlAt(1, Positions())
        source = flow.source("in", ListSource(rows, "n bigint", partitions=3))
        first = source.key_by("by n", "n").process("first", lambda key, row, state: row)
        first.key_by("again", "n").process("second", lambda key, row, state: row).sink("out", out)
        run_local(flow, changes=[control], seed=seed, partitions=1, clock=ManualClock())
        found = control.handle.result(0)
        given = found["in"]
        assert all(rows_before == [(None, 0)] and so_far == 0 for rows_before, so_far in given.values())
        [(at_first, left_first)] = found["first"].values()
        senders = [sender for sender, _ in at_first]
        assert senders == [0, 1, 2]
        assert [before for _, before in at_first] == [0, 10, 20], "all rows of earlier senders, none of later ones"
        assert left_first == 20
        [(at_second, _)] = found["second"].values()
        assert at_second == [(0, 20)], "the rows that were sent before the message, and no other"
        assert sorted(row["n"] for row in out.rows) == sorted(row["n"] for epoch in rows for row in epoch)


@pytest.mark.parametrize("handler", ["begin", "next", "complete", "dispose", "merge"])
def test_any_failure_in_a_task_of_a_blocking_operation_takes_it_back(handler: str, tmp_path: Path):
    class Raises(Affine):
        def prepare(self, graph: Any) -> dict[str, Any]:
            return {**super().prepare(graph), "in": None, "same": None}

        def complete(self, ctx: ControlContext) -> Any:
            ctx.send([1])
            return super().complete(ctx) if ctx.operator == "sum" else {}

    def fail(*_: Any) -> Any:
        raise ValueError("on purpose")

    world, operation = World(tmp_path), Raises(5, 5)
    setattr(Raises, handler, fail)
    run = world.run(ControlAt(2, operation), sources=2)
    [record] = run.controls
    assert record.outcome is ControlOutcome.FAILED
    assert "ValueError: on purpose" in str(record.error)
    world.check(run, {})


# ── the driver dies ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", ["computed", "sealed", "manifest written", "published", "counted"])
def test_a_driver_that_dies_at_any_step_applies_it_once_under_the_same_number(step: str, tmp_path: Path):
    crashed: list[str] = []

    def at(runtime: Any, found: str) -> None:
        pending = runtime._driver.controlling.is_aligned
        done = any(each.outcome is ControlOutcome.COMPLETE for each in runtime.checkpoint.controls.records())
        if found == step and not crashed and (pending or (done and step in ("published", "counted"))):
            crashed.append(found)
            raise DriverCrashed

    world, control = World(tmp_path), ControlAt(2, Affine(3, 1))
    with patch.object(local._Runtime, "at", at):
        run = world.run(control)
    assert crashed == [step]
    [record] = run.controls
    assert (record.number, record.outcome) == (1, ControlOutcome.COMPLETE)
    world.check(run, {1: (3, 1)})


def test_an_operation_that_drivers_do_not_survive_is_given_up(tmp_path: Path):
    deaths = []

    def at(runtime: Any, found: str) -> None:
        if found == "computed" and runtime._driver.controlling.is_aligned:
            deaths.append(runtime.checkpoint.controls.records()[0].restarts)
            raise DriverCrashed

    world = World(tmp_path)
    with patch.object(local._Runtime, "at", at):
        run = world.run(ControlAt(2, Affine(3, 1)))
    [record] = run.controls
    assert deaths == [0, 1, 2, 3]
    assert record.outcome is ControlOutcome.FAILED
    assert "4 drivers died while it was in progress" in str(record.error)
    world.check(run, {})


def test_a_stopped_job_continues_its_operation(tmp_path: Path):
    world = World(tmp_path, epochs=3)
    control = ControlAt(2, Affine(2, 5))  # at the end of the last epoch, or in it
    world.run(control, seed=3)
    first = control.handle.record
    after = World(tmp_path, epochs=2)
    run = after.run()
    [record] = run.controls
    assert record.number == first.number
    assert record.outcome is ControlOutcome.COMPLETE
    if first.outcome is ControlOutcome.PENDING:
        assert "it goes on when the job starts again" in str(control.handle.error)


def test_an_epoch_that_is_planned_anew_for_other_rows_applies_it_again(tmp_path: Path):
    """As when the engine's log was lost: the last manifest does not count, nor what was complete with it."""
    world = World(tmp_path, epochs=3)
    run = world.run(ControlAt(1, Affine(3, 1)), seed=4)
    [record] = run.controls
    assert (record.epoch, record.outcome) == (2, ControlOutcome.COMPLETE)
    with runtime_of(world.flow().graph, checkpoint=world.folder, clock=ManualClock()) as runtime:
        runtime._log[Epoch(2)] = EpochEntry(0, "other rows")
        runtime.run_epoch(Epoch(2), list(source_epochs(world.flow().graph))[2])
        runtime.run_epoch(Epoch(3), list(source_epochs(world.flow().graph))[2])
    [record] = runtime.result.controls
    assert (record.epoch, record.outcome) == (2, ControlOutcome.COMPLETE)
    sums: Counter[str] = Counter()
    for rows in (*world.rows[:2], world.rows[2]):
        for row in rows:
            sums[row["k"]] += row["n"]
    first = {key: 3 * value + 1 for key, value in sums.items()}
    for row in world.rows[2]:
        first[row["k"]] += row["n"]
    last = {row["k"]: row["n"] for row in world.out.tables[3].to_pylist()}
    assert last == {key: first[key] for key in last}


# ── values and limits ─────────────────────────────────────────────────────────────────────────────────────────────


class Large(ControlOperation):
    mode = "blocking"
    result_limit = 1000

    def __init__(self, by_reference: bool) -> None:
        self.by_reference = by_reference

    def complete(self, ctx: ControlContext) -> Any:
        value = bytes(100_000)
        return [ctx.store(value) if self.by_reference else value]


def test_a_result_that_is_too_large_is_refused_and_goes_by_reference(tmp_path: Path):
    world = World(tmp_path)
    refused, stored = ControlAt(1, Large(False)), ControlAt(3, Large(True))
    run = world.run(refused, stored)
    world.check(run, {})
    assert "bytes, and 1,000 are allowed. Return ctx.store(value)" in str(refused.handle.error)
    with pytest.raises(Exception, match=r"control operation 1 \(Large\): .*1,000 are allowed"):
        refused.handle.result(0)
    references = stored.handle.result(0)
    assert [len(each.load()) for each in references] == [100_000] * len(references)
    assert len(references) == 3 + 2, "three operators in the task of the source, one in each of two behind the exchange"


def test_values_of_old_operations_are_removed(tmp_path: Path):
    world = World(tmp_path, epochs=16)
    controls = [ControlAt(epoch, Large(True)) for epoch in range(14)]
    world.run(*controls)
    left = sorted(path.name for path in (tmp_path / "checkpoint" / "control-values").iterdir())
    assert left == [f"{number:010d}" for number in range(5, 15)]


def test_a_handler_that_takes_too_long_fails_the_operation(tmp_path: Path):
    class Slow(ControlOperation):
        mode = "blocking"
        time_limit = "1 us"

        def complete(self, ctx: ControlContext) -> Any:
            return sum(range(10_000))

    flow, out, control = Flow("slow"), MemorySink(), ControlAt(0, Slow())
    flow.source("in", ListSource([[{"n": 1}], [{"n": 2}], [{"n": 3}]], "n bigint")).sink("out", out)
    run_local(flow, changes=[control])
    assert "took 0.0 s, and 1e-06 s are allowed" in str(control.handle.error)
    assert [row["n"] for row in out.rows] == [1, 2, 3]


def test_an_epoch_without_operations_sends_no_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from midstream.engine import control_handlers, task_controls

    made: list[Any] = []
    monkeypatch.setattr(task_controls.TaskControls, "__init__", lambda *_: made.append(1))
    monkeypatch.setattr(control_handlers.HandlersInTask, "__init__", lambda *_: made.append(2))
    world = World(tmp_path, epochs=3)
    world.check(world.run(), {})
    assert made == []


def test_values_that_pass_through_a_stage_arrive_once():
    class Says(ControlOperation):
        def next(self, ctx: ControlContext, message: ControlMessage) -> None:
            ctx.variables.setdefault("heard", []).extend(message.value or [])

        def complete(self, ctx: ControlContext) -> Any:
            ctx.send([(ctx.operator, ctx.partition)])
            return {ctx.operator: [sorted(ctx.variables.get("heard", []))]}

    flow, out, control = Flow("around"), MemorySink(), ControlAt(0, Says())
    source = flow.source("in", ListSource([[{"n": i} for i in range(9)]] * 3, "n bigint", partitions=3))
    around = source.map("around", lambda row: row)
    keyed = source.key_by("by n", "n").process("keyed", lambda key, row, state: row)
    again = keyed.key_by("again", "n").process("last", lambda key, row, state: row)
    again.union("all", around).sink("out", out)
    run_local(flow, changes=[control], partitions=2, clock=ManualClock())
    found = control.handle.result(0)
    senders = [("around", 0), ("around", 1), ("around", 2)]
    assert len(found["all"]) == 2
    for partition, heard in enumerate(sorted(found["all"])):
        told = [each for each in heard if each[0] == "around"]
        assert told == senders or not told, (partition, heard)
    assert any(("around", 0) in heard for heard in found["all"])


# ── one by one ────────────────────────────────────────────────────────────────────────────────────────────────────


class Notes(ControlOperation):
    """Writes down every call of a handler, with its configuration."""

    def __init__(self, file: Path, mode: str, fails_at: str = "") -> None:
        self.file, self.mode, self.fails_at = file, mode, fails_at

    def prepare(self, graph: Any) -> dict[str, Any]:
        self.note("prepare", "driver")
        return {"in": "count", "sum": {"split": True}}

    def begin(self, ctx: ControlContext, message: ControlMessage) -> None:
        self.note("begin", ctx)

    def next(self, ctx: ControlContext, message: ControlMessage) -> None:
        self.note("next", ctx, message.value)
        if ctx.operator == self.fails_at:
            raise ValueError("on purpose")

    def complete(self, ctx: ControlContext) -> Any:
        self.note("complete", ctx, ctx.configuration)
        ctx.send([f"{ctx.operator} {ctx.partition}"])
        return None

    def dispose(self, ctx: ControlContext) -> None:
        self.note("dispose", ctx)

    def finish(self, result: Any) -> Any:
        self.note("finish", "driver", result)
        return "done"

    def note(self, handler: str, at: Any, *more: Any) -> None:
        place = at if isinstance(at, str) else f"{at.operator}/{at.partition}"
        with self.file.open("a", encoding="utf-8") as file:
            file.write(" ".join([place, handler, *map(str, more)]) + "\n")


@pytest.mark.parametrize("mode", ["blocking", "in-band"])
def test_handlers_are_called_in_order_with_their_own_configuration(mode: str, tmp_path: Path):
    world, control = World(tmp_path), ControlAt(1, Notes(tmp_path / "notes", mode))
    world.check(world.run(control, sources=2), {})
    assert control.handle.result(0) == "done"
    lines = (tmp_path / "notes").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("driver prepare", "driver finish None")
    at = {place: [line.partition(" ")[2] for line in lines if line.startswith(place)] for place in ("in/0", "sum/1")}
    assert at["in/0"] == ["begin", "next None", "complete count", "dispose"]
    begin, *messages, complete, dispose = at["sum/1"]
    assert (begin, complete, dispose) == ("begin", "complete {'split': True}", "dispose")
    # The map and the key_by have no configuration: they have passed on what the source's operator sent.
    assert messages == ["next ['in 0']", "next ['in 1']"]
    assert not any(line.startswith(("same", "by k")) for line in lines)


@pytest.mark.parametrize("mode", ["blocking", "in-band", "fast"])
def test_operators_that_began_are_disposed_of_when_a_handler_fails(mode: str, tmp_path: Path):
    world, control = World(tmp_path), ControlAt(1, Notes(tmp_path / "notes", mode, fails_at="in"))
    world.check(world.run(control), {})
    assert "ValueError: on purpose" in str(control.handle.error)
    lines = (tmp_path / "notes").read_text().splitlines()
    begun = [line.split()[0] for line in lines if line.endswith("begin")]
    assert sorted(line.split()[0] for line in lines if line.endswith("dispose")) == sorted(begun)
    assert not any("finish" in line for line in lines)


def test_a_fast_operation_whose_messages_are_lost_is_given_to_the_next_tasks(tmp_path: Path):
    class Rows(ControlOperation):
        mode = "fast"

        def complete(self, ctx: ControlContext) -> Any:
            return [(ctx.operator, ctx.partition)]

    missed = 0
    for seed in range(12):
        world = World(tmp_path / str(seed))
        controls = [ControlAt(epoch, Rows()) for epoch in (1, 2, 3)]
        world.check(world.run(*controls, seed=seed, faults=Faults(lose=1.0)), {})
        for control in controls:
            found = control.handle.result(0)
            assert found
            assert len(found) == len(set(found))
            missed += control.handle.record.missed
    assert missed, "some of them were told, and did not hear"


def test_messages_are_small_whatever_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import msgspec

    from midstream.control.messages import EpochOpened, Event
    from midstream.runtime.local.control import LocalControl

    sizes: list[int] = []
    tell = LocalControl.tell

    def measured(self: LocalControl, event: Event) -> Any:
        answers = tell(self, event)
        if isinstance(event, EpochOpened) and event.controls:
            sizes.append(len(msgspec.msgpack.encode(event.controls)))
        return answers

    class Heavy(Affine):
        def prepare(self, graph: Any) -> dict[str, Any]:
            return {"sum": (2, 1, bytes(5_000_000))}

        def complete(self, ctx: ControlContext) -> Any:
            return len(ctx.configuration[2])

    monkeypatch.setattr(LocalControl, "tell", measured)
    world, control = World(tmp_path), ControlAt(1, Heavy(2, 1))
    world.run(control)
    assert control.handle.result(0) == 2 * 5_000_000
    assert sizes
    assert max(sizes) < 10_000
