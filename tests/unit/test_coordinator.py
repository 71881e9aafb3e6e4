"""The coordinator follows its table of states and events. One test per row, and per guarantee."""

from __future__ import annotations

import msgspec
import pytest

from midstream.control import coordinator as coordinator_module
from midstream.control.coordinator import STORY_LENGTH, Coordinator
from midstream.control.messages import (
    Accepted,
    ChangeBegun,
    ChangeNoted,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    Exhausted,
    FromTask,
    GiveUpRun,
    Instruction,
    JobEnding,
    Reached,
    Received,
    Refused,
    Reject,
    Release,
    Send,
    StageChange,
    Stay,
    Switch,
    SwitchRequested,
    TaskFailed,
    TaskFailure,
    TaskFinished,
    TaskId,
    TaskOrder,
    TaskStarted,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.data.times import Watermarks
from midstream.errors import ProtocolError
from midstream.ids import Digest, Epoch, Origin, PartitionId, Revision, Run, StageIndex, WireId
from midstream.metrics import OperatorStats

PEER = b"peer"
PARTITIONS = {StageIndex(1): 2, StageIndex(2): 2}


def task(stage: int = 0, partition: int = 0, attempt: int = 0, epoch: int = 7, run: int = 0) -> TaskId:
    return TaskId(Epoch(epoch), Run(run), StageIndex(stage), PartitionId(partition), attempt)


def opened(epoch: int = 7, run: int = 0, stages: int = 3) -> EpochOpened:
    programs = tuple(Digest(f"program {stage}") for stage in range(stages))
    return EpochOpened(Epoch(epoch), Run(run), Revision(4), programs, PARTITIONS)


def sealed(epoch: int = 7, run: int = 0) -> EpochSealed:
    return EpochSealed(Epoch(epoch), Run(run))


def abandoned(epoch: int = 7, run: int = 0) -> EpochAbandoned:
    return EpochAbandoned(Epoch(epoch), Run(run))


def finished(
    who: TaskId,
    received: dict[int, int] | None = None,
    sent: dict[int, int] | None = None,
    rows: int = 0,
    operator: str = "count",
) -> TaskFinished:
    return TaskFinished(
        who,
        (OperatorStats(operator, rows_in=rows, rows_out=rows),),
        {WireId(wire): n for wire, n in (received or {}).items()},
        {WireId(wire): n for wire, n in (sent or {}).items()},
        {WireId(wire): 10 * n for wire, n in (sent or {}).items()},
    )


FAILURE = TaskFailure("score", "ZeroDivisionError: division by zero", "{'user': 'a'}", "line 3, in score")


def running(**changes: int) -> Coordinator:
    coordinator = Coordinator()
    assert coordinator.handle(opened(**changes)) == []
    return coordinator


def tell(coordinator: Coordinator, *messages: FromTask) -> list[object]:
    """The coordinator's answer to each message. Every answer goes to the sender."""
    answers: list[object] = []
    for number, message in enumerate(messages):
        peer = f"peer {number}".encode()
        [instruction] = coordinator.handle(Received(peer, message))
        assert isinstance(instruction, Send)
        assert instruction.peer == peer
        answers.append(instruction.message)
    return answers


def run(coordinator: Coordinator, *reports: TaskFinished) -> None:
    """Each task starts and finishes."""
    for report in reports:
        assert isinstance(tell(coordinator, TaskStarted(report.task))[0], TaskOrder)
        assert tell(coordinator, report) == [Accepted()]


def seal(coordinator: Coordinator, **when: int) -> Commit | Reject:
    [instruction] = coordinator.handle(sealed(**when))
    assert isinstance(instruction, Commit | Reject)
    return instruction


def rejection(coordinator: Coordinator) -> str:
    verdict = seal(coordinator)
    assert isinstance(verdict, Reject)
    assert verdict.epoch == 7
    return verdict.reason


# ── the driver's events, in each state ────────────────────────────────────────────────────────────────────────────


def test_idle_opens_an_epoch():
    coordinator = Coordinator()
    assert coordinator.handle(opened()) == []
    assert isinstance(tell(coordinator, TaskStarted(task()))[0], TaskOrder)


def test_idle_has_nothing_to_seal_or_abandon():
    for event in (sealed(), abandoned()):
        with pytest.raises(ProtocolError, match=r"\(epoch 7.0\) makes no sense now: no epoch is running"):
            Coordinator().handle(event)


def test_running_opens_no_second_epoch():
    for event in (opened(epoch=8), opened(run=1), opened()):
        coordinator = running()
        with pytest.raises(ProtocolError, match=r"epoch 7\.0 is still running"):
            coordinator.handle(event)


def test_running_seals_or_abandons_only_the_run_in_progress():
    for event in (sealed(epoch=6), sealed(run=1), abandoned(epoch=8), abandoned(run=1)):
        coordinator = running()
        with pytest.raises(ProtocolError, match=r"makes no sense now: epoch 7\.0 is running"):
            coordinator.handle(event)


def test_an_illegal_event_changes_nothing():
    coordinator = running()
    run(coordinator, finished(task(), rows=5))
    for event in (opened(epoch=8), sealed(run=1), abandoned(epoch=6)):
        with pytest.raises(ProtocolError):
            coordinator.handle(event)
    verdict = seal(coordinator)
    assert isinstance(verdict, Commit)
    assert verdict.tasks == 1


@pytest.mark.parametrize("end", [sealed(), abandoned()], ids=["sealed", "abandoned"])
def test_a_run_ends_once_then_the_next_may_open(end: Event):
    coordinator = running()
    coordinator.handle(end)
    for again in (sealed(), abandoned()):
        with pytest.raises(ProtocolError, match="no epoch is running"):
            coordinator.handle(again)
    assert coordinator.handle(opened(run=1)) == []


def test_a_rejected_epoch_can_be_run_again():
    coordinator = running()
    tell(coordinator, TaskStarted(task()))
    assert "never reported" in rejection(coordinator)
    coordinator.handle(opened(run=1))
    run(coordinator, finished(task(run=1), rows=3))
    verdict = seal(coordinator, run=1)
    assert isinstance(verdict, Commit)
    assert (verdict.epoch, verdict.tasks) == (7, 1)


def test_an_abandoned_run_leaves_nothing_behind():
    coordinator = running()
    run(coordinator, finished(task(), sent={1: 9}, rows=99))
    tell(coordinator, TaskStarted(task(partition=1)), TaskFailed(task(partition=1), FAILURE))
    coordinator.handle(abandoned())
    assert coordinator.failures == ()
    coordinator.handle(opened(run=1))
    assert coordinator.failures == ()
    run(coordinator, finished(task(run=1), rows=1))
    verdict = seal(coordinator, run=1)
    assert isinstance(verdict, Commit)
    assert [stats.rows_in for stats in verdict.operators] == [1]


# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_started_task_gets_the_program_of_its_stage():
    coordinator = running(stages=3)
    told = tell(coordinator, *(TaskStarted(task(stage=stage)) for stage in (0, 2, 1)))
    assert told == [TaskOrder(Revision(4), Digest(f"program {stage}")) for stage in (0, 2, 1)]


def test_a_stage_that_is_not_in_the_plan_is_refused_and_not_waited_for():
    coordinator = running(stages=2)
    assert tell(coordinator, TaskStarted(task(stage=2))) == [Refused("the plan has 2 stages; there is no stage 2")]
    assert isinstance(seal(coordinator), Commit)


def every_message(who: TaskId) -> list[FromTask]:
    return [TaskStarted(who), finished(who, sent={1: 5}, rows=1000), TaskFailed(who, FAILURE)]


def test_while_idle_every_task_is_refused():
    told = tell(Coordinator(), *every_message(task()))
    assert told == [Refused("epoch 7.0 is over; no epoch is running")] * 3


@pytest.mark.parametrize("stale", [task(run=0), task(epoch=6, run=1), task(epoch=6, run=5)], ids=str)
def test_tasks_of_another_run_or_epoch_are_fenced_and_leave_no_trace(stale: TaskId):
    coordinator = running(run=1)
    run(coordinator, finished(task(run=1), rows=1))
    told = tell(coordinator, *every_message(stale))
    assert told == [Refused(f"epoch {stale.epoch}.{stale.run} is over; epoch 7.1 is running")] * 3
    assert coordinator.failures == ()
    verdict = seal(coordinator, run=1)
    assert isinstance(verdict, Commit)
    assert (verdict.tasks, verdict.emitted, [stats.rows_in for stats in verdict.operators]) == (1, {}, [1])


@pytest.mark.parametrize("end", [sealed(), abandoned()], ids=["sealed", "abandoned"])
def test_a_task_that_outlives_its_run_is_fenced_at_its_next_message(end: Event):
    coordinator = running()
    run(coordinator, finished(task()))
    coordinator.handle(end)
    refusal = Refused("epoch 7.0 is over; no epoch is running")
    assert tell(coordinator, *every_message(task(attempt=1))) == [refusal] * 3


# ── attempts: retried, speculative, recomputed, repeated ──────────────────────────────────────────────────────────


def committed_rows(coordinator: Coordinator) -> tuple[int, int]:
    verdict = seal(coordinator)
    assert isinstance(verdict, Commit), verdict
    return verdict.tasks, sum(stats.rows_in for stats in verdict.operators)


def test_a_report_that_arrives_twice_counts_once():
    coordinator = running()
    run(coordinator, finished(task(), rows=5))
    assert tell(coordinator, finished(task(), rows=5)) == [Accepted()]
    assert committed_rows(coordinator) == (1, 5)


def test_a_retry_replaces_a_task_that_died():
    coordinator = running()
    tell(coordinator, TaskStarted(task(attempt=1)))
    run(coordinator, finished(task(attempt=2), rows=5))
    assert committed_rows(coordinator) == (1, 5)


def test_of_two_speculative_attempts_one_counts():
    coordinator = running()
    tell(coordinator, TaskStarted(task(attempt=1)), TaskStarted(task(attempt=2)))
    told = tell(coordinator, finished(task(attempt=2), rows=5), finished(task(attempt=1), rows=5))
    assert told == [Accepted(), Accepted()]
    assert committed_rows(coordinator) == (1, 5)


def test_when_attempts_disagree_the_first_report_counts():
    coordinator = running()
    run(coordinator, finished(task(attempt=1), rows=5), finished(task(attempt=2), rows=6))
    assert committed_rows(coordinator) == (1, 5)


def test_a_speculative_attempt_that_never_ends_is_not_waited_for():
    coordinator = running()
    tell(coordinator, TaskStarted(task(attempt=1)), TaskStarted(task(attempt=2)))
    tell(coordinator, finished(task(attempt=1), rows=5))
    assert committed_rows(coordinator) == (1, 5)


def test_a_partition_recomputed_after_it_finished_is_assigned_again_and_counts_once():
    """Spark computes a partition again when the executor that held its output is lost."""
    coordinator = running()
    run(coordinator, finished(task(attempt=1), sent={1: 2}, rows=5))
    run(coordinator, finished(task(attempt=2), sent={1: 2}, rows=5))
    run(coordinator, finished(task(stage=1, attempt=3), received={1: 2}, rows=5))
    assert committed_rows(coordinator) == (2, 10)


def test_a_recomputation_that_dies_does_not_undo_the_report():
    coordinator = running()
    run(coordinator, finished(task(attempt=1), rows=5))
    tell(coordinator, TaskStarted(task(attempt=2)), TaskFailed(task(attempt=2), FAILURE))
    assert committed_rows(coordinator) == (1, 5)


def test_failures_are_kept_in_order_for_the_driver_to_explain():
    coordinator = running()
    other = TaskFailure("enrich", "KeyError: 'x'", None, "line 9, in enrich")
    reports = (TaskFailed(task(attempt=1), FAILURE), TaskFailed(task(partition=1, attempt=2), other))
    assert tell(coordinator, *reports) == [Accepted(), Accepted()]
    assert coordinator.failures == reports


def test_a_failed_attempt_does_not_spoil_the_epoch_when_a_retry_succeeds():
    coordinator = running()
    tell(coordinator, TaskStarted(task(attempt=1)), TaskFailed(task(attempt=1), FAILURE))
    run(coordinator, finished(task(attempt=2), rows=5))
    assert committed_rows(coordinator) == (1, 5)


# ── is the epoch whole? ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_epoch_without_tasks_is_whole():
    assert seal(running()) == Commit(Epoch(7), Revision(4), (), 0, {})


def test_a_whole_epoch_is_committed_with_the_sums_of_its_reports():
    coordinator = running()
    run(
        coordinator,
        finished(task(stage=1, partition=1, attempt=4), received={1: 2}, rows=20, operator="write"),
        finished(task(stage=1, partition=0, attempt=3), received={1: 3}, rows=30, operator="write"),
        finished(task(stage=0, partition=1, attempt=2), sent={1: 4}, rows=40, operator="read"),
        finished(task(stage=0, partition=0, attempt=1), sent={1: 1}, rows=10, operator="read"),
    )
    verdict = seal(coordinator)
    assert isinstance(verdict, Commit)
    assert (verdict.epoch, verdict.revision, verdict.tasks) == (7, 4, 4)
    # In the order of stages, however the reports came in.
    assert [(stats.operator, stats.rows_in) for stats in verdict.operators] == [("read", 50), ("write", 50)]
    assert verdict.emitted == {1: 50}


def test_a_started_partition_that_never_reported_is_named():
    coordinator = running()
    run(coordinator, finished(task(partition=0)))
    tell(coordinator, TaskStarted(task(stage=1, partition=3)), TaskStarted(task(partition=2)))
    told = "2 started partition(s) never reported: stage 0 partition 2, stage 1 partition 3"
    assert rejection(coordinator) == told


def test_of_many_silent_partitions_the_first_few_are_named():
    coordinator = running()
    tell(coordinator, *(TaskStarted(task(partition=partition)) for partition in range(100)))
    told = rejection(coordinator)
    assert told.startswith("100 started partition(s) never reported: stage 0 partition 0, ")
    assert told.count("partition ") == 5


def test_a_row_that_was_sent_and_not_received_is_detected():
    coordinator = running()
    run(
        coordinator,
        finished(task(partition=0), sent={1: 2, 2: 1}),
        finished(task(partition=1), sent={1: 3}),
        finished(task(stage=1), received={1: 4, 2: 1}),
    )
    assert rejection(coordinator) == "stage 1 received 4 of 5 rows on wire 1"


def test_a_row_that_was_received_and_not_sent_is_detected():
    coordinator = running()
    run(coordinator, finished(task(), sent={1: 2}), finished(task(stage=1), received={1: 3}))
    assert rejection(coordinator) == "stage 1 received 3 of 2 rows on wire 1"


def test_rows_on_one_wire_do_not_make_up_for_rows_on_another():
    coordinator = running()
    run(coordinator, finished(task(), sent={1: 2, 2: 3}), finished(task(stage=1), received={1: 3, 2: 2}))
    assert rejection(coordinator) == "stage 1 received 3 of 2 rows on wire 1"


def test_rows_for_a_stage_that_never_ran_are_detected():
    coordinator = running()
    run(coordinator, finished(task(), sent={1: 2}))
    assert rejection(coordinator) == "stage 1 received 0 of 2 rows on wire 1"


def test_a_wire_is_counted_at_every_stage_it_is_carried_through():
    """Rows for a deeper stage pass through: the stage between receives them and sends as many."""
    coordinator = running()
    run(
        coordinator,
        finished(task(stage=0), sent={1: 2, 2: 4}),
        finished(task(stage=1), received={1: 2, 2: 4}, sent={2: 4}),
        finished(task(stage=2), received={2: 4}),
    )
    assert isinstance(seal(coordinator), Commit)


def test_a_carried_row_that_is_lost_is_detected_where_it_was_lost():
    coordinator = running()
    run(
        coordinator,
        finished(task(stage=0), sent={2: 4}),
        finished(task(stage=1), received={2: 4}, sent={2: 4}),
        finished(task(stage=2), received={2: 3}),
    )
    assert rejection(coordinator) == "stage 2 received 3 of 4 rows on wire 2"


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_that_joined_are_released_when_the_job_ends():
    coordinator = Coordinator()
    assert tell(coordinator, WorkerJoined(WorkerId("a", 1)), WorkerJoined(WorkerId("b", 1))) == [Accepted(), Accepted()]
    assert coordinator.workers == {WorkerId("a", 1), WorkerId("b", 1)}
    assert coordinator.handle(JobEnding()) == [Send(b"peer 0", Release()), Send(b"peer 1", Release())]
    assert coordinator.handle(Received(PEER, WorkerReleased(WorkerId("a", 1)))) == []
    assert coordinator.workers == {WorkerId("b", 1)}


def test_a_worker_that_has_left_is_not_released_again():
    coordinator = Coordinator()
    tell(coordinator, WorkerJoined(WorkerId("a", 1)))
    coordinator.handle(Received(PEER, WorkerReleased(WorkerId("a", 1))))
    coordinator.handle(Received(PEER, WorkerReleased(WorkerId("a", 1))))
    assert coordinator.workers == frozenset()
    assert coordinator.handle(JobEnding()) == []


def test_a_worker_that_joins_again_is_released_at_its_last_address():
    coordinator = Coordinator()
    coordinator.handle(Received(b"old", WorkerJoined(WorkerId("a", 1))))
    coordinator.handle(Received(b"new", WorkerJoined(WorkerId("a", 1))))
    assert coordinator.handle(JobEnding()) == [Send(b"new", Release())]


def test_a_worker_that_joins_while_the_job_ends_is_released_at_once():
    """Nobody will tell it again, and the driver waits for it."""
    coordinator = Coordinator()
    coordinator.handle(JobEnding())
    assert coordinator.handle(Received(PEER, WorkerJoined(WorkerId("a", 1)))) == [
        Send(PEER, Accepted()),
        Send(PEER, Release()),
    ]


def test_workers_come_and_go_in_every_state_and_outlive_runs():
    coordinator = running()
    tell(coordinator, WorkerJoined(WorkerId("a", 1)))
    coordinator.handle(abandoned())
    tell(coordinator, WorkerJoined(WorkerId("b", 2)))
    coordinator.handle(opened(run=1))
    assert coordinator.workers == {WorkerId("a", 1), WorkerId("b", 2)}


def test_workers_that_spark_ends_without_a_word_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coordinator_module, "MOST_WORKERS", 3)
    coordinator = running()
    busy = WorkerId("a", 0)
    for number in range(10):
        coordinator.handle(Received(b"%d" % number, WorkerJoined(WorkerId("a", number))))
        coordinator.handle(Received(b"task", TaskStarted(task(attempt=number), busy)))
    assert coordinator.workers == {busy, WorkerId("a", 8), WorkerId("a", 9)}, "one that works is not forgotten"
    assert [coordinator.workers_at(b"%d" % number) for number in (0, 1)] == [[(busy, b"0")], []]
    assert coordinator.handle(JobEnding()) == [Send(peer, Release()) for peer in (b"8", b"9", b"0")]


