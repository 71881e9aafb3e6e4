"""Controllers of a job on Spark: what they ask for is done while the job runs, and they end with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from midstream import Controller, Flow, GeneratorSource, NoopSink, Outcome, Pace, Proposal, Rescale, Situation
from midstream.controllers.proposal_records import ProposalOutcome
from midstream.errors import FlowError, MidstreamError

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Grow(Controller):
    """One partition more, once."""

    def decide(self, seen: Situation, memory: Any) -> tuple[Sequence[Proposal], Any]:
        """In the first epoch in which nothing is in progress."""
        if memory or seen.in_progress is not None:
            return (), memory
        [stage] = seen.stages
        return (Proposal(Rescale(stage.partitions + 1), "one more", {}, {"strategy": "sudden"}),), True


@dataclass(frozen=True)
class Broken(Controller):
    """Always fails."""

    def decide(self, seen: Situation, memory: Any) -> Any:
        """Never."""
        raise ValueError("broken")


def rows(index: Any, rng: Any) -> dict[str, Any]:
    return {"k": index % 50}


def numbered(key: Any, row: Any, state: Any) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return {"k": row["k"], "n": state.get()}


def test_controllers_steer_a_job_and_end_with_it(spark: Any, tmp_path: Path) -> None:
    flow = Flow("steered")
    source = flow.source("in", GeneratorSource(rows, "k bigint", rate=2_000))
    source.key_by("by k", "k").process("count", numbered, returns="k bigint, n bigint").sink("out", NoopSink())
    with pytest.raises(FlowError, match="must be an instance of a subclass of Controller"):
        flow.start(spark, checkpoint=str(tmp_path / "c"), partitions=2, controllers=[Grow])
    assert not (tmp_path / "c").exists(), "refused before anything is written"
    with flow.start(spark, checkpoint=str(tmp_path / "c"), partitions=2, controllers=[Grow()]) as job:
        job.attach(Broken())
        job.attach(Pace(latency="10 minutes", between=("60 ms", "70 ms")))
        told = {"Grow": "rescale all stages to 3", "Pace": "tune pace to 60 ms"}
        with job.watch() as watch:
            for _ in watch:
                applied = {each.controller: each for each in job.proposals() if each.outcome is ProposalOutcome.APPLIED}
                if set(told) <= set(applied) and any(each.stopped for each in job.controllers):
                    break
        assert {name: applied[name].operation for name in told} == told
        assert job.assignment()[0].assignment.partitions == 3
        assert job.knobs["pace"] is not None
        assert job.knobs["pace"] >= 60_000
        stopped = {each.name: each.stopped for each in job.controllers}
        assert stopped == {"Grow": None, "Broken": "it raised ValueError: broken (3 times in a row)", "Pace": None}
        job.detach("Broken")
        by = {each.by: each for each in job.history() if each.outcome is Outcome.APPLIED}
        assert by["controller Grow"].note == "one more"
        assert "controller Pace" in by
    with pytest.raises(MidstreamError, match="so it cannot be changed"):
        job.attach(Broken())


def test_the_example_gives_a_stage_more_partitions_when_rows_come_faster(spark: Any, capsys: Any) -> None:
    from examples.steering import main

    found = main(spark)
    assert 2 <= found["partitions"] <= 4
    assert set(found["by"]) == {"controller ByRate"}, "who only advises changes nothing"
    assert "rows come at" in capsys.readouterr().out
