"""Restarts after a deployment: a script that has it, or goes beyond it, counts; one from before does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, ListSource, NoopSink, Tune, Update
from midstream.change.configuration import Configuration, first_configuration
from midstream.change.deployment import deployment_of
from midstream.change.restart import Restart, restart_of
from midstream.change.trial import Changes, Request
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import InsertRecord
from midstream.checkpoint.retention import KEPT_REVISIONS, blobs_on_record
from midstream.control.messages import Commit
from midstream.flow.model import Graph
from midstream.ids import Epoch
from midstream.planner.change_plan import Scheduler
from midstream.storage.blobs import BlobStore

ROWS = ListSource([[{"n": 1}]], "n bigint")


def script(factor: int = 1, *names: str) -> Graph:
    """A map that multiplies, and filters of these names behind it."""
    flow = Flow("f")
    stream = flow.source("in", ROWS).map("m", Times(factor))
    for name in names:
        stream = stream.filter(name, lambda row: row["n"] > 0)
    stream.sink("out", NoopSink())
    return flow.graph


class Times:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, row: Any) -> Any:
        return {"n": self.factor * row["n"]}


class Job:
    def __init__(self, folder: Path, graph: Graph) -> None:
        self.store, self.log = BlobStore(str(folder / "blobs")), ChangeLog(str(folder / "changes"))
        self.changes = Changes(first_configuration(graph, self.store, 2), self.store, self.log, wall=lambda: 7.0)

    def request(self, *edits: Any, deploys: bool = False) -> Any:
        request = self.changes.store(Request(edits, Scheduler.EPOCH, "ann", deploys=deploys))
        change = self.changes.request(request, self.changes.check(request), 1.5)
        for epoch in range(10):
            opened = self.changes.configuration
            self.changes.opened(Epoch(epoch))
            self.changes.committed(Commit(Epoch(epoch), opened.revision, (), 0, {}), opened)
        return change

    def deploy(self, graph: Graph) -> None:
        self.request(*deployment_of(self.changes.newest(), graph).edits, deploys=True)

    def restart(self, graph: Graph) -> Restart:
        first = first_configuration(graph, self.store, 2)
        return restart_of(first, self.store, self.log.records(), self.changes.configuration.revision)


def runs(found: Configuration) -> tuple[int, list[str]]:
    return found.graph.payloads["m"].factor, [op.name for op in found.graph if op.kind == "filter"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, script())


def test_the_script_that_was_deployed_runs_as_it_is(job: Job) -> None:
    job.deploy(script(2, "a"))
    again = job.restart(script(2, "a"))
    assert runs(again.configuration) == (2, ["a"])
    assert again.messages == ()
    assert again.configuration.revision == 2


def test_a_script_from_before_runs_what_was_deployed(job: Job) -> None:
    job.deploy(script(2, "a"))
    again = job.restart(script())
    assert runs(again.configuration) == (2, ["a"])
    assert len(again.messages) == 2


def test_a_later_version_of_a_deployed_script_runs_as_it_is(job: Job) -> None:
    """Before, the recorded function won over the newer one of the script."""
    job.deploy(script(2, "a"))
    again = job.restart(script(3, "a", "b"))
    assert runs(again.configuration) == (3, ["a", "b"])
    assert [message.partition(",")[0] for message in again.messages] == ["operator 'm' runs what the script says"]


def test_a_deployment_of_functions_alone_is_recognised_by_them(job: Job) -> None:
    job.deploy(script(2))
    assert runs(job.restart(script(1)).configuration) == (2, [])
    assert runs(job.restart(script(2)).configuration) == (2, [])
    assert runs(job.restart(script(3)).configuration) == (3, [])


def test_changes_after_it_come_on_top_and_changes_before_it_do_not(job: Job) -> None:
    job.request(Update("m", Times(9)))
    job.deploy(script(2, "a"))
    job.request(Insert(lambda rows: rows.filter("live", lambda row: True), after="a"))
    assert runs(job.restart(script(3, "a")).configuration) == (3, ["a", "live"])
    job.request(Update("m", Times(5)), Tune(pace=3))
    again = job.restart(script(3, "a")).configuration
    assert runs(again) == (5, ["a", "live"])
    assert again.knobs == {"pace": 3}


def test_the_newest_of_several_deployments_that_the_script_has_counts(job: Job) -> None:
    job.deploy(script(2, "a"))
    job.deploy(script(2, "a", "b"))
    assert runs(job.restart(script(3, "a")).configuration) == (3, ["a", "b"])
    assert runs(job.restart(script(3, "a", "b")).configuration) == (3, ["a", "b"])
    assert runs(job.restart(script()).configuration) == (2, ["a", "b"])


def test_other_changes_stay_on_top_of_any_script(job: Job) -> None:
    job.request(Update("m", Times(2)))
    assert runs(job.restart(script(3)).configuration) == (2, [])


def test_the_life_of_a_change_has_times(job: Job) -> None:
    request = job.changes.store(Request((Update("m", Times(2)),), Scheduler.EPOCH, "ann"))
    first = job.changes.request(request, job.changes.check(request), 1.5)
    request = job.changes.store(Request((Update("m", Times(3)),), Scheduler.EPOCH, "ann"))
    second = job.changes.request(request, job.changes.check(request), 2.5)
    assert list(job.changes.in_progress) == [first, second]
    assert [each.times.waited_ms is None for each in (first, second)] == [False, True]
    for epoch in range(10):
        opened = job.changes.configuration
        job.changes.opened(Epoch(epoch))
        job.changes.committed(Commit(Epoch(epoch), opened.revision, (), 0, {}), opened)
    assert list(job.changes.in_progress) == [second]
    times = first.times
    assert (times.preparation_ms, times.ended_at) == (1.5, 7.0)
    assert times.trial_ms is not None
    assert [each.times.waited_ms is None for each in (first, second)] == [False, False]
    assert second.times.ended_at is None
    assert [record.ended_at for record in job.log.records()] == [7.0, None]


def test_the_function_of_an_operator_that_was_removed_long_ago_is_swept(job: Job) -> None:
    job.deploy(script(1, "a"))
    [digest] = [edit.function for edit in job.log.records()[0].edits if isinstance(edit, InsertRecord)]
    job.deploy(script(1))
    assert digest in blobs_on_record(job.log.records())
    for factor in range(2, KEPT_REVISIONS + 2):
        job.request(Update("m", Times(factor)))
    assert digest not in blobs_on_record(job.log.records())
