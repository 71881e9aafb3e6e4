"""The card of a job, and when it is renewed. The tutorial runs in a real kernel: tests/spark/test_notebook.py."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from midstream import Flow, ListSource, MemorySink, MidstreamError, Observation
from midstream.drawing.job_card import CardChange, JobCard
from midstream.errors import FlowError
from midstream.observation import OperatorObservation
from midstream.runtime.notebook import _follow, keep_showing
from midstream.runtime.watch import Watch

SEEN = Observation(
    flow="f",
    job="j",
    epoch=7,
    revision=2,
    observed_at=0.0,
    rows_in=500,
    duration_ms=100.0,
    elapsed_ms=250.0,
    operators=(OperatorObservation(operator="<odd>", kind="map", rows_in=500, rows_out=400, busy_ms=50.0),),
)


def numbers() -> Flow:
    flow = Flow("numbers")
    flow.source("in", ListSource([[{"n": 1}]], "n bigint")).map("same", lambda row: row)
    return flow


def finished() -> Flow:
    flow = Flow("numbers")
    flow.source("in", ListSource([[{"n": 1}]], "n bigint")).sink("out", MemorySink())
    return flow


class Text(HTMLParser):
    """What a reader sees of a page; tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data.strip())


def read(page: str) -> str:
    return " ".join(filter(None, Text(page).words))


def test_a_card_shows_flow_figures_and_changes_and_escapes_what_people_named():
    changes = (CardChange(2, "rolled back", "same & so on"), CardChange(1, "applied", "in", 12.44, "<b>note</b>"))
    told = read(JobCard(finished().graph, "running", 3, SEEN, changes).to_html())
    assert "numbers is running, revision 3; epoch 7: 2,000 rows/s, 100 ms (40% of the time)" in told
    assert "<odd> 2000 1600 0.00 100.0" in told
    assert "2 rolled back same & so on 1 applied in in effect after 12.4 ms <b>note</b>" in told


def test_a_card_before_the_first_epoch_and_of_a_failed_job():
    told = read(JobCard(finished().graph, "failed", 1, None, (), "ZeroDivisionError: 1 < 2").to_html())
    assert "numbers is failed, revision 1; no epoch has been committed yet ZeroDivisionError: 1 < 2" in told


def test_flows_and_explanations_are_shown_as_pictures_also_unfinished_ones():
    flow = numbers()
    with pytest.raises(FlowError):
        _ = flow.graph  # it has no sink yet
    assert ">same<" in flow._repr_svg_()


def test_a_card_is_renewed_after_epochs_that_are_far_enough_apart_and_at_the_end():
    watch, clock, renewed = Watch(lambda seen: seen, lambda _: None), iter([0.0, 0.4, 1.1, 1.1, 1.5]), []
    for _ in range(3):
        watch.put(SEEN)
    watch.end()
    _follow(watch, lambda: renewed.append(len(renewed)), 1.0, lambda: next(clock))
    assert renewed == [0, 1], "after the second epoch, and at the end"


def test_outside_a_notebook_the_user_is_told_what_to_do_instead():
    with pytest.raises(MidstreamError, match="midstream top JOB"):
        keep_showing(None)  # type: ignore[arg-type]
