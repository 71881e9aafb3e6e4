"""The listener thread switches a task that waits; a busy task switches itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from midstream.control.messages import Accepted, Exhausted, FromTask, StageChange, Stay, SwitchRequested, TaskId, ToTask
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex
from midstream.runtime.switch_lock import SwitchLock

TASK = TaskId(Epoch(0), Run(0), StageIndex(0), PartitionId(0), 1)
CHANGE = StageChange(Revision(2), Digest("ab"), ("A",))
ROWS = pa.record_batch({"n": [1]})


class Work:
    """Stands for a running task: records which thread switches it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.switched_by: list[str] = []
        self.stays = False
        self.error = error
        self.is_exhausted = False

    def offer(self, change: StageChange) -> SwitchRequested | Exhausted:
        if self.error is not None:
            raise self.error
        return self.exhausted(change) or SwitchRequested(TASK, change.revision, {})

    def exhausted(self, change: StageChange) -> Exhausted | None:
        return Exhausted(TASK, change.revision) if self.is_exhausted else None

    def switch(self) -> None:
        self.switched_by.append(threading.current_thread().name)

    def stay(self) -> None:
        self.stays = True

    def reached(self) -> None:
        return None


def attention_of(work: Any, answer: ToTask | None = None, posted: list[FromTask] | None = None) -> SwitchLock:
    def ask(message: FromTask) -> ToTask:
        return answer or Accepted()

    return SwitchLock(work, ask, ([] if posted is None else posted).append, threading.Lock())


def tell(attention: SwitchLock) -> list[FromTask]:
    """Tell a task to switch; return what the listener itself posted."""
    said: list[FromTask] = []
    thread = threading.Thread(target=attention.tell, args=(CHANGE, said.append), name="listener")
    thread.start()
    thread.join()
    return said


def test_the_listener_reports_at_once_a_task_that_only_writes_state():
    work = Work()
    with attention_of(work) as attention:
        assert tell(attention) == [], "it may still have rows"
        work.is_exhausted = True
        assert tell(attention) == [Exhausted(TASK, CHANGE.revision)]
    assert work.switched_by == []


def test_a_task_without_rows_left_reports_so_while_it_waits():
    work, posted = Work(), list[FromTask]()
    work.is_exhausted = True
    with attention_of(work, posted=posted) as attention, attention.waiting():
        assert tell(attention) == []
    assert posted == [Exhausted(TASK, CHANGE.revision)]
    assert work.switched_by == []


def test_a_busy_task_switches_itself_before_it_waits_again():
    work = Work()
    with attention_of(work) as attention:
        tell(attention)
        assert work.switched_by == [], "it is within a slice"
        with attention.waiting():
            assert work.switched_by == ["MainThread"]


def test_the_listener_switches_a_task_that_waits_for_rows():
    work = Work()

    def batches() -> Iterator[pa.RecordBatch]:
        yield ROWS
        tell(attention)
        assert work.switched_by == ["listener"]
        yield ROWS

    with attention_of(work) as attention:
        assert sum(batch.num_rows for batch in attention.taking(batches())) == 2
    assert work.switched_by == ["listener"], "once"


def test_a_task_that_must_stay_does_not_switch():
    work = Work()
    with attention_of(work, Stay()) as attention, attention.waiting():
        tell(attention)
    assert work.switched_by == []
    assert work.stays, "and forgets the change, as if nobody had told it"


def test_a_failure_in_the_listener_fails_the_task():
    with attention_of(Work(ValueError("cannot be loaded"))) as attention:
        with attention.waiting():
            tell(attention)
        with pytest.raises(ValueError, match="cannot be loaded"):
            attention.attend()


def test_a_task_that_is_over_is_left_alone():
    work = Work()
    with attention_of(work) as attention:
        pass
    tell(attention)
    assert work.switched_by == []
