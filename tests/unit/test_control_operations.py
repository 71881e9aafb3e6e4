"""Control operations: what is refused, one by one, and the decisions of a fast one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from midstream import ControlOperation, Flow, ListSource, MemorySink
from midstream.checkpoint.control_log import ControlLog, ControlOutcome, ControlRecord
from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal, read, replay
from midstream.control.messages import (
    ChangeBegun,
    Commit,
    ControlBegun,
    ControlNoted,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    GiveUpRun,
    Handle,
    Handled,
    Received,
    Send,
    TaskFailed,
    TaskFailure,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
)
from midstream.engine.control_operations import ControlMode, prepared
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.errors import CheckpointError, ControlFailed, FlowError, FunctionError, ProtocolError
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex
from midstream.runtime.control_handle import ControlHandle
from midstream.runtime.handler_watch import HandlerWatch
from midstream.testing import ControlAt, run_local


def some_flow() -> Flow:
    flow = Flow("shop")
    source = flow.source("orders", ListSource([[{"n": 1}]] * 4, "n bigint", partitions=2))
    kept = source.transform("sorted", lambda df: df, local=lambda table: table)
    kept.key_by("by n", "n").map("double", lambda row: {"n": 2 * row["n"]}).sink("out", MemorySink())
    return flow


# ── what is refused before anything has changed ───────────────────────────────────────────────────────────────────


class Named(ControlOperation):
    def __init__(self, *names: Any) -> None:
        self.names = names

    def prepare(self, graph: Any) -> Any:
        return dict.fromkeys(self.names)


class PreparesNothing(ControlOperation):
    def prepare(self, graph: Any) -> Any:
        return ["double"]


class PrepareRaises(ControlOperation):
    def prepare(self, graph: Any) -> Any:
        raise KeyError("colour")


class HoldsLock(ControlOperation):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class GivesLock(ControlOperation):
    def prepare(self, graph: Any) -> Any:
        return {"double": threading.Lock()}


def with_options(**options: Any) -> ControlOperation:
    odd: ControlOperation = type("Odd", (ControlOperation,), options)()
    return odd


@pytest.mark.parametrize(
    ("operation", "kind", "says"),
    [
        (Named("doubel"), FlowError, r"there is no operator 'doubel'; there are orders, by n, double.*mean 'double'\?"),
        (Named("out"), FlowError, "handlers cannot run at 'out', a sink, which Spark runs outside of tasks"),
        (Named("sorted"), FlowError, "handlers cannot run at 'sorted', a transform"),
        (Named(), FlowError, "prepare names no operator; there are orders"),
        (Named(7), FlowError, "there is no operator 7"),
        (PreparesNothing(), FunctionError, r"prepare returned list \['double'\]; expected a dict"),
        (PrepareRaises(), FunctionError, "PrepareRaises: prepare raised KeyError: 'colour'"),
        (HoldsLock(), FunctionError, "HoldsLock cannot be sent to workers, because .*lock.* cannot be pickled"),
        (GivesLock(), FunctionError, "GivesLock cannot be sent to workers"),
        (Named, FunctionError, r"found the class Named; give an instance of it, Named\(…\)"),
        (42, FunctionError, "expected a control operation, found int 42; subclass midstream.ControlOperation"),
        (with_options(mode="inband"), FlowError, "mode='inband' is not one of .*Did you mean 'in-band'"),
        (with_options(time_limit="soon"), FlowError, "time_limit='soon' is not a length of time"),
        (with_options(result_limit=0), FlowError, "result_limit=0 must be a number of bytes from 1 to 16,777,216"),
        (with_options(result_limit=True), FlowError, "result_limit=True must be"),
    ],
)
def test_invalid_operations_are_refused(operation: Any, kind: type[Exception], says: str):
    with pytest.raises(kind, match=says):
        prepared(operation, some_flow().graph)


def test_a_refused_operation_leaves_nothing_in_the_checkpoint(tmp_path: Path):
    with pytest.raises(FunctionError):
        run_local(some_flow(), changes=[ControlAt(1, HoldsLock())], checkpoint=str(tmp_path / "c"))
    assert ControlLog(str(tmp_path / "c" / "controls")).records() == []


# ── a fast operation ──────────────────────────────────────────────────────────────────────────────────────────────

ORDER = ControlOrder(5, "Look", ControlMode.FAST, Digest("ab"), ("a",), (StageIndex(0),), "")


def task(stage: int, partition: int, attempt: int, run: int = 0) -> TaskId:
    return TaskId(Epoch(3), Run(run), StageIndex(stage), PartitionId(partition), attempt)


def report(number: int = 5) -> ControlReport:
    return ControlReport(number, ("a",), b"result")


class Bench:
    """A coordinator with a run open, and its journal."""

    def __init__(self, *orders: ControlOrder) -> None:
        self.coordinator, self.journal = Coordinator(), Journal()
        programs = (Digest("p"), Digest("q"))
        self.tell(EpochOpened(Epoch(3), Run(0), Revision(1), programs, {StageIndex(1): 2}, controls=orders))

    def tell(self, event: Any) -> list[Any]:
        self.journal.append(event)
        return self.coordinator.handle(event)

    def start(self, *tasks: TaskId) -> list[TaskOrder]:
        found = []
        for each in tasks:
            worker = WorkerId("host", each.attempt)
            self.tell(Received(str(each.attempt).encode(), WorkerJoined(worker)))
            [sent] = self.tell(Received(b"task", TaskStarted(each, worker)))
            found.append(sent.message)
        return found

    def finish(self, each: TaskId, **more: Any) -> list[Any]:
        return self.tell(Received(b"task", TaskFinished(each, (), {}, {}, {}, **more)))

    def hear(self, each: TaskId) -> list[Any]:
        return self.tell(Received(b"lifeline", Handled(each, report())))

    def seal(self) -> Commit:
        [commit] = self.tell(EpochSealed(Epoch(3), Run(0)))
        assert isinstance(commit, Commit)
        return commit


def told(instructions: list[Any]) -> list[TaskId]:
    return [each.message.task for each in instructions if isinstance(each, Send) and isinstance(each.message, Handle)]


def test_running_tasks_are_told_and_their_answers_complete_the_operation():
    bench, one, other = Bench(), task(0, 0, 1), task(0, 1, 2)
    bench.start(one, other)
    assert told(bench.tell(ControlBegun(ORDER))) == [one, other]
    assert bench.hear(one) == []
    [noted] = bench.hear(other)
    assert noted == ControlNoted(5, (report(), report()), 0)
    assert bench.hear(other) == [], "an answer that comes twice"
    [later] = bench.start(task(1, 0, 3))
    assert later.controls == ()
    replayed = replay(read(bench.journal.to_bytes()))
    assert replayed.story == bench.coordinator.story


def test_a_task_that_ends_without_an_answer_is_missed():
    bench, one, other = Bench(), task(0, 0, 1), task(0, 1, 2)
    bench.start(one, other)
    bench.tell(ControlBegun(ORDER))
    bench.hear(one)
    [_, noted] = bench.finish(other)
    assert noted == ControlNoted(5, (report(),), 1)


def test_another_attempt_of_a_task_that_was_told_is_asked_too():
    bench, one = Bench(), task(0, 0, 1)
    bench.start(one)
    bench.tell(ControlBegun(ORDER))
    [again] = bench.start(task(0, 0, 7))
    assert again.controls == (ORDER,)
    assert len(bench.hear(task(0, 0, 7))) == 1


def test_if_no_task_is_running_the_next_ones_are_asked_until_one_answers():
    bench = Bench()
    assert told(bench.tell(ControlBegun(ORDER))) == []
    first, second = task(0, 0, 1), task(0, 1, 2)
    assert [order.controls for order in bench.start(first, second)] == [(ORDER,), (ORDER,)]
    assert bench.hear(first) == []
    [third] = bench.start(task(1, 0, 3))
    assert third.controls == ()
    assert bench.hear(task(1, 0, 3)) == [], "nobody has asked it"
    assert len(bench.hear(second)) == 1


def test_if_all_tasks_that_were_asked_are_gone_the_next_ones_are_asked():
    bench, one = Bench(), task(0, 0, 1)
    bench.start(one)
    bench.tell(ControlBegun(ORDER))
    bench.finish(one)
    [later] = bench.start(task(1, 0, 2))
    assert later.controls == (ORDER,)


def test_an_operation_ends_with_its_run_unless_no_answer_has_come():
    for answers in (True, False):
        bench, one, other = Bench(), task(0, 0, 1), task(0, 0, 2)
        bench.start(one, other)
        bench.tell(ControlBegun(ORDER))
        if answers:
            bench.tell(ControlBegun(ControlOrder(6, "L", ControlMode.FAST, Digest("ab"), ("a",), (), "")))
            bench.hear(one)
        bench.finish(one)
        assert bench.seal().controls == {}, "5 was complete before, and 6 has heard nothing"


def test_tasks_of_another_run_do_not_count():
    bench, one = Bench(), task(0, 0, 1)
    bench.start(one)
    bench.tell(ControlBegun(ORDER))
    assert bench.hear(task(0, 0, 1, run=9)) == []
    bench.tell(EpochAbandoned(Epoch(3), Run(0)))
    assert bench.hear(one) == []


def test_a_handler_that_fails_a_task_ends_the_run():
    bench, one = Bench(), task(0, 0, 1)
    bench.start(one)
    failure = TaskFailed(one, TaskFailure("a", "stuck", None, ""), operation=5)
    answers = bench.tell(Received(b"task", failure))
    assert GiveUpRun(Epoch(3), Run(0)) in answers


# ── operations that travel among rows ─────────────────────────────────────────────────────────────────────────────

BLOCKING = ControlOrder(8, "Count", ControlMode.BLOCKING, Digest("ab"), ("a",), (StageIndex(0),), "")


def test_all_tasks_take_part_and_know_their_senders():
    bench = Bench(BLOCKING)
    for order in bench.start(task(0, 0, 1), task(0, 1, 2), task(0, 2, 3)):
        assert (order.controls, order.senders) == ((BLOCKING,), 0)
    for attempt in (1, 2, 3):
        bench.finish(task(0, attempt - 1, attempt), controls=(report(8),))
    [behind] = bench.start(task(1, 0, 4))
    assert (behind.controls, behind.senders) == ((BLOCKING,), 3)


def test_the_first_attempt_that_finished_counts():
    bench = Bench(BLOCKING)
    bench.start(task(0, 0, 1), task(0, 0, 2))
    bench.finish(task(0, 0, 2), controls=(ControlReport(8, (), b"second"),))
    bench.finish(task(0, 0, 1), controls=(ControlReport(8, (), b"first"),))
    assert bench.seal().controls == {8: (ControlReport(8, (), b"second"),)}


def test_no_change_begins_in_a_run_with_control_operations():
    bench = Bench(BLOCKING)
    with pytest.raises(ProtocolError, match="control operations are in progress"):
        bench.tell(ChangeBegun(Revision(2), (Digest("p"), Digest("q")), {}, {}))


# ── handles, the log, the watch ───────────────────────────────────────────────────────────────────────────────────


def some_record(number: int = 1) -> ControlRecord:
    return ControlRecord(number, "Count", "blocking", ("a",), Digest("ab"), 0.0, "ann@host")


def test_only_the_first_end_of_an_operation_counts():
    handle = ControlHandle(some_record())
    with pytest.raises(TimeoutError, match=r"control operation 1 \(Count\) has not ended in 0 s"):
        handle.result(0)
    assert handle.end(some_record(), None, "too slow")
    assert not handle.end(some_record(), 42)
    with pytest.raises(ControlFailed, match="too slow") as raised:
        handle.result()
    assert raised.value.number == 1


def test_damage_in_the_log_is_reported(tmp_path: Path):
    log = ControlLog(str(tmp_path))
    for number in (1, 4):
        log.keep(some_record(number))
    assert [each.number for each in ControlLog(str(tmp_path)).records()] == [1, 4]
    assert log.next_number() == 5
    (tmp_path / "0000000001.json").write_text("torn")
    with pytest.raises(CheckpointError, match=r"entry 1 of the log of control operations .* remove the folder"):
        ControlLog(str(tmp_path)).records()
    assert ControlOutcome(str(some_record().outcome)) is ControlOutcome.PENDING


def test_a_handler_that_does_not_return_is_reported_once_and_others_are_not():
    reports: list[TaskFailed] = []
    reported = threading.Event()

    def report_it(failure: TaskFailed) -> None:
        reports.append(failure)
        reported.set()

    watch = HandlerWatch(report_it)
    slow = ControlOrder(9, "Slow", ControlMode.FAST, Digest("ab"), ("a",), (), "", time_limit_s=0.05)
    for _ in range(100):
        with watch.watching(task(0, 0, 1), slow, "a", "next"):
            pass
    with watch.watching(task(0, 1, 2), slow, "a", "complete"):
        assert reported.wait(60)
    watch.close()
    [failure] = reports
    assert (failure.operation, failure.task) == (9, task(0, 1, 2))
    assert failure.failure.error == "operator 'a', epoch 3, partition 1: complete has not returned after 0.05 s"
