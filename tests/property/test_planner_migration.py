"""Strategies of migrations against brute force: every step is possible, and together they give exactly the target."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, spread
from midstream.planner.disjoint_steps import EXACT_MOVES, disjoint_steps, largest_degree
from midstream.planner.migration import (
    BIN_BYTES,
    GROWTH,
    BinMove,
    Itinerary,
    Steps,
    batched,
    budgeted,
    fluid,
    moves_between,
    sudden,
)
from midstream.planner.reassignment import rescaled
from midstream.planner.step_budget import LEAST_SHARE, SHARE_OF_EPOCH, STEPS_PER_PAUSE
from midstream.planner.step_cost import Budget, StepCost
from tests.examples import examples

Assignments = dict[StageIndex, Assignment]
STAGES = (StageIndex(1), StageIndex(2))


@st.composite
def targets(draw: st.DrawFn, most_bins: int = 5, most_partitions: int = 5) -> tuple[Assignments, Assignments]:
    """Where bins are, and where they should be, in two stages."""
    bins = 1 << draw(st.integers(0, most_bins))

    def assignment() -> Assignment:
        partitions = draw(st.integers(1, most_partitions))
        return Assignment(partitions, tuple(draw(st.integers(0, partitions - 1)) for _ in range(bins)))

    return {stage: assignment() for stage in STAGES}, {stage: assignment() for stage in STAGES}


def size_of(move: BinMove) -> int:
    return 1000 * (move.bin % 7) * (1 + move.stage)


def strategies(moves: Sequence[BinMove]) -> dict[str, Steps]:
    return {
        "sudden": sudden(moves),
        "fluid": fluid(moves),
        "batched": batched(moves),
        "lax": batched(moves, lax=True),
        "budgeted": budgeted(moves, size_of, Budget(bytes=5000)),
    }


@pytest.mark.parametrize("name", ["sudden", "fluid", "batched", "lax", "budgeted"])
@given(case=targets())
def test_all_steps_together_give_exactly_the_target_by_valid_assignments(name: str, case):
    before, after = case
    itinerary, now = Itinerary(after), dict(before)
    moved: list[BinMove] = []
    for step in strategies(moves_between(before, after))[name]:
        assert step, "a step moves something"
        following = itinerary.after_step(now, step)  # Assignment refuses owners that do not exist
        assert set(moves_between(now, following)) == set(step)
        for stage in STAGES:
            most = max(before[stage].partitions, after[stage].partitions)
            assert following[stage].partitions == (
                after[stage].partitions if following[stage].owners == after[stage].owners else most
            )
        moved += step
        now = following
    assert sorted(moved) == sorted(moves_between(before, after)), "each bin that moves does so once"
    if moved:
        now = itinerary.after_step(now, ())
    assert all(now[stage].owners == after[stage].owners for stage in STAGES)
    if not moved:
        now = itinerary.after_step(now, ())
    assert now == after
    assert itinerary.is_over(now)


@given(targets())
def test_fluid_moves_one_bin_a_step_and_sudden_all_in_one(case):
    moves = moves_between(*case)
    assert [len(step) for step in fluid(moves)] == [1] * len(moves)
    assert list(sudden(moves)) == ([moves] if moves else [])


edges = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda edge: edge[0] != edge[1]), min_size=1, max_size=40
)


def assert_disjoint(moves: Sequence[tuple[int, int]], steps: list[list[int]], *, lax: bool = False) -> None:
    assert sorted(position for step in steps for position in step) == list(range(len(moves)))
    for step in steps:
        sides = [[2 * moves[each][0], 2 * moves[each][1] + 1] if lax else list(moves[each]) for each in step]
        count = Counter(end for side in sides for end in side)
        assert max(count.values()) == 1, step


@given(edges)
def test_in_a_step_of_batched_no_partition_is_in_two_moves(moves):
    steps = disjoint_steps(moves)
    assert_disjoint(moves, steps)
    degree = largest_degree(moves)
    assert degree <= len(steps) <= 3 * -(-degree // 2)


@given(edges)
def test_lax_gives_one_and_takes_one_in_the_least_number_of_steps(moves):
    steps = disjoint_steps(moves, lax=True)
    assert_disjoint(moves, steps, lax=True)
    assert len(steps) == largest_degree(moves, lax=True)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(6, 11)), min_size=1, max_size=60))
def test_if_no_partition_gives_and_takes_there_are_as_many_steps_as_the_most_moves_of_one(moves):
    steps = disjoint_steps(moves)
    assert_disjoint(moves, steps)
    assert len(steps) == largest_degree(moves)


def fewest(moves: Sequence[tuple[int, int]]) -> int:
    """The least number of steps: every set of disjoint moves is tried as the step of the first move that is left."""
    if not moves:
        return 0
    best = len(moves)

    def choose(step: list[int], position: int) -> None:
        nonlocal best
        if position == len(moves):
            rest = [move for number, move in enumerate(moves) if number not in step]
            best = min(best, 1 + fewest(rest))
            return
        if not any({*moves[each]} & {*moves[position]} for each in step):
            choose([*step, position], position + 1)
        choose(step, position + 1)

    choose([0], 1)
    return best


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda e: e[0] != e[1]), min_size=1, max_size=6))
def test_no_other_choice_of_steps_is_shorter(moves):
    assert len(moves) <= EXACT_MOVES
    assert len(disjoint_steps(moves)) == fewest(moves)


@pytest.mark.parametrize(("before", "after", "steps"), [(1, 2, 128), (4, 8, 32), (8, 4, 32), (3, 1, 170)])
def test_the_papers_numbers_of_steps_come_out(before: int, after: int, steps: int):
    """Megaphone's migrations from 1 to 2 and from 4 to 8 workers take 128 and 32 steps."""
    now = {STAGES[0]: spread(before)}
    moves = moves_between(now, {STAGES[0]: rescaled(now[STAGES[0]], after)})
    assert len(list(batched(moves))) == steps


