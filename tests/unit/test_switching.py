"""Where tasks switch: one point for each partition, fixed once, whatever attempts come and go."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec
import pytest

from midstream.control.messages import ChangeBegun, StageChange, SwitchPoint, TaskId
from midstream.control.operations.switching import Switching
from midstream.control.run_book import Attempts, Place
from midstream.ids import Digest, Epoch, InputPosition, Origin, PartitionId, Revision, Run, StageIndex

PROGRAMS = (Digest("p0"), Digest("p1"), Digest("p2"))


def place(stage: int = 0, partition: int = 0) -> Place:
    return StageIndex(stage), PartitionId(partition)


def task(stage: int = 0, partition: int = 0, attempt: int = 0) -> TaskId:
    return TaskId(Epoch(7), Run(0), StageIndex(stage), PartitionId(partition), attempt)


def attempts(*started: TaskId, over: tuple[TaskId, ...] = (), finished: tuple[Place, ...] = ()) -> Attempts:
    found = Attempts(over=set(over), finished=set(finished))
    for each in started:
        found.started.setdefault((each.stage, each.partition), set()).add(each)
    return found


def begun(heads: dict[int, tuple[str, ...]] | None = None, followers: dict[int, tuple[str, ...]] | None = None):
    return ChangeBegun(
        Revision(2),
        PROGRAMS,
        {StageIndex(stage): names for stage, names in ({0: ("FM",)} if heads is None else heads).items()},
        {StageIndex(stage): names for stage, names in (followers or {}).items()},
    )


def change(known: Attempts, what: ChangeBegun | None = None, partitions: int = 2) -> Switching:
    return Switching(what or begun(), known, {StageIndex(1): partitions, StageIndex(2): partitions})


def at(rows: int) -> InputPosition:
    return {Origin(-1): rows}


def points(of: Switching) -> dict[tuple[int, int], InputPosition | None]:
    return {(point.stage, point.partition): point.position for point in of.points}


# ── fixing a point ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_only_attempt_switches_where_it_asks():
    made = change(attempts(task()))
    assert made.apply(place(), at(5))
    assert made.points == (SwitchPoint(StageIndex(0), PartitionId(0), at(5)),)


def test_a_point_is_fixed_once():
    made = change(attempts(task()))
    made.apply(place(), at(5))
    assert not made.apply(place(), at(6)), "another attempt stays"
    assert made.apply(place(), at(5)), "a message that arrives twice gets the same answer"
    assert points(made) == {(0, 0): at(5)}


def test_a_later_attempt_switches_where_the_first_one_did():
    made = change(attempts(task()))
    made.apply(place(), at(5))
    assert made.start(place()) == at(5)


def test_a_partition_that_starts_after_the_change_switches_at_its_beginning():
    made = change(attempts())
    assert made.start(place()) == {}
    assert made.start(place()) == {}, "and so do all its attempts"


def test_a_partition_with_a_finished_attempt_switches_nowhere():
    made = change(attempts(task(), over=(task(),), finished=(place(),)))
    assert points(made) == {(0, 0): None}
    assert made.start(place()) is None, "a recomputation gives what the first one gave"


def test_two_attempts_before_the_change_switch_nowhere():
    made = change(attempts(task(attempt=0), task(attempt=1)))
    assert made.to_tell() == []
    assert not made.apply(place(), at(3))


def test_a_failed_attempt_does_not_fix_a_point():
    # No attempt is left to tell; the next one must not switch before rows that the failed one may have output.
    made = change(attempts(task(), over=(task(),)))
    assert points(made) == {(0, 0): None}


def test_after_a_failed_attempt_the_remaining_one_may_switch():
    made = change(attempts(task(attempt=0), task(attempt=1), over=(task(attempt=0),)))
    assert made.apply(place(), at(3))


def test_a_second_attempt_before_the_first_has_switched_prevents_switching():
    made = change(attempts(task()))
    assert made.start(place()) is None
    assert not made.apply(place(), at(5)), "the first one may not switch any more"


def test_a_task_that_finishes_before_it_has_switched_switches_nowhere():
    made = change(attempts(task()))
    made.finish(place())
    assert points(made) == {(0, 0): None}
    assert not made.apply(place(), at(5))


def test_a_task_that_finishes_after_switching_keeps_its_point():
    made = change(attempts(task()))
    made.apply(place(), at(5))
    made.finish(place())
    assert points(made) == {(0, 0): at(5)}


def test_stages_without_heads_have_no_points():
    made = change(attempts(), begun({0: ("FM",)}, {1: ("MC",)}))
    assert made.start(place(1)) is None
    made.finish(place(1))
    assert made.points == ()


# ── who knows about it: decided once for each place, because the end-of-epoch output depends on it ────────────────────


def test_a_place_that_starts_after_the_change_knows_of_it():
    made = change(attempts(), begun({0: ("FM",)}, {1: ("MC",)}))
    made.start(place())
    made.start(place(1))
    assert made.is_known_at(place())
    assert made.is_known_at(place(1)), "a stage without heads, too"


def test_a_place_without_heads_that_had_started_before_never_knows_of_it():
    made = change(attempts(task(stage=1)), begun({0: ("FM",)}, {1: ("MC",)}))
    assert not made.is_known_at(place(1))
    made.start(place(1))
    assert not made.is_known_at(place(1)), "the first attempt has not heard of it, and may have finished"


def test_a_place_with_heads_that_had_started_before_knows_of_it_once_it_has_switched():
    made = change(attempts(task()))
    assert not made.is_known_at(place())
    made.apply(place(), at(5))
    assert made.is_known_at(place())


def test_a_place_that_must_stay_does_not_know_of_it():
    made = change(attempts(task(), over=(task(),), finished=(place(),)))
    made.start(place())
    assert not made.is_known_at(place())


# ── who is told ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_running_tasks_of_the_heads_are_told():
    made = change(attempts(task(partition=0), task(partition=1), task(stage=1)))
    assert made.to_tell() == [
        (task(partition=partition), StageChange(Revision(2), PROGRAMS[0], ("FM",))) for partition in (0, 1)
    ]


def test_tasks_with_a_fixed_point_are_not_told():
    made = change(attempts(task(partition=0), task(partition=1), over=(task(),), finished=(place(),)))
    assert [told for told, _ in made.to_tell()] == [task(partition=1)]


def test_tasks_of_later_stages_learn_the_new_program():
    made = change(attempts(), begun({0: ("FM",)}, {1: ("MC",)}))
    assert made.stage_change(StageIndex(1)) == StageChange(Revision(2), PROGRAMS[1], ())


# ── in effect ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_of_heads_is_in_effect_when_all_running_tasks_have_switched():
    made = change(attempts(task(partition=0), task(partition=1)))
    assert not made.in_effect
    made.apply(place(partition=0), at(5))
    assert not made.in_effect
    made.apply(place(partition=1), at(9))
    assert made.in_effect


def test_a_finished_partition_does_not_delay_the_effect():
    known = attempts(task(partition=0), task(partition=1), over=(task(),), finished=(place(),))
    made = change(known)
    made.apply(place(partition=1), at(5))
    assert made.in_effect


def test_a_running_partition_that_must_stay_delays_the_effect_until_it_finishes():
    known = attempts(task(partition=0, attempt=0), task(partition=0, attempt=1))
    made = change(known)
    assert not made.in_effect
    known.finished.add(place())
    made.finish(place())
    assert made.in_effect


def test_followers_must_be_reached_or_finished_in_every_partition():
    known = attempts(task())
    made = change(known, begun({0: ("FM",)}, {1: ("MC",)}), partitions=2)
    made.apply(place(), at(5))
    assert not made.in_effect, "rows of the old revision come first behind an exchange"
    made.reach(place(1, 0))
    assert not made.in_effect
    made.reach(place(1, 0))
    assert not made.in_effect, "the same partition again is not another one"
    known.finished.add(place(1, 1))
    made.finish(place(1, 1))
    assert made.in_effect


@pytest.mark.parametrize("seed", range(40))
def test_the_state_kept_up_to_date_equals_what_a_look_at_all_tasks_finds(seed: int):
    """Three stages of three places: heads in the first and the third one, followers in the second and third."""
    rng, partitions = random.Random(seed), 3
    places = [place(stage, partition) for stage in range(3) for partition in range(partitions)]
    heads: dict[int, tuple[str, ...]] = {0: ("FM",), 2: ("MC",)}
    followers: dict[int, tuple[str, ...]] = {1: ("X",), 2: ("Y",)} if seed % 2 else {}
    known, reached, exhausted, numbers = attempts(), set[Place](), set[Place](), itertools.count()

    def start() -> None:
        stage = 0 if made is None or rng.random() < 0.5 else rng.randrange(3)
        new = task(stage, rng.randrange(partitions), next(numbers))
        known.started.setdefault((new.stage, new.partition), set()).add(new)
        if made is not None:
            made.start((new.stage, new.partition))

    def is_in_effect(of: Switching) -> bool:
        over, fixed = known.finished | exhausted, points(of)
        told = [each for each in known.started if each[0] in heads and each not in over]
        arrived = Counter(stage for stage, _ in reached | known.finished)
        return all(fixed.get(each) is not None for each in told) and all(
            arrived[StageIndex(stage)] >= partitions for stage in followers
        )

    made: Switching | None = None
    for _ in range(rng.randrange(6)):
        start()
        if rng.random() < 0.4:
            known.finish(rng.choice([each for of in known.started.values() for each in of]))
    made, seen = change(known, begun(heads, followers), partitions), set()
    for _ in range(300):
        match rng.randrange(5):
            case 0:
                start()
            case 1 if running := sorted(known.started):
                made.apply(rng.choice(running), at(rng.randrange(3)))
            case 2 if running := sorted(known.started):
                known.finish(min(known.started[found := rng.choice(running)]))
                made.finish(found)
            case 3:
                reached.add(found := rng.choice(places))
                made.reach(found)
            case 4 if running := [each for each in known.started if each[0] in heads]:
                exhausted.add(found := rng.choice(sorted(running)))
                made.exhaust(found)
        seen.add(made.in_effect)
        assert made.in_effect == is_in_effect(made)
    assert True in seen


def test_a_change_cannot_take_effect_after_followers_have_started():
    # All their input was computed before the change.
    made = change(attempts(task(), task(stage=1)), begun({0: ("FM",)}, {1: ("MC",)}), partitions=1)
    made.apply(place(), at(5))
    made.reach(place(1, 0))
    assert not made.in_effect


def test_a_change_with_a_side_entrance_is_not_in_effect_before_the_epoch_ends():
    # Rows of the old revision reach MC without passing FM.
    straight = begun({0: ("FM", "MC")})
    for what, is_in_effect in ((straight, True), (msgspec.structs.replace(straight, has_side_entrance=True), False)):
        made = change(attempts(task()), what)
        made.apply(place(), at(5))
        assert made.in_effect is is_in_effect


# ── attempts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_attempts_are_alive_until_they_report_their_end():
    known = attempts(task(attempt=0), task(attempt=1), over=(task(attempt=0),))
    assert known.alive(place()) == {task(attempt=1)}
    assert known.alive(place(partition=1)) == set()


def test_places_of_a_stage_are_those_at_which_an_attempt_has_started():
    known = attempts(task(partition=1), task(partition=0), task(stage=1))
    assert known.places(StageIndex(0)) == [place(partition=0), place(partition=1)]


def test_a_task_without_rows_left_is_not_waited_for_and_no_other_attempt_may_switch():
    made = change(attempts(task(), task(partition=1)))
    assert made.apply(place(), at(5))
    before = made.in_effect
    made.exhaust(place(partition=1))
    assert (before, made.in_effect) == (False, True)
    assert not made.apply(place(partition=1), at(0)), "another attempt stays"


def test_an_exhausted_task_that_had_switched_stays_switched():
    made = change(attempts(task()), partitions=1)
    made.apply(place(), at(5))
    made.exhaust(place())
    assert points(made) == {(0, 0): at(5)}
