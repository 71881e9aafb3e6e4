"""Changes of the plan that are refused: each says what was found and what is allowed, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, Insert, ListSource, NoopSink, Remove, Rewire, Update, agg
from midstream.change.configuration import first_configuration
from midstream.change.deployment import deployment_of
from midstream.change.trial import Changes, Request
from midstream.checkpoint.change_log import ChangeLog
from midstream.errors import MidstreamError
from midstream.flow.edits import Edit
from midstream.planner.change_plan import Scheduler
from midstream.server.messages import InsertMessage
from midstream.storage.blobs import BlobStore

ROWS = ListSource([[{"k": "a", "n": 1}]], "k string, n bigint")
OTHERS = ListSource([[{"n": 1}]], "n bigint")


def unite(old: Any, new: Any) -> Any:
    return old.union("all", new)


def same(row: Any) -> Any:
    return row


def count_up(key: Any, row: Any, state: Any) -> Any:
    return row


def flow_of(name: str = "shop") -> Flow:
    """in → m → split → (left: key_by → count → out) and (right: rest)."""
    flow = Flow(name)
    rows = flow.source("in", ROWS).map("m", same)
    parts = rows.route("split", lambda row: "left", branches=["left", "right"])
    parts["left"].key_by("by k", "k").process("count", count_up).sink("out", NoopSink())
    parts["right"].filter("f", lambda row: True).sink("rest", NoopSink())
    return flow


class CannotLoad:
    """Packs, and fails when it is loaded, as a class of a package that the job lacks."""

    def __call__(self, row: Any) -> Any:
        return row

    def __reduce__(self) -> Any:
        return _missing, ()


def _missing() -> None:
    raise ModuleNotFoundError("No module named 'models'")


def adds_and_returns_nothing(rows: Any) -> None:
    rows.map("x", same)


def holding(lock: Any, row: Any) -> Any:
    return row


REFUSALS: dict[str, tuple[list[Edit], str]] = {
    "a cycle": (
        [Insert(lambda rows: rows.sink("spare", NoopSink()), after="m"), Rewire("split", to="f")],
        "cycle",
    ),
    "an unknown output": (
        [Rewire("f", to="splitt:left")],
        "flow 'shop' has no operator 'splitt'; did you mean 'split'? Its operators are 'in', 'm', 'split', 'by k'",
    ),
    "an unknown branch": (
        [Rewire("f", to="split:middle")],
        "route 'split' has no output 'split:middle'; it has 'split:left', 'split:right'",
    ),
    "an unknown edge": (
        [Insert(lambda rows: rows.map("x", same), between=("in", "f"))],
        "Insert: 'f' does not read 'in'; its readers are 'm'",
    ),
    "no place": (
        [Insert(lambda rows: rows.map("x", same))],
        "say where, with after='operator' or between=('operator', 'reader')",
    ),
    "a name that is taken": (
        [Insert(lambda rows: rows.map("f", same), after="in")],
        "flow 'shop': there is an operator 'f' already (a filter); names identify state and changes and must be unique",
    ),
    "a missing input": (
        [Remove("split"), Rewire("f", to="m")],
        "'by k' read its branch 'left', so what they read instead is not clear; Rewire or Remove them before it",
    ),
    "columns that a reader below cannot take": (
        [Insert(lambda rows: rows.map("x", same, returns="other string"), between=("in", "m"))],
        "the change gives map 'm' other columns: (other string) instead of (k string, n bigint). Add an Update('m', …)",
    ),
    "columns that what is inserted cannot take": (
        [Insert(lambda rows: rows.key_by("by user", "user").distinct("d"), after="m")],
        "'user'",
    ),
    "an edge into another key": (
        [Rewire("count", to="split:left"), Remove("by k")],
        "process 'count' needs rows brought together by (k), but would read 'split[left]', a route. Between it and",
    ),
    "an operator with state behind another key": (
        [Insert(lambda rows: rows.key_by("by n", "n"), between=("by k", "count"))],
        "needs rows brought together by (k), but would read 'by n', which brings them together by (n)",
    ),
    "removing what others read by its branches": (
        [Remove("split")],
        "Remove of route 'split': 'by k' read its branch 'left', so what they read instead is not clear",
    ),
    "removing what is not there": (
        [Remove("g")],
        "flow 'shop' has no operator 'g'",
    ),
    "removing a source": (
        [Remove("in")],
        "Remove of source 'in': map 'm' reads it, and would have no input; Rewire or Remove it before",
    ),
    "removing the only source": (
        [Remove("in"), Remove("m"), Remove("split")],
        "Remove of source 'in': map 'm' reads it, and would have no input",
    ),
    "a source under a name that is taken": (
        [Insert(unite, after="in", source=lambda flow: flow.source("m", ROWS))],
        "flow 'shop': there is an operator 'm' already",
    ),
    "a source with other columns": (
        [Insert(unite, after="in", source=lambda flow: flow.source("more", OTHERS))],
        "union 'all': 'in' has (k string, n bigint) but 'more' has (n bigint); bring them to the same columns",
    ),
    "a source that nobody reads": (
        [Insert(source=lambda flow: flow.source("more", ROWS))],
        "nothing reads operator 'more' (source)",
    ),
    "a source for a reader that is no union": (
        [Insert(source=lambda flow: flow.source("more", ROWS), before="m")],
        "map 'm' reads what it reads already, and only a union takes one input more. Unite the streams before it",
    ),
    "a source and an edge, and no function of both": (
        [Insert(source=lambda flow: flow.source("more", ROWS), after="in")],
        "say how the two streams meet: give a function of both",
    ),
    "a source that is no stream": (
        [Insert(source=lambda flow: flow.source("more", [1, 2]), before="m")],
        "source 'more': expected a streaming DataFrame",
    ),
    "a source function that adds none": (
        [Insert(source=lambda flow: None, before="m")],
        "source= returned NoneType None; return the stream of a new source",
    ),
    "a source function that is none": (
        [Insert(source="more", before="m")],  # type: ignore[arg-type]
        "Insert, source",
    ),
    "a source in a build": (
        [Insert(lambda rows: rows.union("all", rows._flow.source("more", ROWS)), after="in")],
        "its function adds the source 'more'; give it with source=",
    ),
    "a function that is none": (
        [Insert("rows.map", after="in")],  # type: ignore[arg-type]
        "'rows.map'",
    ),
    "a build that fails": (
        [Insert(lambda rows: rows.nothing("x"), after="in")],
        "its function raised AttributeError",
    ),
    "a build that returns nothing": (
        [Insert(adds_and_returns_nothing, after="in")],
        "return the stream that the readers of 'in' get, or end it in a sink",
    ),
    "a build that adds nothing": (
        [Insert(lambda rows: rows, after="in")],
        "its function adds no operator to the stream that it gets",
    ),
    "a rewiring that changes nothing": (
        [Rewire("m", to="in")],
        "Rewire of map 'm' changes nothing: it reads 'in' already",
    ),
    "an update of what the same change removes": (
        [Remove("f"), Update("f", same)],
        "flow 'shop' has no operator 'f'",
    ),
    "a function that cannot be packed": (
        [
            Insert(
                lambda rows: rows.map("x", (lambda lock: lambda row: lock)(__import__("threading").Lock())), after="in"
            )
        ],
        "operator 'x'",
    ),
    "an aggregate without a key": (
        [Insert(lambda rows: rows.aggregate("a", n=agg.count()), after="in")],
        "aggregate",
    ),
}


class Job:
    def __init__(self, folder: Path) -> None:
        self.store, self.log = BlobStore(str(folder / "blobs")), ChangeLog(str(folder / "changes"))
        self.changes = Changes(first_configuration(flow_of().graph, self.store, 2), self.store, self.log)

    def request(self, *edits: Edit) -> None:
        request = self.changes.store(Request(edits, Scheduler.FRIES, "ann"))
        self.changes.request(request, self.changes.check(request), 0.0)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(("edits", "says"), REFUSALS.values(), ids=REFUSALS)
def test_an_invalid_change_is_refused_with_the_reason_and_nothing_changes(
    job: Job, edits: list[Edit], says: str
) -> None:
    before = job.changes.configuration
    with pytest.raises(MidstreamError) as refused:
        job.request(*edits)
    assert says in str(refused.value)
    assert job.changes.configuration is before
    assert job.changes.on_trial is None
    assert job.log.records() == []


def test_a_function_that_does_not_load_is_refused_where_it_arrives() -> None:
    """A build function travels to the job; what it refers to may be missing there."""
    sent = InsertMessage.of(Insert(CannotLoad(), after="in"))
    with pytest.raises(MidstreamError, match="No module named 'models'"):
        sent.edit()


def test_the_script_of_another_flow_is_refused(job: Job) -> None:
    with pytest.raises(MidstreamError, match="the script is of flow 'other', and the job runs flow 'shop'"):
        deployment_of(job.changes.newest(), flow_of("other").graph)
