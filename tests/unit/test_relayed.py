"""What a relay joins and how long it keeps it; how messages for workers behind relays are joined."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from midstream.control.messages import (
    Exhausted,
    FromRelay,
    Handle,
    Handled,
    Release,
    Send,
    StageChange,
    Switch,
    TaskId,
    ToTask,
    ToWorkers,
    WorkerId,
    WorkerJoined,
    WorkerReleased,
)
from midstream.control.relayed import HOLD_S, PAUSE_S, JointReports, Message, behind, by_relay, relay_of, unfold
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex
from tests.examples import examples


def task(partition: int, run: int = 0) -> TaskId:
    return TaskId(Epoch(7), Run(run), StageIndex(0), PartitionId(partition), attempt=partition)


def order(number: int = 1) -> ControlOrder:
    return ControlOrder(number, "Look", ControlMode.FAST, Digest("ab"), ("m",), (StageIndex(0),), "")


def handled(partition: int, number: int = 1, result: bytes | None = None) -> Handled:
    return Handled(task(partition), ControlReport(number, ("m",), result))


def said_by(packet: FromRelay) -> list[tuple[int, Message]]:
    """What each task or worker has said, in order."""
    found: list[tuple[int, Message]] = []
    for said in packet.said:
        if isinstance(said.message, Handled) and said.tasks:
            report = said.message.report
            found += [(partition, Handled(task(partition), report)) for _, partition, _ in said.tasks]
        else:
            found.append((said.worker, said.message))
    return found


def told(*partitions: int, number: int = 1) -> ToWorkers:
    one = order(number)
    [(_, packet)] = by_relay(Send(behind(b"r", each), Handle(task(each), one)) for each in partitions)
    assert isinstance(packet, ToWorkers)
    return packet


# ── up ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_answers_travel_as_one_when_the_last_task_has_answered():
    reports = JointReports()
    reports.told(told(0, 1, 2))
    for partition in (2, 0):
        reports.heard(partition, handled(partition), now=5.0)
        assert reports.take(5.0) is None, "another one may answer in a moment"
    reports.heard(1, handled(1), now=5.001)
    assert reports.wait(5.001) == 0
    packet = reports.take(5.001)
    assert packet is not None
    assert [each.tasks for each in packet.said] == [((0, 2, 2), (0, 0, 0), (0, 1, 1))]
    assert reports.wait(6.0) is None


def test_no_answer_waits_for_a_slow_task():
    reports = JointReports()
    reports.told(told(0, 1))
    reports.heard(0, handled(0), now=5.0)
    assert reports.take(5.0 + 0.9 * PAUSE_S) is None
    packet = reports.take(5.0 + PAUSE_S)
    assert packet is not None
    assert said_by(packet) == [(0, handled(0))]
    reports.heard(1, handled(1), now=9.0)
    assert reports.take(9.0) is not None, "it was the last"


def test_answers_are_kept_while_others_come_but_not_for_long():
    reports, now = JointReports(), 5.0
    reports.told(told(*range(100)))
    for partition in range(99):
        reports.heard(partition, handled(partition), now)
        if (packet := reports.take(now)) is not None:
            break
        now += 0.9 * PAUSE_S
    assert packet is not None
    assert HOLD_S <= now - 5.0 < HOLD_S + PAUSE_S
    assert len(packet.said[0].tasks) > 5


def test_what_is_no_answer_is_sent_at_once_with_all_that_was_said_before():
    reports = JointReports()
    reports.heard(0, handled(0), now=5.0)
    reports.heard(1, WorkerJoined(WorkerId("host", 1)), now=5.0)
    packet = reports.take(5.0)
    assert packet is not None
    assert said_by(packet) == [(0, handled(0)), (1, WorkerJoined(WorkerId("host", 1)))]


def test_answers_of_two_runs_are_not_mixed():
    reports = JointReports()
    for run in (0, 1):
        reports.heard(run, Handled(task(3, run), ControlReport(1, ("m",))), now=5.0)
    packet = reports.take(6.0)
    assert packet is not None
    assert [said.message.task.run for said in packet.said if isinstance(said.message, Handled)] == [0, 1]


messages = st.tuples(
    st.integers(0, 3),
    st.one_of(
        st.builds(lambda number, result: ("handled", number, result), st.integers(1, 3), st.sampled_from([None, b"x"])),
        st.sampled_from([("exhausted", 0, None), ("released", 0, None)]),
    ),
    st.floats(0, 2 * PAUSE_S),
)


@given(st.lists(messages, max_size=30), st.sets(st.integers(0, 3)))
@examples(200)
def test_nothing_is_dropped_or_doubled_and_the_order_of_each_task_is_kept(
    spoken: list[tuple[int, tuple[str, int, bytes | None], float]], told_: set[int]
) -> None:
    reports, now = JointReports(), 0.0
    said: dict[int, list[Message]] = defaultdict(list)
    heard: dict[int, list[Message]] = defaultdict(list)
    if told_:
        reports.told(told(*told_))

    def take() -> None:
        packet = reports.take(now)
        for worker, message in () if packet is None else said_by(packet):
            heard[worker].append(message)

    for number, (worker, (kind, operation, result), later) in enumerate(spoken):
        message: Message = handled(worker, 10 * number + operation, result)
        if kind == "handled":  # each task answers an operation once; operations are shared by the four tasks
            message = handled(worker, operation, result)
            if message in said[worker]:
                continue
        elif kind == "exhausted":
            message = Exhausted(task(worker), Revision(number))
        else:
            message = WorkerReleased(WorkerId("host", number))
        reports.heard(worker, message, now)
        said[worker].append(message)
        wait = reports.wait(now)
        assert wait is not None
        assert wait <= 1.001 * HOLD_S
        now += later
        take()
    now += 2 * HOLD_S
    take()
    assert {worker: each for worker, each in heard.items() if each} == {w: each for w, each in said.items() if each}


# ── down ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_told_to_many_workers_behind_a_relay_is_one_packet():
    one, change = order(), StageChange(Revision(2), Digest("cd"), ("m",))
    sends = [Send(behind(relay, each), Handle(task(each), one)) for each in range(3) for relay in (b"a", b"b")]
    sends += [Send(behind(b"a", each), Switch(task(each), change)) for each in range(3)]
    sends += [Send(b"direct", Handle(task(9), one)), *(Send(behind(b"b", each), Release()) for each in range(3))]
    packets = list(by_relay(sends))
    assert sorted(peer for peer, _ in packets) == [b"a", b"a", b"b", b"b", b"direct"]
    found: dict[bytes, list[ToTask]] = defaultdict(list)
    for peer, packet in packets:
        if isinstance(packet, ToWorkers):
            for number, message in unfold(packet):
                found[behind(peer, number)].append(message)
        else:
            found[peer].append(packet)
    expected: dict[bytes, list[ToTask]] = defaultdict(list)
    for send in sends:
        expected[send.peer].append(send.message)
    assert found == expected


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b""]), st.integers(0, 3), st.integers(0, 3)), max_size=40))
@examples(200)
def test_each_worker_gets_its_messages_in_order(sends_: list[tuple[bytes, int, int]]) -> None:
    orders = [order(number) for number in range(3)]
    sends = []
    for relay, worker, what in sends_:
        message: ToTask = Release() if what == 3 else Handle(task(worker), orders[what])
        sends.append(Send(behind(relay, worker) if relay else b"%d" % worker, message))
    found: dict[bytes, list[ToTask]] = defaultdict(list)
    expected: dict[bytes, list[ToTask]] = defaultdict(list)
    for peer, packet in by_relay(sends):
        if isinstance(packet, ToWorkers):
            for number, message in unfold(packet):
                found[behind(peer, number)].append(message)
        else:
            found[peer].append(packet)
    for send in sends:
        expected[send.peer].append(send.message)
    assert found == expected


def test_an_address_names_its_relay():
    assert relay_of(behind(b"relay", 2**31)) == b"relay"
    assert relay_of(b"0123456789abcdef") is None