def test_the_most_difficult_graph_needs_half_as_many_steps_again():
    """Three partitions in a triangle of double moves (Shannon): six steps for a degree of four."""
    moves = [(0, 1), (1, 2), (2, 0)] * 2
    assert largest_degree(moves) == 4
    assert len(disjoint_steps(moves)) == 6
    assert len(disjoint_steps(moves * 4)) == 24


# ── budgets ───────────────────────────────────────────────────────────────────────────────────────────────────────


def many(count: int) -> tuple[BinMove, ...]:
    before = {STAGES[0]: Assignment(1, (0,) * count)}
    return moves_between(before, {STAGES[0]: Assignment(2, (1,) * count)})


def run_against(steps: Steps, epoch_ms, size: int, steady_ms: float = 100.0) -> list[tuple[int, float]]:
    """Bins per step and milliseconds of its epoch, on a machine that takes ``epoch_ms(bytes)``; without epochs in which
    nothing moved."""
    found: list[tuple[int, float]] = []
    cost: StepCost | None = None
    while True:
        try:
            step = steps.send(cost)
        except StopIteration:
            return found
        took = epoch_ms(size * len(step))
        if step:
            found.append((len(step), took))
        cost = StepCost(len(step), size * len(step), took, steady_ms)


@given(st.floats(0.01, 2.0), st.integers(1, 1 << 22), st.floats(5.0, 60.0))
def test_no_step_costs_more_than_its_budget_unless_one_bin_does(ms_per_64k: float, size: int, budget: float):
    def epoch_ms(moved: int) -> float:
        bins = moved // size
        return 100.0 + ms_per_64k * (moved + bins * BIN_BYTES) / (64 * 1024)

    found = run_against(budgeted(many(256), lambda move: size, Budget(ms=budget)), epoch_ms, size)
    assert sum(bins for bins, _ in found) == 256
    for bins, took in found:
        assert bins == 1 or took - 100.0 <= budget * 1.001
    for (one, _), (next_one, _) in pairwise(found):
        assert next_one <= GROWTH * one + 1


@pytest.mark.parametrize("price", [1e-7, 1e-6, 5e-6])
@pytest.mark.parametrize("noise", [0.02, 0.035, 0.05])
def test_nearly_no_epoch_exceeds_the_budget_although_epochs_and_prices_vary(price: float, noise: float):
    """Rows that fall due during a long epoch make the next one longer; 95% stay within the budget (M13)."""
    steady_ms, budget_ms, backlog, size = 200.0, 40.0, 0.3, 1 << 20
    over: list[float] = []
    for seed in range(40):
        rng, last = random.Random(seed), steady_ms
        steps, cost = budgeted(many(256), lambda move: size, Budget(ms=budget_ms)), None
        with contextlib.suppress(StopIteration):
            while True:
                count = len(steps.send(cost))
                usual = (steady_ms * (1 - backlog) + backlog * last) * rng.lognormvariate(0, noise)
                last = usual + price * count * (size + BIN_BYTES) * rng.lognormvariate(0, 0.2)
                over.append(last - steady_ms)
                cost = StepCost(count, count * size, last, steady_ms)
    assert sorted(over)[int(0.95 * len(over))] <= budget_ms