# ── the story ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_protocol_error_lists_the_events_before_it():
    coordinator = Coordinator()
    tell(coordinator, WorkerJoined(WorkerId("host", 42)))
    coordinator.handle(opened())
    tell(coordinator, TaskStarted(task(attempt=12)))
    with pytest.raises(ProtocolError) as caught:
        coordinator.handle(opened(epoch=8))
    assert caught.value.message.splitlines() == [
        "EpochOpened(epoch 8.0) makes no sense now: epoch 7.0 is still running. Events before it:",
        "  WorkerJoined(host/42)",
        "  EpochOpened(epoch 7.0)",
        "  TaskStarted(epoch 7.0 stage 0 partition 0 attempt 12)",
        "  EpochOpened(epoch 8.0)",
    ]


def test_the_story_forgets_the_oldest_events():
    coordinator = running()
    tell(coordinator, *(TaskStarted(task(attempt=attempt)) for attempt in range(2 * STORY_LENGTH)))
    coordinator.handle(JobEnding())
    assert len(coordinator.story) == STORY_LENGTH
    assert coordinator.story[-2].endswith(f"attempt {2 * STORY_LENGTH - 1})")
    assert coordinator.story[-1] == "JobEnding"


def test_attempts_that_differ_may_agree_on_either_count():
    """A function that is not deterministic: Spark may have kept the second attempt, whose rows arrived."""
    coordinator = running()
    run(coordinator, finished(task(), sent={1: 5}), finished(task(attempt=2), sent={1: 4}))
    run(coordinator, finished(task(stage=1), received={1: 4}))
    assert isinstance(seal(coordinator), Commit)


