"""Controllers of a job: attached and detached, in one order, contained when they fail, and their proposals told."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from midstream import (
    AutoScale,
    Balance,
    Controller,
    ControlOperation,
    Executors,
    Migrate,
    Move,
    Observation,
    Outcome,
    Pace,
    Proposal,
    Rebalance,
    Rescale,
    Situation,
    Tune,
    Update,
)
from midstream.controllers.arbiter import HOLD, LONGEST_REST, MOST_AT_ONCE, REST, Arbiter, _Claim, _Failures
from midstream.controllers.auto_scale import SPARE
from midstream.controllers.proposal_records import ProposalOutcome, ProposalRecord
from midstream.controllers.situation import StageLoad
from midstream.errors import FlowError
from midstream.observation import OperatorObservation
from midstream.planner.assignment import spread
from midstream.runtime import controller_desk
from midstream.runtime.controller_desk import ControllerDesk, Requested
from midstream.runtime.steering import SteeringThread
from midstream.runtime.watch import Watch, Watches
from tests.migrated import ROWS, SteppedJob, stepped_job
from tests.plants import PacePlant

SOON = 60.0

Decides = Callable[[Situation, Any], Any]


@dataclass(frozen=True)
class Scripted(Controller):
    """Decides as a function does."""

    does: Decides

    def decide(self, seen: Situation, memory: Any) -> Any:
        return self.does(seen, memory)


def always(*operations: Any, **how: Any) -> Scripted:
    """Proposes the same in every epoch."""
    found = [Proposal(each, "because", {"n": 1.0}, how) for each in operations]
    return Scripted(lambda seen, memory: (found, memory))


def once(operation: Any, **how: Any) -> Scripted:
    """Proposes something in its first epoch."""

    def decide(seen: Situation, memory: Any) -> Any:
        return ([] if memory else [Proposal(operation, "because", {"n": 1.0}, how)]), True

    return Scripted(decide)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SteppedJob]:
    with stepped_job(tmp_path) as found:
        found.run(2)
        yield found


def outcomes(found: Sequence[ProposalRecord]) -> list[tuple[str, str]]:
    return [(each.controller, str(each.outcome)) for each in found]


# ── on a job ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_controller_rescales_a_job_and_the_history_says_why(job: SteppedJob):
    state = job.attach(once(Rescale(4), strategy="sudden"), name="grow")
    assert (state.name, state.advises, state.stopped) == ("grow", False, None)
    job.run()
    [pending] = job.proposals()
    assert (pending.operation, pending.reason, pending.figures) == ("rescale all stages to 4", "because", {"n": 1.0})
    assert (pending.outcome, pending.epoch) == (ProposalOutcome.PENDING, 2)
    job.run(3)
    [record] = job.proposals()
    assert record.outcome is ProposalOutcome.APPLIED
    assert record.ended_at is not None
    assert job.owners().partitions == 4
    [change] = [each for each in job.history() if each.number == record.change]
    assert (change.by, change.note, change.outcome) == ("controller grow", "because", Outcome.APPLIED)
    assert job.controllers[0].applied == job.controllers[0].proposals == 1
    job.assert_gapless()


def test_what_a_controller_sees_is_what_the_job_has(job: SteppedJob):
    seen: list[Situation] = []

    def look(situation: Situation, memory: Any) -> Any:
        seen.append(situation)
        return [], memory

    job.attach(Scripted(look))
    job.run()
    [situation] = seen
    assert situation.observation.epoch == 2
    assert situation.observation.rows_in == ROWS
    [stage] = situation.stages
    assert (stage.name, stage.partitions, stage.assignment) == ("by user", 2, job.owners())
    assert "count" in stage.operators
    assert situation.stage("count") is stage
    assert situation.knobs == job.knobs
    assert situation.in_progress is None
    assert situation.last is None


def test_a_controller_waits_for_an_operation_of_somebody_else(job: SteppedJob):
    job.attach(always(Tune(slice="10 ms")), name="tuner")
    migration = job.rescale(4, strategy="fluid", by="ann")
    job.run()
    [record] = job.proposals()
    assert record.outcome is ProposalOutcome.REFUSED
    assert record.error == f"waits for change {migration.number}, which ann has requested"
    migration.cancel()
    job.run(4)
    assert ProposalOutcome.APPLIED in {each.outcome for each in job.proposals()}
    assert job.knobs["slice"] == 10_000


def test_an_operation_that_the_job_refuses_is_recorded_and_harmless(job: SteppedJob):
    job.attach(once(Update("nobody", len)), name="wrong")
    job.attach(once(Executors(3)), name="asks")
    job.run(2)
    wrong, asks = job.proposals()
    assert wrong.outcome is asks.outcome is ProposalOutcome.FAILED
    assert "nobody" in (wrong.error or "")
    assert asks.error == "the manager of this cluster cannot be asked for executors"
    job.assert_gapless()


def test_a_failed_change_of_a_controller_is_rolled_back(job: SteppedJob):
    def broken(key: Any, row: Any, state: Any) -> Any:
        raise ValueError("no")

    job.attach(once(Update("count", broken)), name="bold")
    job.run(4)
    [record] = job.proposals()
    assert record.outcome is ProposalOutcome.FAILED
    assert (record.error or "").startswith("rolled back")
    job.assert_gapless()


class CountAll(ControlOperation):
    mode = "blocking"

    def complete(self, ctx: Any) -> int:
        return int(ctx.stats.rows_in)


def test_a_controller_may_run_a_control_operation(job: SteppedJob):
    job.attach(once(CountAll()))
    job.run(3)
    assert outcomes(job.proposals()) == [("Scripted", "applied")]
    assert job.controls()[0].by == "controller Scripted"


def test_a_migration_waits_for_a_quiet_moment_and_is_made_once(job: SteppedJob):
    job.attach(Migrate(Rescale(3), at_latest=4))
    job.run(3)
    assert job.proposals() == []
    job.run(12)
    [record] = job.proposals()
    assert (record.reason, record.outcome) == ("it has waited for 4 epochs", ProposalOutcome.APPLIED)
    assert job.owners().partitions == 3


# ── attaching ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_controllers_come_and_go_while_a_job_runs(job: SteppedJob):
    job.attach(AutoScale())
    job.attach(Pace(latency="1 s"), advise=True)
    assert [(each.name, each.advises) for each in job.controllers] == [("AutoScale", False), ("Pace", True)]
    assert "utilisation=0.7" in job.controllers[0].settings
    with pytest.raises(FlowError, match=r"a controller 'Pace' is attached already \(Pace\(latency='1 s'"):
        job.attach(Pace(latency="2 s"))
    job.attach(Pace(latency="2 s"), name="other-pace")
    assert job.detach("Pace").name == "Pace"
    with pytest.raises(FlowError, match="no controller 'Pace' is attached; attached: 'AutoScale', 'other-pace'"):
        job.detach("Pace")


@pytest.mark.parametrize(
    ("controller", "name", "told"),
    [
        (len, None, "must be an instance of a subclass of Controller"),
        (AutoScale, None, "must be an instance of a subclass of Controller"),
        (AutoScale(), "a b", "the name of a controller is made of letters"),
        (AutoScale(), "", "the name of a controller is made of letters"),
    ],
)
def test_anything_but_a_controller_is_refused(job: SteppedJob, controller: Any, name: Any, told: str):
    with pytest.raises(FlowError, match=told):
        job.attach(controller, name=name)
    assert job.controllers == ()


def test_a_controller_that_cannot_begin_is_refused(job: SteppedJob):
    class Unlucky(Controller):
        def first(self) -> Any:
            raise KeyError("x")

        def decide(self, seen: Situation, memory: Any) -> Any:
            return [], None

    with pytest.raises(FlowError, match="controller Unlucky cannot begin: KeyError: 'x'"):
        job.attach(Unlucky())


def test_the_number_of_controllers_is_limited(job: SteppedJob):
    for number in range(controller_desk.MOST):
        job.attach(always(), name=f"c{number}")
    with pytest.raises(FlowError, match="the job has 20 controllers"):
        job.attach(always(), name="more")


def test_settings_that_make_no_sense_are_refused():
    for wrong in (
        lambda: AutoScale(utilisation=0),
        lambda: AutoScale(between=(4, 2)),
        lambda: AutoScale(latency="soon"),
        lambda: AutoScale(executors=(0, 1)),
        lambda: Balance(1.0),
        lambda: Pace(latency="soon"),
        lambda: Pace(latency="1 s", between=("1 s", "1 s")),
        lambda: Pace(latency="1 s", step=1.0),
        lambda: Migrate(Tune(pace="1 s")),  # type: ignore[arg-type]
        lambda: Migrate(Rescale(2), strategy="slow"),
        lambda: Migrate(Rescale(2), quiet=2.0),
    ):
        with pytest.raises(FlowError):
            wrong()


# ── contained ─────────────────────────────────────────────────────────────────────────────────────────────────────


def raising(seen: Situation, memory: Any) -> Any:
    raise ValueError(f"epoch {seen.observation.epoch}")


FAULTS: list[tuple[Any, str]] = [
    (raising, "it raised ValueError: epoch"),
    (lambda seen, memory: (_ for _ in ()).throw(SystemExit(3)), "it raised SystemExit: 3"),
    (lambda seen, memory: None, "decide must return (proposals, memory)"),
    (lambda seen, memory: (7, None), "instead of proposals there is int"),
    (lambda seen, memory: (["rescale"], None), "a proposal must be a Proposal, found str 'rescale'"),
    (lambda seen, memory: ([Proposal(7, "x")], None), "a proposal needs an operation, found int 7"),  # type: ignore[arg-type]
    (lambda seen, memory: ([Proposal(Tune(pace=1), "x", {"a": math.nan})], None), "figure 'a' of a proposal must be"),
    (lambda seen, memory: ([Proposal(Tune(pace=1), None)], None), "the reason of a proposal must be a text"),  # type: ignore[arg-type]
    (always(*[Tune(slice=1000)] * (MOST_AT_ONCE + 1)).does, "it floods the job: 9 proposals at once"),
    (
        always(Rescale(3), Rescale(4, "by user")).does,
        "it contradicts itself: 'rescale all stages to 3' and \"rescale 'by user' to 4\" at once",
    ),
    (
        always(Tune(pace=1000), Tune(pace=2000)).does,
        "'tune pace to 1 ms' and 'tune pace to 2 ms' at once",
    ),
]


@pytest.mark.parametrize(("does", "told"), FAULTS)
def test_a_controller_that_fails_is_stopped_and_the_job_goes_on(job: SteppedJob, does: Decides, told: str):
    job.attach(Scripted(does), name="bad")
    job.attach(once(Tune(slice="10 ms")), name="good")
    job.run(5)
    bad, good = job.controllers
    assert told in (bad.stopped or "")
    assert "(3 times in a row)" in (bad.stopped or "")
    [fault] = [each for each in job.proposals() if each.controller == "bad"]
    assert (fault.outcome, fault.times) == (ProposalOutcome.FAULT, 3)
    assert good.stopped is None
    assert job.knobs["slice"] == 10_000, "the other one is not affected"
    assert len(job.history()) == 1, "nothing of the bad one has reached the job"
    job.assert_gapless()


def test_a_controller_that_fails_now_and_then_is_not_stopped(job: SteppedJob):
    def sometimes(seen: Situation, memory: Any) -> Any:
        if seen.observation.epoch % 3:
            raise ValueError("no")
        return [], memory

    job.attach(Scripted(sometimes))
    job.run(9)
    assert job.controllers[0].stopped is None
    assert sum(each.times for each in job.proposals()) == 6


def test_a_controller_that_never_decides_is_left_behind():
    plant, hang = PacePlant(100_000), threading.Event()
    desk = ControllerDesk(plant, time_limit_s=0.05)
    asked: list[int] = []

    def wait(seen: Situation, memory: Any) -> Any:
        asked.append(seen.observation.epoch)
        hang.wait(SOON)
        return [], memory

    desk.attach(Scripted(wait), name="slow")
    desk.observe(plant.advance())
    desk.observe(plant.advance())
    assert desk.controllers[0].stopped == "it has not decided within 0.05 s"
    assert asked == [0], "it is not asked again"
    hang.set()


def test_a_controller_whose_own_call_times_out_has_failed_once():
    plant = PacePlant(100_000)
    desk = ControllerDesk(plant)

    def look_elsewhere(seen: Situation, memory: Any) -> Any:
        raise TimeoutError("no answer")

    desk.attach(Scripted(look_elsewhere), name="far")
    desk.observe(plant.advance())
    assert desk.controllers[0].stopped is None
    assert [each.error for each in desk.proposals()] == ["it raised TimeoutError: no answer"]


def test_a_controller_that_is_detached_while_it_is_asked_requests_nothing():
    plant = PacePlant(100_000)
    desk = ControllerDesk(plant, time_limit_s=None)

    def leave(seen: Situation, memory: Any) -> Any:
        desk.detach("gone")
        return [Proposal(Tune(pace="1 s"), "because")], memory

    desk.attach(Scripted(leave), name="gone")
    desk.observe(plant.advance())
    assert desk.proposals() == []


def test_options_of_a_proposal_do_not_say_who_has_requested_it(job: SteppedJob):
    job.attach(once(Rescale(3), by="ann", note="hers"), name="grow")
    job.run(3)
    assert [(each.by, each.note) for each in job.history()] == [("controller grow", "because")]


def test_a_controller_that_proposes_in_every_epoch_gets_little_and_does_not_fill_the_history(job: SteppedJob):
    values = iter(range(1000, 100_000, 100))
    job.attach(Scripted(lambda seen, memory: ([Proposal(Tune(slice=next(values)), "more")], memory)))
    job.run(40)
    applied = [each for each in job.proposals() if each.outcome is ProposalOutcome.APPLIED]
    assert 5 <= len(applied) <= 40 / REST
    assert len(job.history()) <= 40 / REST
    epochs = [each.epoch for each in applied]
    assert all(later - earlier >= REST for earlier, later in pairwise(epochs))


def test_repeated_refusals_make_one_record(job: SteppedJob):
    job.attach(once(Tune(slice="10 ms")), name="first")
    job.attach(always(Tune(slice="20 ms")), name="second")
    job.run(HOLD)
    first, second = job.proposals()
    assert first.outcome is ProposalOutcome.APPLIED
    assert (second.outcome, second.times) == (ProposalOutcome.REFUSED, HOLD)
    assert "can be changed again in" in (second.error or "")


class Stubborn(PacePlant):
    """A job that refuses everything, or rolls it back."""

    def __init__(self, *, takes_it: bool) -> None:
        super().__init__(100_000)
        self.takes_it = takes_it
        self.requested: list[int] = []

    def request(self, proposal: Proposal, by: str, note: str) -> Requested:
        self.requested.append(self.epoch)
        if not self.takes_it:
            raise FlowError("no")
        return Requested(lambda: (ProposalOutcome.FAILED, "rolled back: no"))


@pytest.mark.parametrize("takes_it", [False, True])
def test_a_proposal_that_keeps_failing_is_tried_ever_more_rarely_and_does_not_fill_the_history(takes_it: bool):
    plant = Stubborn(takes_it=takes_it)
    desk = ControllerDesk(plant, time_limit_s=None)
    desk.attach(always(Tune(pace="1 s")), name="bold")
    desk.attach(always(Tune(slice="10 ms")), name="other")
    for _ in range(3 * LONGEST_REST):
        desk.observe(plant.advance())
    waits = [later - earlier for earlier, later in pairwise(sorted(plant.requested)[::2])]
    assert waits[:4] == [REST, 2 * REST, 4 * REST, 8 * REST]
    assert max(waits) == LONGEST_REST
    assert len(plant.requested) < 25, "it was thousands; each of them is in the history of a job for good"
    last = [each for each in desk.proposals() if each.controller == "bold"][-1]
    assert (last.outcome, "times in a row; it can be tried again in" in (last.error or "")) == ("refused", True)
    desk.detach("bold")
    desk.attach(always(Tune(pace="1 s")), name="bold")
    before = len(plant.requested)
    for _ in range(REST + 1):
        desk.observe(plant.advance())
    assert len(plant.requested) > before, "one that is attached anew begins anew"


@pytest.mark.parametrize("outcome", [ProposalOutcome.FAILED, ProposalOutcome.APPLIED])
def test_what_a_detached_controller_has_begun_says_nothing_about_another_one_of_its_name(outcome: ProposalOutcome):
    ends: list[ProposalOutcome] = []

    class Slow(PacePlant):
        def request(self, proposal: Proposal, by: str, note: str) -> Requested:
            return Requested(lambda: (ends[-1] if ends else ProposalOutcome.PENDING, None))

    plant = Slow(100_000)
    desk = ControllerDesk(plant, time_limit_s=None)
    desk.attach(once(Tune(pace="1 s")), name="pace")
    desk.observe(plant.advance())
    desk.detach("pace")
    desk.attach(Scripted(lambda seen, memory: ([], memory)), name="pace")
    ends.append(outcome)
    for _ in range(2):
        desk.observe(plant.advance())
    assert [(each.outcome, each.times) for each in desk.proposals()] == [(outcome, 1)]
    assert [state.applied for state in desk.controllers] == [0]
    assert desk._arbiter.failures == {}


def test_a_proposal_that_succeeds_again_is_tried_as_often_as_before():
    claimed = Arbiter(claims={("knobs", "pace"): _Claim("a", "tune", 1, 7)})
    failed = claimed.ended("a", "tune", 7, well=False).ended("a", "tune", 8, well=False)
    assert failed.failures == {("a", ("knobs", "pace")): _Failures(2, 8)}
    assert failed.ended("b", "tune", 9).failures == failed.failures
    assert failed.ended("a", "tune", 9).failures == {}


def test_executors_may_be_asked_for_again():
    asked = Proposal(Executors(3), "more")
    seen = Situation(Observation(flow="f", job="j", epoch=7, revision=1, observed_at=0.0))
    assert Arbiter().failed("a", asked, seen).failures == {}


def test_records_are_bounded(job: SteppedJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(controller_desk, "KEPT", 5)
    turns = iter(range(1000))
    job.attach(Scripted(lambda seen, memory: ([Proposal(Rescale(2 + next(turns) % 3), "x")], memory)), advise=True)
    job.run(30)
    assert len(job.proposals()) == 5
    assert job.controllers[0].proposals == 30


# ── several at once ───────────────────────────────────────────────────────────────────────────────────────────────


def test_conflicting_and_independent_proposals_come_to_one_order(job: SteppedJob):
    job.attach(always(Rescale(4), strategy="sudden"), name="up")
    job.attach(always(Rescale(1), strategy="sudden"), name="down")
    job.attach(once(Rebalance()), name="even")
    job.attach(always(Tune(slice="20 ms")), name="tune")
    job.run(8)
    found = job.proposals()
    assert [each.number for each in found] == sorted({each.number for each in found})
    by = {name: [each for each in found if each.controller == name] for name in ("up", "down", "even", "tune")}
    assert by["up"][0].outcome is ProposalOutcome.APPLIED
    assert {each.outcome for each in by["down"]} == {ProposalOutcome.REFUSED}
    assert "of controller 'up' ended" in (by["down"][-1].error or "")
    assert "and this goes against it" in (by["down"][-1].error or "")
    assert by["even"][0].error == "waits for 'rescale all stages to 4' of controller 'up'"
    assert ProposalOutcome.APPLIED in {each.outcome for each in by["tune"]}
    assert job.owners().partitions == 4
    # What was applied, one after the other, is the history; its result is that of the job.
    applied = [each.change for each in found if each.outcome is ProposalOutcome.APPLIED]
    assert sorted(each for each in applied if each) == [
        each.number for each in job.history() if each.outcome is Outcome.APPLIED
    ]
    job.assert_gapless()


def test_advice_is_recorded_and_not_requested(job: SteppedJob):
    job.attach(always(Rescale(4)), name="wise", advise=True)
    job.attach(once(Tune(slice="10 ms")), name="doer")
    job.run(3)
    assert next(each for each in outcomes(job.proposals()) if each[0] == "wise") == ("wise", "advised")
    assert job.owners().partitions == 2
    assert all(each.by == "controller doer" for each in job.history())


def test_a_controller_touches_only_what_it_says(job: SteppedJob):
    class OnlyKnobs(Scripted):
        touches = frozenset({"knobs"})

    job.attach(OnlyKnobs(always(Rescale(4)).does), name="knobs")
    job.run()
    assert job.proposals()[0].error == "controller 'knobs' touches knobs, and this is about partitions"


def test_after_a_controller_is_detached_its_operation_goes_on_and_nothing_follows(job: SteppedJob):
    job.attach(always(Rescale(4), strategy="fluid"), name="grow")
    job.run()
    job.detach("grow")
    job.run(3)
    assert len(job.proposals()) == 1
    assert job.migrations or job.history()[-1].outcome is Outcome.APPLIED


# ── what policies do with executors ───────────────────────────────────────────────────────────────────────────────


def busy(epoch: int, share: float, *, executors: int, cores: int, partitions: int, **more: Any) -> Situation:
    operator = OperatorObservation(operator="count", kind="process", busy_share=share)
    seen = Observation(
        flow="f", job="j", epoch=epoch, revision=1, observed_at=0.0, elapsed_ms=100.0, operators=(operator,)
    )
    load = StageLoad("by k", ("count",), spread(partitions, 256), (share / 256,) * 256)
    return Situation(seen, (load,), {}, executors, cores, **more)


def test_auto_scale_asks_for_executors_first_and_goes_on_without_them():
    policy = AutoScale(executors=(1, 4))
    memory = policy.first()
    found: list[Proposal] = []
    for epoch in range(6):
        proposals, memory = policy.decide(
            busy(epoch, 2.5, executors=2, cores=2, partitions=2, can_ask_for_executors=True), memory
        )
        found += proposals
    assert found[0].operation == Executors(4)
    refused = ProposalRecord(
        number=1, controller="a", epoch=5, proposed_at=0.0, outcome=ProposalOutcome.FAILED, operation="have 4 executors"
    )
    proposals, memory = policy.decide(
        busy(6, 2.5, executors=2, cores=2, partitions=2, can_ask_for_executors=True, last=refused), memory
    )
    assert proposals == (), "two cores are all there is"
    policy.decide(busy(7, 2.5, executors=4, cores=4, partitions=2, can_ask_for_executors=True), memory)


def test_auto_scale_uses_executors_that_have_joined():
    policy = AutoScale(executors=(1, 4))
    memory = policy.first()
    found: list[Proposal] = []
    for epoch in range(6):
        proposals, memory = policy.decide(
            busy(epoch, 2.5, executors=4, cores=4, partitions=2, can_ask_for_executors=True), memory
        )
        found += proposals
    assert found[0].operation == Rescale(4, "by k")


def test_auto_scale_gives_an_executor_back_that_was_spare_for_long_and_does_not_insist():
    policy = AutoScale(executors=(2, 4), between=(2, 8))
    memory, last = policy.first(), None
    wanted: list[tuple[int, object]] = []
    for epoch in range(120):
        proposals, memory = policy.decide(
            busy(epoch, 1.2, executors=4, cores=4, partitions=2, can_ask_for_executors=True, last=last), memory
        )
        for each in proposals:
            wanted.append((epoch, each.operation))
            last = ProposalRecord(
                number=1, controller="a", epoch=epoch, proposed_at=0.0, outcome=ProposalOutcome.FAILED, operation="o"
            )
    assert [operation for _, operation in wanted] == [Executors(3)], "it could not be given back"
    assert wanted[0][0] >= SPARE
    memory = policy.first()
    for epoch in range(60):
        proposals, memory = policy.decide(
            busy(epoch, 1.2, executors=2, cores=2, partitions=2, can_ask_for_executors=True), memory
        )
        assert proposals == (), "two are to stay"


@pytest.mark.parametrize(
    ("goal", "is_reached"),
    [
        (Rescale(2), True),
        (Rescale(2, "count"), True),
        (Rescale(2, "nowhere"), False),
        (Rescale(3), False),
        (Move({0: 0}), True),
        (Move({0: 0, 1: 5}), False),
        (Move({70_000: 0}), False),
        (Rebalance(), False),
    ],
)
def test_a_migration_that_was_made_before_the_last_start_is_not_made_again(goal: Any, is_reached: bool):
    policy = Migrate(goal, at_latest=1)
    seen = busy(0, 1.0, executors=1, cores=2, partitions=2)
    assert bool(policy.decide(seen, policy.first())[0]) is not is_reached


# ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slow_reader_gets_the_newest_observation():
    watch = Watch(lambda found: found, lambda leaving: None)
    for epoch in range(5):
        watch.put(Observation(flow="f", job="j", epoch=epoch, revision=1, observed_at=0.0))
    newest = watch.newest()
    assert newest is not None
    assert (newest.epoch, watch.dropped) == (4, 4)
    watch.end()
    assert watch.newest() is None


def test_the_thread_goes_on_after_an_observation_that_cannot_be_read(caplog: pytest.LogCaptureFixture):
    plant, asked = PacePlant(100_000), threading.Event()
    desk = ControllerDesk(plant)

    def look(seen: Situation, memory: Any) -> Any:
        asked.set()
        return [], memory

    def complete(seen: Observation) -> Observation:
        if seen.epoch < 2:
            read.release()
            raise ValueError("no")
        return seen

    desk.attach(Scripted(look))
    read, watches = threading.Semaphore(0), Watches(complete)
    thread = SteeringThread(desk, watches.watch)
    thread.begin()
    for _ in range(2):
        watches.put(plant.advance())
        assert read.acquire(timeout=SOON)
    watches.put(plant.advance())
    assert asked.wait(SOON)
    watches.end()
    thread.end()
    assert len(caplog.records) == 1, "what fails in every epoch is told once"