def test_what_bytes_cost_is_learnt_and_used():
    cheap = run_against(
        budgeted(many(256), lambda move: 1 << 20, Budget(ms=20.0)), lambda moved: 100 + moved / 1e7, 1 << 20
    )
    dear = run_against(
        budgeted(many(256), lambda move: 1 << 20, Budget(ms=20.0)), lambda moved: 100 + moved / 1e6, 1 << 20
    )
    assert len(cheap) < 10 < len(dear) < 20
    assert max(bins for bins, _ in dear) < max(bins for bins, _ in cheap)


@dataclass
class Machine:
    """A machine on which epochs have a level, whatever is moved, and a price of what is moved; both are ``slower`` from
    an epoch on. Rows that fall due during a long epoch make the next one longer, and epochs vary."""

    slower: float
    since: int
    noise: float
    ms_per_byte: float = 1e-6
    level_ms: float = 200.0
    backlog: float = 0.3

    def migrate(self, budget: Budget, seed: int, *, bins: int = 128, size: int = 20_000) -> list[tuple[int, float]]:
        """Bins and added milliseconds of each epoch."""
        rng, last, found = random.Random(seed), self.level_ms, list[tuple[int, float]]()
        steps, cost = budgeted(many(bins), lambda move: size, budget), None
        with contextlib.suppress(StopIteration):
            while True:
                count = len(steps.send(cost))
                slower = self.slower if len(found) >= self.since else 1.0
                usual = (self.level_ms * slower * (1 - self.backlog) + self.backlog * last) * rng.lognormvariate(
                    0, self.noise
                )
                added = self.ms_per_byte * slower * count * (size + BIN_BYTES)
                last = usual + added
                found.append((count, added))
                cost = StepCost(count, count * size, last, self.level_ms)
        return found