def test_attempts_that_differ_do_not_excuse_rows_that_none_of_them_sent():
    coordinator = running()
    run(coordinator, finished(task(), sent={1: 5}), finished(task(attempt=2), sent={1: 4}))
    run(coordinator, finished(task(stage=1), received={1: 3}))
    assert rejection(coordinator) == "stage 1 received 3 of 4 to 5 rows on wire 1"


# ── a change in the run ───────────────────────────────────────────────────────────────────────────────────────────

NEW = Revision(5)
NEW_PROGRAMS = tuple(Digest(f"new program {stage}") for stage in range(3))


def begin(heads: dict[int, str] | None = None, followers: dict[int, str] | None = None) -> ChangeBegun:
    return ChangeBegun(
        NEW,
        NEW_PROGRAMS,
        {StageIndex(stage): (name,) for stage, name in (heads or {0: "FM"}).items()},
        {StageIndex(stage): (name,) for stage, name in (followers or {}).items()},
    )


def stage_change(stage: int = 0, *heads: str) -> StageChange:
    return StageChange(NEW, NEW_PROGRAMS[stage], heads)


def test_an_order_names_the_live_blobs_including_those_of_a_new_change():
    coordinator = Coordinator()
    coordinator.handle(msgspec.structs.replace(opened(), live=(Digest("now"), Digest("before"))))
    [before] = coordinator.handle(Received(PEER, TaskStarted(task())))
    coordinator.handle(msgspec.structs.replace(begin(), live=(Digest("now"), Digest("next"))))
    [after] = coordinator.handle(Received(PEER, TaskStarted(task(partition=1))))
    assert isinstance(before, Send)
    assert isinstance(after, Send)
    assert isinstance(before.message, TaskOrder)
    assert isinstance(after.message, TaskOrder)
    assert set(before.message.live) == {"now", "before"}
    assert set(after.message.live) == {"now", "before", "next"}


