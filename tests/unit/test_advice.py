"""A change that failed reports why, how the job continues, and what to do; the advice fits the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink, Update
from midstream.change.advice import after_roll_back
from midstream.change.trial import Request, RunFailure
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.errors import FunctionError
from midstream.ids import Epoch, Revision
from midstream.planner.change_plan import Scheduler
from midstream.runtime.local import runtime as local
from midstream.runtime.local.data import source_epochs
from midstream.testing import ChangeAt, run_local

EPOCHS = [[{"n": 10 * epoch + n} for n in range(6)] for epoch in range(4)]
GOES_ON = "The job continues as revision 3, with what it ran before the change."
OF_A_JOB_THAT_ENDED = "start the flow again"


def flow(sink: Any) -> Flow:
    made = Flow("numbers")
    rows = made.source("in", ListSource(EPOCHS, "n bigint")).map("A", lambda row: row)
    rows.map("B", lambda row: {"n": row["n"] + 1}).sink("out", sink)
    return made


def failed(update: Update, sink: Any = None) -> ChangeRecord:
    """The record of a change that did not work."""
    run = run_local(flow(sink or MemorySink()), changes=[ChangeAt.of(1, update, scheduler="epoch")])
    [record] = run.history
    assert len(run.progress) == len(EPOCHS), "the job continued"
    assert OF_A_JOB_THAT_ENDED not in str(record.error)
    return record


def test_a_failing_function_is_reported_with_its_row_and_the_advice_to_fix_it():
    error = str(failed(Update("A", lambda row: {"n": 1 // (row["n"] - 23)})).error)
    first, *_, last = error.splitlines()
    assert first.startswith("operator 'A' failed in epoch 2, partition ")
    assert first.endswith("ZeroDivisionError: integer division or modulo by zero")
    assert "row: {'n': 23}" in error
    assert last.endswith(f"{GOES_ON} Fix the new function of A, and request the change again.")


def test_a_failure_of_an_unchanged_operator_names_the_changed_one():
    record = failed(Update("A", lambda row: {"n": None}))
    assert str(record.error).startswith("operator 'B' failed in epoch ")
    assert str(record.error).endswith(
        f"{GOES_ON} B was not changed, but failed on rows of the new A. Make the two fit, and request the change again."
    )


def test_a_failing_sink_names_the_changed_operator():
    def positive(rows: Any, epoch: int) -> None:
        if min(rows["n"].to_pylist()) < 0:
            raise ValueError("negative")

    record = failed(Update("A", lambda row: {"n": -100}), positive)
    first, *_, last = str(record.error).splitlines()
    assert first == "operator 'out' failed in epoch 2: ValueError: negative"
    assert last == (
        f"{GOES_ON} out was not changed, but failed on rows of the new A. Make the two fit, and request the change "
        "again."
    )


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            RunFailure("", is_overdue=True),
            "Make the new A, B faster or set a longer time_limit, and request the change again.",
        ),
        (RunFailure("", is_lost=True), "No function failed: Spark lost workers"),
        (RunFailure(""), "A sink or a transform failed on rows of the new A, B."),
    ],
    ids=["time limit", "lost workers", "something else"],
)
def test_without_a_function_to_blame_the_advice_says_so(failure, says):
    advice = after_roll_back(failure, ("A", "B"), Revision(3))
    assert advice.startswith(f"{GOES_ON} {says}")


def test_the_advice_says_that_epochs_committed_under_the_change_stay():
    advice = after_roll_back(RunFailure("", operator="A"), ("A",), Revision(3), is_committed=True)
    assert advice.startswith(f"Epochs that were committed under the change stay as they are. {GOES_ON}")


def test_a_refusal_by_preflight_shows_the_row_and_what_to_do(tmp_path: Path):
    graph = flow(MemorySink()).graph
    with local.runtime_of(graph, partitions=1, checkpoint=str(tmp_path)) as runtime:
        [rows, *_] = source_epochs(graph)
        runtime.run_epoch(Epoch(0), rows)
        bad = Request((Update("A", lambda row: {"n": 1 // row["n"]}),), Scheduler.FRIES, "ann")
        with pytest.raises(FunctionError) as refused:
            runtime._driver.changing.request(bad)
        [record] = runtime._driver.changes._log.records()
    first, *_, last = str(refused.value).splitlines()
    assert first.startswith("operator 'A': a lambda fails in preflight, on ")
    assert "nothing was changed: operator 'A' failed on the row {'n': 0}: ZeroDivisionError" in first
    assert last == "Fix it and request the change again; preflight=False sends a function that can only run on workers."
    assert (record.outcome, record.error) == (Outcome.REFUSED, str(refused.value))