@pytest.mark.parametrize("since", [0, 4])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("slower", [3.0, 10.0])
@pytest.mark.parametrize("budget", [Budget(), Budget(ms=40.0)])
def test_a_busy_machine_is_not_taken_for_the_price_of_bins(budget: Budget, slower: float, noise: float, since: int):
    """All bins together cost less than the budget, so there is nothing to learn but that: a few steps more than the
    eight by which steps of one bin double to 128, not one bin a step. All moves of a whole migration are much less than
    the machine's noise, and epochs are many times as long as before."""
    runs = [Machine(slower, since, noise).migrate(budget, seed) for seed in range(8)]
    epochs = sorted(len(run) for run in runs)
    assert epochs[len(epochs) // 2] <= 24
    assert epochs[-1] <= 64


@pytest.mark.parametrize("since", [0, 12])
def test_a_machine_that_becomes_slow_moves_as_much_an_epoch_for_the_same_share_of_it(since: int):
    """Everything takes five times as long, moves too. Without a named budget, a fifth of an epoch is what it was."""
    bin_ms, level_ms = 4.0, 200.0
    machine = Machine(5.0, since, 0.02, ms_per_byte=bin_ms / (20_000 + BIN_BYTES), level_ms=level_ms)
    busy, calm = (run.migrate(Budget(), 7, bins=256) for run in (machine, replace(machine, slower=1.0)))
    assert len(busy) <= 2 * len(calm)
    fitting = SHARE_OF_EPOCH * level_ms / bin_ms
    assert max(bins for bins, _ in calm) <= fitting
    assert max(bins for bins, _ in busy) <= GROWTH * fitting, "one step may show that a slow machine's price is higher"


def test_while_rows_have_piled_up_a_fixed_part_of_the_budget_is_used():
    """Epochs take four times as long although nothing is slower: rows have piled up. A bin costs what it did before."""
    bin_ms, steady_ms, budget_ms = 1.0, 100.0, 20.0
    steps, cost, moved = budgeted(many(1024), lambda move: 0, Budget(ms=budget_ms)), None, list[int]()
    for number in range(40):
        step = steps.send(cost)
        moved.append(len(step))
        level_ms = steady_ms if number < 10 else 4 * steady_ms
        cost = StepCost(len(step), 0, level_ms + bin_ms * len(step), steady_ms)
    calm, busy = moved[9], [bins for bins in moved[11:] if bins]
    assert calm == budget_ms / bin_ms
    assert max(busy[:4]) <= calm / 2
    assert min(busy) >= calm * LEAST_SHARE
    assert moved[10:].count(0) <= 2 + len(moved) // STEPS_PER_PAUSE
    assert busy[-1] == calm, "what lasts is usual"


def test_a_machine_that_is_slow_for_one_epoch_is_asked_again_before_anything_is_learnt():
    steps, cost, moved = budgeted(many(64), lambda move: 0, Budget(ms=20.0)), None, list[int]()
    with contextlib.suppress(StopIteration):
        while True:
            moved.append(len(steps.send(cost)))
            cost = StepCost(moved[-1], 0, 900.0 if len(moved) == 3 else 100.0 + 0.1 * moved[-1], 100.0)
    assert moved[:5] == [1, 2, 4, 0, 1]
    assert len(moved) <= 14


@dataclass(frozen=True)
class Jittery:
    """A machine like that of the benchmark with ten million keys: epochs of half a second that vary by much more than a
    step is allowed to add. A step costs something, however many bins it has, and a bin much or next to nothing."""

    noise: float
    is_spiky: bool = False
    slower: float = 1.0
    since: int = 0
    step_ms: float = 20.0
    loaded_bin_ms: float = 0.3
    read_bin_ms: float = 20.0
    level_ms: float = 500.0
    backlog: float = 0.3

    def factor(self, rng: random.Random) -> float:
        if self.is_spiky:  # one epoch of five does something more, as when files are merged
            return 1.0 + (rng.uniform(0.4, 1.0) if rng.random() < 0.2 else rng.gauss(0, 0.05))
        return rng.lognormvariate(-(self.noise**2) / 2, self.noise)

    def migrate(self, seed: int, loaded: range, bins: int = 128, size: int = 2_400_000) -> list[tuple[int, float]]:
        """Bins and added milliseconds of each epoch. Bins are loaded ahead if so many have moved before."""
        rng, last, calm = random.Random(seed), self.level_ms, list[float]()

        def usual(slower: float) -> float:
            return (self.level_ms * slower * (1 - self.backlog) + self.backlog * last) * self.factor(rng)

        for _ in range(20):
            calm.append(last := usual(1.0))
        steps, cost, found = budgeted(many(bins), lambda move: size, Budget()), None, list[tuple[int, float]]()
        with contextlib.suppress(StopIteration):
            while True:
                count = len(steps.send(cost))
                slower = self.slower if len(found) >= self.since else 1.0
                is_loaded = sum(bins for bins, _ in found) in loaded
                bin_ms = self.loaded_bin_ms if is_loaded else self.read_bin_ms
                added = slower * (self.step_ms + bin_ms * count) if count else 0.0
                last = usual(slower) + added
                found.append((count, added))
                if not count:
                    calm = [*calm[1:], last]
                cost = StepCost(count, count * size, last, statistics.median(calm), max(calm), is_loaded)
        return found


ALL_LOADED, NONE_LOADED, FIRST_READ = range(128), range(0), range(20, 128)


@pytest.mark.parametrize(
    "machine",
    [
        *(Jittery(noise) for noise in (0.0, 0.05, 0.1, 0.3, 0.5)),
        *(Jittery(noise, step_ms=60.0) for noise in (0.05, 0.1, 0.3)),
        *(Jittery(0.3, slower=slower, since=since) for slower in (3.0, 10.0) for since in (0, 4)),
        Jittery(0.0, is_spiky=True),
    ],
)
def test_what_is_loaded_ahead_moves_in_few_steps_however_much_epochs_vary(machine: Jittery):
    """A step of one bin looks dear by chance, or because of what any step takes; seen: 126 steps for 128 bins."""
    epochs = sorted(len(machine.migrate(seed, ALL_LOADED)) for seed in range(60))
    assert epochs[int(0.95 * len(epochs))] <= 15
    assert epochs[-1] <= 128


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_what_is_loaded_ahead_and_costs_much_all_the_same_has_a_price(noise: float):
    machine = Jittery(noise, step_ms=0.0, loaded_bin_ms=20.0)
    budget_ms, runs = SHARE_OF_EPOCH * machine.level_ms, [machine.migrate(seed, ALL_LOADED) for seed in range(40)]
    added = [ms for run in runs for bins, ms in run if bins]
    assert sum(ms > 1.1 * budget_ms for ms in added) <= 0.05 * len(added)
    for run in runs:
        assert sum(ms > 1.1 * budget_ms for _, ms in run) <= 8, "found out, then known"


def test_bins_that_are_read_at_first_and_then_loaded_ahead_move_in_larger_steps_from_there_on():
    for seed in range(20):
        machine = Jittery(0.05)
        moved = [bins for bins, _ in machine.migrate(seed, FIRST_READ) if bins]
        assert len(moved) <= 32
        assert len(moved) < len(machine.migrate(seed, NONE_LOADED)) / 2


def test_a_budget_of_bytes_is_kept_exactly_unless_a_bin_is_larger():
    steps = list(budgeted(many(64), lambda move: 1000 * (1 + move.bin % 3), Budget(bytes=5000)))
    for step in steps:
        assert sum(1000 * (1 + move.bin % 3) for move in step) <= 5000
    assert len(steps) < 40
    assert [len(step) for step in budgeted(many(4), lambda move: 9000, Budget(bytes=5000))] == [1] * 4