def listening(coordinator: Coordinator, *tasks: TaskId) -> None:
    """Tasks start, each in a worker that listens."""
    for who in tasks:
        worker = WorkerId("host", who.attempt)
        coordinator.handle(Received(f"worker {who.attempt}".encode(), WorkerJoined(worker)))
        coordinator.handle(Received(PEER, TaskStarted(who, worker)))


def ask(coordinator: Coordinator, who: TaskId, rows: int, revision: Revision = NEW) -> list[Instruction]:
    return coordinator.handle(Received(PEER, SwitchRequested(who, revision, {Origin(-1): rows})))


def start(coordinator: Coordinator, who: TaskId) -> TaskOrder:
    [answer] = tell(coordinator, TaskStarted(who))
    assert isinstance(answer, TaskOrder)
    return answer


def noted(instructions: list[Instruction]) -> ChangeNoted:
    [found] = [each for each in instructions if isinstance(each, ChangeNoted)]
    return found


def test_while_idle_a_change_sends_no_messages():
    assert Coordinator().handle(begin()) == []


def test_running_tasks_are_told_where_their_worker_listens():
    coordinator = running()
    listening(coordinator, task(attempt=1), task(partition=1, attempt=2), task(stage=1, attempt=3))
    told = coordinator.handle(begin())
    assert told[:-1] == [
        Send(b"worker 1", Switch(task(attempt=1), stage_change(0, "FM"))),
        Send(b"worker 2", Switch(task(partition=1, attempt=2), stage_change(0, "FM"))),
    ]
    assert told[-1] == ChangeNoted(NEW, None, "told 2 running task(s)", (), False)


