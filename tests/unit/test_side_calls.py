"""Calls that may take as long as they like: few threads if they are quick, and none waits for one that is not."""

import threading
import time
from functools import partial

from midstream.runtime.spark.side_calls import SideCalls

PATIENCE_S = 20


def until_idle(calls):
    """Wait until the last call has returned."""
    deadline = time.monotonic() + PATIENCE_S
    while calls._open or calls._busy:
        assert time.monotonic() < deadline


def test_quick_calls_share_threads():
    calls, threads, overdue = SideCalls(), set(), []
    for _ in range(200):
        done = threading.Event()

        def call(done=done):
            threads.add(threading.current_thread())
            done.set()

        calls.make(call, PATIENCE_S, lambda: overdue.append(1))
        assert done.wait(PATIENCE_S)
    assert len(threads) <= 5
    assert not overdue


def test_calls_that_come_at_once_are_all_made_in_their_order():
    made: list[int] = []
    calls, done = SideCalls(), threading.Event()
    for number in range(100):
        calls.make(partial(made.append, number), PATIENCE_S, made.clear)
    calls.make(done.set, PATIENCE_S, made.clear)
    assert done.wait(PATIENCE_S)
    assert made[:10] == list(range(10))
    assert sorted(made) == list(range(100))


def test_calls_that_hang_hold_up_nobody():
    calls, hang, hanging, overdue = SideCalls(), threading.Event(), threading.Semaphore(0), []

    def wait():
        hanging.release()
        hang.wait(PATIENCE_S)

    try:
        for _ in range(20):
            calls.make(wait, PATIENCE_S, lambda: overdue.append(1))
        done = threading.Event()
        calls.make(done.set, PATIENCE_S, lambda: overdue.append(1))
        assert done.wait(PATIENCE_S)
        assert all(hanging.acquire(timeout=PATIENCE_S) for _ in range(20))
        assert not overdue
    finally:
        hang.set()


def test_only_what_is_overdue_is_told_so_and_once():
    calls, hang, told, others = SideCalls(), threading.Event(), threading.Semaphore(0), []
    try:
        calls.make(lambda: hang.wait(PATIENCE_S), 0.05, told.release)
        calls.make(lambda: None, PATIENCE_S, lambda: others.append(1))
        assert told.acquire(timeout=PATIENCE_S)
        again = threading.Semaphore(0)
        calls.make(lambda: hang.wait(PATIENCE_S), 0.05, again.release)
        assert again.acquire(timeout=PATIENCE_S)
        assert not told.acquire(blocking=False)
        assert not others
    finally:
        hang.set()


def test_a_call_that_fails_does_not_end_its_thread(caplog):
    calls, done = SideCalls(), threading.Event()
    calls.make(lambda: 1 // 0, PATIENCE_S, lambda: None)
    calls.make(done.set, PATIENCE_S, lambda: None)
    assert done.wait(PATIENCE_S)
    until_idle(calls)
    assert "a call beside the epochs failed" in caplog.text


def test_nothing_is_left_of_calls_that_are_over():
    before = threading.active_count()
    calls, done = SideCalls(), threading.Event()
    calls.make(lambda: None, PATIENCE_S, lambda: None)
    calls.make(done.set, PATIENCE_S, lambda: None)
    assert done.wait(PATIENCE_S)
    until_idle(calls)
    calls.close()
    assert threading.active_count() == before
    again = threading.Event()
    calls.make(again.set, PATIENCE_S, lambda: None)
    assert again.wait(PATIENCE_S), "later ones are made all the same"


def test_calls_that_hang_do_not_hold_up_the_end():
    calls, hang, hanging, over = SideCalls(), threading.Event(), threading.Event(), threading.Event()

    def wait():
        hanging.set()
        hang.wait(PATIENCE_S)
        over.set()

    calls.make(wait, PATIENCE_S, lambda: None)
    assert hanging.wait(PATIENCE_S)
    calls.close()
    assert not over.is_set()
    hang.set()
    assert over.wait(PATIENCE_S), "it is finished nevertheless"
