"""Jobs that share a budget: two on the local runtime, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream import Flow, Observation, Outcome, Proposal, Share, Sharing, Situation
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.controllers.share import LOOK, SETTLES
from midstream.errors import FlowError
from midstream.observation import SourceObservation
from tests.migrated import SteppedJob, stepped_job
from tests.sharing_plants import CoresPlant, RowsPlant, run_side_by_side


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[dict[str, SteppedJob]]:
    """Two jobs with two partitions each."""
    with stepped_job(tmp_path / "one") as one, stepped_job(tmp_path / "two") as two:
        yield {"one": one, "two": two}


def busy(share: float) -> Callable[[Observation], Observation]:
    """The operators keep so many cores busy."""

    def told(seen: Observation) -> Observation:
        operators = tuple(
            msgspec.structs.replace(each, busy_share=share * (each.operator == "count")) for each in seen.operators
        )
        return msgspec.structs.replace(seen, operators=operators, elapsed_ms=100.0)

    return told


def run(jobs: dict[str, SteppedJob], epochs: int, total: int) -> None:
    """Epoch by epoch; together they never have more partitions than the total."""
    for _ in range(epochs):
        for job in jobs.values():
            if not job.is_over:
                job.run()
            assert sum(each.owners().partitions for each in jobs.values() if not each.is_over) <= total


# ── on jobs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_jobs_share_cores_and_one_that_ends_gives_its_share_back(jobs: dict[str, SteppedJob]):
    one, two = jobs["one"], jobs["two"]
    one.observed, two.observed = busy(1.95), busy(0.3)
    sharing = Sharing(Share(cores=4), jobs)
    sharing.attach()
    assert sharing.shares == {"one": None, "two": None}, "not seen yet"
    [state] = one.controllers
    assert state.name == "Share"
    assert "cores=4" in state.settings
    assert "here for 'one'" in state.settings
    run(jobs, 30, total=4)
    assert (one.owners().partitions, two.owners().partitions) == (3, 1)
    assert sharing.shares == {"one": 3, "two": 1}
    [up], [down] = one.proposals(), two.proposals()
    assert (up.operation, up.outcome) == ("rescale all stages to 3", ProposalOutcome.APPLIED)
    assert up.reason == "3 of 4 cores: it is short, and so much is free"
    assert down.reason == "1 of 4 cores: others are short, and it is not"
    [change] = one.history()
    assert (change.by, change.note, change.outcome) == ("controller Share", up.reason, Outcome.APPLIED)
    one.observed = busy(2.9)
    two.has_ended = True
    run(jobs, 20, total=4)
    assert one.owners().partitions == 4
    assert sharing.shares == {"one": 4}
    for job in jobs.values():
        job.assert_gapless()


def test_jobs_that_have_too_much_together_are_cut_by_weight(jobs: dict[str, SteppedJob]):
    sharing = Sharing(Share(cores=3, weights={"two": 2}), jobs)
    sharing.attach()
    for _ in range(15):
        for job in jobs.values():
            job.run()
    assert sharing.shares == {"one": 1, "two": 2}
    assert jobs["two"].proposals() == [], "it has its share"
    sharing.detach()
    assert sharing.shares == {}
    assert [job.controllers for job in jobs.values()] == [(), ()]
    assert jobs["one"].owners().partitions == 1, "it keeps what it has"
    sharing.attach()
    assert [len(job.controllers) for job in jobs.values()] == [1, 1], "and may share again"


def test_an_operation_of_somebody_else_counts_until_it_is_over(jobs: dict[str, SteppedJob]):
    one, two = jobs["one"], jobs["two"]
    one.observed, two.observed = busy(1.95), busy(0.3)
    sharing = Sharing(Share(cores=5), jobs)
    sharing.attach()
    two.rescale(3, strategy="fluid", by="ann")
    run(jobs, SETTLES + LOOK + 4, total=5)
    assert two.migrations, "it goes on"
    assert sharing.shares["two"] is None, "it was in progress when sharing began, so nothing is known of it"
    assert one.owners().partitions == 2, "so nothing of it is given to another"


def test_all_or_none_are_attached(jobs: dict[str, SteppedJob]):
    Sharing(Share(cores=4), {"b": jobs["two"]}).attach()
    sharing = Sharing(Share(cores=4), jobs)
    with pytest.raises(FlowError, match="a controller 'Share' is attached already"):
        sharing.attach()
    assert jobs["one"].controllers == ()
    assert sharing.shares == {}
    sharing.attach(name="other-share")
    with pytest.raises(FlowError, match="'one', 'two' share already; detach them first"):
        sharing.attach(name="third")
    with pytest.raises(FlowError, match="no job 'three' shares; sharing: 'one', 'two'"):
        sharing.detach("three")
    assert [each.name for each in jobs["two"].controllers] == ["Share", "other-share"]


# ── refused ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_plant(name: str) -> RowsPlant:
    return RowsPlant(name, lambda second: 1_000)


def same_job_twice() -> Any:
    job = rows_plant("a")
    return Sharing(Share(rows_per_epoch=100), {"a": job, "b": job})


def one_that_has_ended() -> Any:
    job = rows_plant("a")
    job.is_over = True
    return Sharing(Share(rows_per_epoch=100), [job])


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Share(), "give either rows_per_epoch= or cores="),
    (lambda: Share(cores=4, rows_per_epoch=10), "give either rows_per_epoch= or cores="),
    (lambda: Share(cores=0), "cores=0 must be a whole number from 1 on"),
    (lambda: Share(rows_per_epoch=1.5), "rows_per_epoch=1.5 must be a whole number"),  # type: ignore[arg-type]
    (lambda: Share(cores=4, least=0), "least=0 must be a whole number from 1 on"),
    (lambda: Share(cores=4, weights={"a": 0}), "weights={'a': 0} must be a number above 0"),
    (lambda: Share(cores=4, weights={"a": float("nan")}), "weights={'a': nan} must be a number above 0"),
    (lambda: Share(cores=4, weights=[1, 2]), "must be a dict of numbers by the names of jobs"),  # type: ignore[arg-type]
    (lambda: Sharing(Share(cores=4), []), "there are no jobs to share between"),
    (lambda: Sharing(Share(cores=4), {}), "there are no jobs to share between"),
    (lambda: Sharing(4, []), "a budget is shared by a Share, found 4"),  # type: ignore[arg-type]
    (lambda: Sharing(Share(cores=4), "ab"), "jobs='ab' must be a list of running jobs"),  # type: ignore[arg-type]
    (lambda: Sharing(Share(cores=4), [Flow("a")]), "jobs must be running, as flow.start gives them; found"),  # type: ignore[list-item]
    (same_job_twice, "job 'b' is given twice; each shares once"),
    (
        lambda: Sharing(Share(rows_per_epoch=10), [rows_plant("a"), rows_plant("a")]),
        "two jobs are called 'a'; give a dict with a name for each",
    ),
    (one_that_has_ended, "job 'a' has ended, so it cannot share"),
    (
        lambda: Sharing(Share(rows_per_epoch=10, weights={"c": 1}), [rows_plant("a"), rows_plant("b")]),
        "weights are given for 'c', which is none of the jobs: 'a', 'b'",
    ),
    (
        lambda: Sharing(Share(rows_per_epoch=10, least=6), [rows_plant("a"), rows_plant("b")]),
        "rows_per_epoch=10 is too little for 2 jobs that have at least 6 each",
    ),
    (lambda: Sharing(Share(cores=4), [rows_plant("a")]), "job 'a' cannot share cores: it has no stage behind"),
]


@pytest.mark.parametrize(("make", "told"), REFUSED)
def test_what_cannot_be_shared_is_refused(make: Callable[[], Any], told: str):
    with pytest.raises(FlowError) as refused:
        make()
    assert told in str(refused.value)


def test_a_job_whose_sources_take_no_limit_of_rows_is_refused(jobs: dict[str, SteppedJob]):
    with pytest.raises(FlowError, match=r"job 'one' cannot share rows per epoch: knob rows_per_epoch is for a Gen"):
        Sharing(Share(rows_per_epoch=100), jobs)
    assert jobs["one"].controllers == ()


# ── the policy, epoch by epoch ────────────────────────────────────────────────────────────────────────────────────


def seen(epoch: int, rows: int, limit: int | None, *, sources: int = 1, **more: Any) -> Situation:
    observed = Observation(
        flow="f",
        job="j",
        epoch=epoch,
        revision=1,
        observed_at=0.0,
        rows_in=rows * sources,
        elapsed_ms=1000.0,
        sources=tuple(SourceObservation(source=f"in {n}", rows=rows) for n in range(sources)),
    )
    return Situation(observed, knobs={"rows_per_epoch": limit}, **more)


def test_the_limit_of_a_job_with_two_sources_counts_twice():
    share = Share(rows_per_epoch=1_001)
    budget = share.first(["a"])
    for epoch in range(SETTLES + 1):
        proposals, budget = share.decide("a", seen(epoch, 700, None, sources=2), budget)
    [proposal] = proposals
    assert proposal.operation.knobs == {"rows_per_epoch": 500}  # type: ignore[union-attr]
    assert proposal.figures == {"rows_per_epoch": 1000.0, "of": 1001.0, "others may take": 0.0}


def test_what_is_given_up_is_free_only_when_the_change_is_complete():
    share = Share(rows_per_epoch=1_000)
    budget = share.first(["a", "b"])
    epoch = 0
    proposals: Sequence[Proposal] = ()
    while not proposals:
        _, budget = share.decide("a", seen(epoch, 600, 600), budget)
        proposals, budget = share.decide("b", seen(epoch, 100, 400), budget)
        epoch += 1
    assert proposals[0].operation.knobs == {"rows_per_epoch": 125}  # type: ignore[union-attr]
    for later in range(epoch, epoch + 5):  # on trial: its knob has the new value, and may go back
        given, budget = share.decide("a", seen(later, 600, 600), budget)
        assert given == ()
        _, budget = share.decide("b", seen(later, 100, 125, in_progress="tune"), budget)
        assert budget.held_by_others("a") == 400
    for later in (epoch + 5, epoch + 6):
        assert budget.held_by_others("a") == 400
        _, budget = share.decide("b", seen(later, 100, 125), budget)
    given, budget = share.decide("a", seen(epoch + 6, 600, 600), budget)
    assert given[0].operation.knobs == {"rows_per_epoch": 875}  # type: ignore[union-attr]
    assert budget.held_by_others("b") == 875, "from the moment in which it is given"


def test_with_no_need_of_more_nothing_changes():
    one, two = CoresPlant("one", lambda second: 0.2, 4), CoresPlant("two", lambda second: 0.1, 4)
    Sharing(Share(cores=8), [one, two]).attach()
    run_side_by_side([one, two], 60)
    assert (one.changes, two.changes) == ([], [])