def test_a_task_whose_worker_does_not_listen_delays_the_effect_of_a_change():
    coordinator = running()
    tell(coordinator, TaskStarted(task()))
    assert coordinator.handle(begin()) == [ChangeNoted(NEW, None, "told 0 running task(s)", (), False)]


def test_a_change_is_in_effect_at_once_if_no_task_of_its_stage_runs():
    assert noted(running().handle(begin())).in_effect


def test_one_change_at_a_time():
    coordinator = running()
    coordinator.handle(begin())
    with pytest.raises(ProtocolError, match=r"ChangeBegun\(revision 5\) makes no sense now: the change to revision 5"):
        coordinator.handle(begin())


def test_a_task_that_asks_first_may_switch():
    coordinator = running()
    listening(coordinator, task())
    coordinator.handle(begin())
    assert ask(coordinator, task(), 17) == [
        Send(PEER, Accepted()),
        ChangeNoted(NEW, task(), "switched", ("FM",), True),
    ]


def test_a_repeated_request_gets_the_same_answer():
    coordinator = running()
    listening(coordinator, task())
    coordinator.handle(begin())
    assert ask(coordinator, task(), 17) == ask(coordinator, task(), 17)


def test_a_task_that_asks_at_another_position_stays():
    coordinator = running()
    listening(coordinator, task())
    coordinator.handle(begin())
    ask(coordinator, task(), 17)
    assert ask(coordinator, task(), 18) == [Send(PEER, Stay())]


