"""Schedules against slow oracles: exact fractions, and one schedule spelled out as another."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from midstream.flow.sources import NEVER_US, Constant, Schedule, SquareWave, Step

DAYS_100 = 100 * 86_400 * 1_000_000

some_rate = st.one_of(st.integers(1, 5_000_000), st.floats(0.001, 5e6), st.sampled_from([1e6 / 3, 0.1, 7.7, 1e9]))
any_rate = st.one_of(st.just(0), some_rate)
seconds = st.one_of(st.integers(1, 100_000), st.floats(0.001, 1000))

constants = st.builds(Constant, some_rate)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    gaps = draw(st.lists(seconds, min_size=1, max_size=5))
    start = draw(st.sampled_from([0, 0.5]))
    rates = draw(st.lists(any_rate, min_size=len(gaps), max_size=len(gaps)))
    rates[draw(st.integers(0, len(rates) - 1))] = draw(some_rate)
    times = [start + sum(gaps[:n]) for n in range(len(gaps))]
    return Step(tuple(zip(times, rates, strict=True)))


@st.composite
def waves(draw: st.DrawFn) -> SquareWave:
    low, high = sorted([draw(any_rate), draw(some_rate)])
    return SquareWave(low, high, draw(seconds), draw(st.floats(0.01, 0.99)))


schedules = st.one_of(constants, steps(), waves())
times = st.one_of(st.integers(0, 50), st.integers(0, 10_000_000), st.integers(0, DAYS_100))


@given(schedules, times, st.integers(-3, 3))
def test_an_event_is_counted_before_a_time_exactly_when_it_is_due_before_it(schedule: Schedule, t: int, around: int):
    # Indexes close to the count are the ones that could be off by one.
    index = max(0, schedule.count_until(t) + around)
    due = int(schedule.time_of(np.array([index]))[0])
    assert (index < schedule.count_until(t)) == (due < t)
    # And the same at the event's own time, where the boundary is exact.
    if due != NEVER_US:
        assert schedule.count_until(due) <= index < schedule.count_until(due + 1)


@given(schedules, times, st.integers(1, 300))
def test_times_never_decrease_and_do_not_depend_on_the_other_events_of_a_call(schedule: Schedule, t: int, count: int):
    first = schedule.count_until(t)
    together = schedule.time_of(np.arange(first, first + count))
    assert together.dtype == np.int64
    assert bool((np.diff(together) >= 0).all())
    assert together[-1] == schedule.time_of(np.array([first + count - 1]))[0]
    with_event_zero = schedule.time_of(np.array([first + count - 1, 0]))
    assert with_event_zero[0] == together[-1]


@given(schedules, times, times)
def test_counts_start_at_zero_and_never_decrease(schedule: Schedule, one: int, other: int):
    assert schedule.count_until(0) == schedule.count_until(-5) == 0
    assert schedule.count_until(min(one, other)) <= schedule.count_until(max(one, other))


@given(steps(), times)
def test_a_step_counts_what_exact_fractions_count(schedule: Step, t: int):
    # Rates and times have a resolution of one millionth; within it, the count is the integral of the rate.
    due = Fraction(0)
    edges = [(Fraction(round(Fraction(at) * 10**6)), rate) for at, rate in schedule.steps]
    for (start, rate), (end, _) in pairwise([*edges, (Fraction(max(t, int(edges[-1][0]))), 0)]):
        exact = Fraction(round(Fraction(rate) * 10**6), 10**6)
        due += max(Fraction(0), min(Fraction(t), end) - start) * exact / 10**6
    assert schedule.count_until(t) == -(-due.numerator // due.denominator)


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(2, 60), st.integers(0, 239_999_999))
@example(low=0, extra=1, period=2, t=200_000_001)  # half an event a period: the hundred events last 400 s
def test_a_square_wave_equals_its_steps(low: int, extra: int, period: int, t: int):
    wave = SquareWave(low, low + extra, period, duty=0.25)
    near = np.arange(wave.count_until(t), wave.count_until(t) + 100)
    # What is compared with must be spelled out beyond the last event that is asked for.
    periods = int(wave.time_of(near)[-1]) // (period * 1_000_000) + 2
    edges = [(n * period + part * period, (low + extra, low)[part > 0]) for n in range(periods) for part in (0, 0.25)]
    spelled_out = Step(tuple(edges))
    assert wave.count_until(t) == spelled_out.count_until(t)
    assert wave.time_of(near).tolist() == spelled_out.time_of(near).tolist()


@given(constants, times)
def test_a_constant_is_a_single_step(schedule: Constant, t: int):
    assert schedule.count_until(t) == Step(((0, schedule.rate),)).count_until(t)


@given(st.lists(st.tuples(seconds, any_rate), min_size=1, max_size=4), some_rate, st.integers(-2, 2))
def test_a_last_rate_of_zero_ends_the_stream(parts: list[tuple[float, float]], rate: float, around: int):
    edges = [(0.0, rate)]
    for gap, later_rate in [*parts, (1, 0)]:
        edges.append((edges[-1][0] + gap, later_rate))
    schedule = Step(tuple(edges))
    assert schedule.total == schedule.count_until(DAYS_100)
    index = max(0, schedule.total + around)
    assert (schedule.time_of(np.array([index]))[0] == NEVER_US) == (index >= schedule.total)