def test_without_a_change_or_for_another_one_a_task_stays():
    coordinator = running()
    listening(coordinator, task())
    assert ask(coordinator, task(), 17) == [Send(PEER, Stay())]
    coordinator.handle(begin())
    assert ask(coordinator, task(), 17, Revision(9)) == [Send(PEER, Stay())]


def test_a_task_of_another_run_may_not_switch():
    coordinator = running(run=1)
    coordinator.handle(begin())
    assert ask(coordinator, task(run=0), 17) == [Send(PEER, Refused("epoch 7.0 is over; epoch 7.1 is running"))]


def test_an_attempt_that_starts_later_switches_where_the_first_did():
    coordinator = running()
    listening(coordinator, task())
    coordinator.handle(begin())
    ask(coordinator, task(), 17)
    found = start(coordinator, task(attempt=1))
    assert (found.revision, found.change, found.switch_at) == (4, stage_change(0, "FM"), {Origin(-1): 17})


def test_a_second_attempt_before_the_first_has_switched_keeps_both_from_switching():
    coordinator = running()
    listening(coordinator, task())
    coordinator.handle(begin())
    found = start(coordinator, task(attempt=1))
    assert (found.change, found.switch_at) == (None, None), "its end-of-epoch output must equal the first one's"
    assert ask(coordinator, task(), 17) == [Send(PEER, Stay())]


def test_a_repeated_start_message_does_not_count_as_a_new_attempt():
    coordinator = running()
    listening(coordinator, task())
    coordinator.handle(begin())
    again = start(coordinator, task())
    assert (again.change, again.switch_at) == (None, None), "it may be anywhere in its input"


def test_the_first_attempt_of_a_partition_that_starts_after_the_change_switches_at_once():
    coordinator = running()
    coordinator.handle(begin())
    assert start(coordinator, task()).switch_at == {}


def test_tasks_behind_an_exchange_get_the_new_program_and_nothing_to_switch():
    coordinator = running()
    coordinator.handle(begin({0: "FM"}, {1: "MC"}))
    found = start(coordinator, task(stage=1))
    assert (found.program, found.change, found.switch_at) == ("program 1", stage_change(1), None)


def test_a_later_attempt_does_not_learn_of_a_change_that_the_first_did_not_know():
    coordinator = running()
    start(coordinator, task(stage=1))
    coordinator.handle(begin({0: "FM"}, {1: "MC"}))
    assert start(coordinator, task(stage=1, attempt=1)).change is None
    coordinator.handle(Received(PEER, finished(task(stage=1))))
    assert start(coordinator, task(stage=1, attempt=2)).change is None, "its output was lost and is computed again"


def test_a_later_attempt_learns_of_a_change_that_the_first_knew():
    coordinator = running()
    coordinator.handle(begin({0: "FM"}, {1: "MC"}))
    start(coordinator, task(stage=1))
    coordinator.handle(Received(PEER, finished(task(stage=1))))
    assert start(coordinator, task(stage=1, attempt=1)).change == stage_change(1)


def test_a_finished_partition_that_is_computed_again_does_not_learn_of_the_change():
    coordinator = running()
    start(coordinator, task())
    tell(coordinator, finished(task()))
    coordinator.handle(begin())
    found = start(coordinator, task(attempt=1))
    assert (found.change, found.switch_at) == (None, None)


def test_without_a_change_orders_have_none():
    found = start(running(), task())
    assert (found.change, found.switch_at) == (None, None)


def test_rows_that_reach_followers_are_noted():
    coordinator = running()
    coordinator.handle(begin({0: "FM"}, {1: "MC"}))
    for partition in (0, 1):
        start(coordinator, task(stage=1, partition=partition))
    found = [
        coordinator.handle(Received(PEER, Reached(task(stage=1, partition=partition), NEW, ("MC",))))
        for partition in (0, 1)
    ]
    assert found == [
        [ChangeNoted(NEW, task(stage=1, partition=partition), "reached", ("MC",), partition == 1)]
        for partition in (0, 1)
    ], "in effect when both partitions have them"


def test_a_task_without_rows_left_does_not_delay_a_change():
    coordinator = running()
    start(coordinator, task())
    coordinator.handle(begin())
    assert coordinator.handle(Received(PEER, Exhausted(task(run=9), NEW))) == [], "of another run"
    assert coordinator.handle(Received(PEER, Exhausted(task(), Revision(9)))) == [], "of another change"
    [noted] = coordinator.handle(Received(PEER, Exhausted(task(), NEW)))
    assert noted == ChangeNoted(NEW, task(), "has no rows left", (), True)


def test_reached_gets_no_answer():
    coordinator = running()
    assert coordinator.handle(Received(PEER, Reached(task(run=9), NEW, ("MC",)))) == []
    assert coordinator.handle(Received(PEER, Reached(task(), NEW, ("MC",)))) == []
    coordinator.handle(begin())
    assert coordinator.handle(Received(PEER, Reached(task(), Revision(9), ("MC",)))) == []


def test_a_change_is_in_effect_when_the_last_task_that_could_not_switch_finishes():
    coordinator = running()
    tell(coordinator, TaskStarted(task()))
    coordinator.handle(begin())
    found = coordinator.handle(Received(PEER, finished(task())))
    assert found == [Send(PEER, Accepted()), ChangeNoted(NEW, task(), "finished", (), True)]


def test_the_commit_has_the_switch_points_and_the_next_revision():
    coordinator = running()
    listening(coordinator, task(attempt=1), task(partition=1, attempt=2))
    coordinator.handle(begin())
    ask(coordinator, task(attempt=1), 17)
    for who in (task(attempt=1), task(partition=1, attempt=2)):
        coordinator.handle(Received(PEER, finished(who)))
    verdict = seal(coordinator)
    assert isinstance(verdict, Commit)
    assert verdict.revision == NEW
    assert [(point.partition, point.position) for point in verdict.switches] == [(0, {Origin(-1): 17}), (1, None)]


def test_without_a_change_the_revision_stays():
    coordinator = running()
    run(coordinator, finished(task()))
    verdict = seal(coordinator)
    assert isinstance(verdict, Commit)
    assert (verdict.revision, verdict.switches) == (4, ())


def test_an_abandoned_run_ends_its_change():
    coordinator = running()
    coordinator.handle(begin())
    coordinator.handle(abandoned())
    coordinator.handle(opened(run=1))
    assert start(coordinator, task(run=1)).change is None


def given_up(coordinator: Coordinator, revision: int) -> bool:
    tell(coordinator, TaskStarted(task()))
    found = coordinator.handle(Received(PEER, TaskFailed(task(), FAILURE, Revision(revision))))
    assert found[0] == Send(PEER, Accepted())
    return found[1:] == [GiveUpRun(Epoch(7), Run(0))]


def test_a_failure_under_the_revision_on_trial_ends_the_run():
    coordinator = running()
    coordinator.handle(begin())
    assert given_up(coordinator, NEW)


def test_a_failure_under_the_revision_that_an_epoch_on_trial_began_with_ends_the_run():
    coordinator = Coordinator()
    coordinator.handle(msgspec.structs.replace(opened(), on_trial=Revision(4)))
    assert given_up(coordinator, 4)


def test_other_failures_leave_it_to_spark_to_retry():
    assert not given_up(running(), 4)
    coordinator = running()
    coordinator.handle(begin())
    assert not given_up(coordinator, 4)


def test_the_watermark_of_an_epoch_is_fixed_when_the_first_task_with_state_asks():
    stage, count = StageIndex(1), {"count": b"lineage"}
    coordinator = Coordinator()
    coordinator.handle(msgspec.structs.replace(opened(), lineages={stage: count}, watermarks=Watermarks({"in": 10})))

    def read(partition: int, latest: int) -> None:
        report = finished(task(0, partition))
        run(coordinator, msgspec.structs.replace(report, event_times={"in": latest}))

    def order(who: TaskId) -> TaskOrder:
        [found] = tell(coordinator, TaskStarted(who))
        assert isinstance(found, TaskOrder)
        return found

    assert order(task(0, 2)).times.watermark is None, "a task without state may start before sources are read"
    read(0, 50)
    assert order(task(1, 0)).times.watermark == 40
    read(1, 90)  # no source should report so late; if one does, all tasks still agree
    assert order(task(1, 1)).times.watermark == 40
    run(coordinator, finished(task(0, 2)), finished(task(1, 0)), finished(task(1, 1)))
    commit = seal(coordinator)
    assert isinstance(commit, Commit)
    assert commit.watermarks.watermark == 40
