"""Where an epoch's time went: phases from clocks that may disagree, in both words and pictures."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, MemorySink, Update
from midstream.drawing.epoch_chart import epoch_as_svg, epoch_as_text
from midstream.ids import StageIndex
from midstream.metrics import EpochProgress
from midstream.runtime.epoch_phases import EpochMoments, phases_of
from midstream.testing import ChangeAt, ManualClock, run_local
from tests.examples import examples

moments = st.floats(0, 2e9)
spans = st.dictionaries(st.integers(0, 4).map(StageIndex), st.tuples(moments, moments))


class Ticking(ManualClock):
    """Every look at the clock is a millisecond later."""

    def wall_us(self) -> int:
        self.advance(seconds=0.001)
        return super().wall_us()


@examples(100)
@given(st.builds(EpochMoments, st.none() | moments, *5 * [moments]), spans)
def test_phases_are_never_negative_and_stages_lie_within_the_run_whatever_the_clocks(times, spans):
    phases = {phase.name: phase for phase in phases_of(times, spans)}
    assert all(phase.ms >= 0 for phase in phases.values())
    plan, sinks, commit = phases["plan"], phases["sinks"], phases["commit"]
    stages = [phase for name, phase in phases.items() if name.startswith("stage")]
    assert [stage.name for stage in stages] == [f"stage {stage}" for stage in sorted(spans)]
    for stage in stages:
        assert 0 == plan.began_ms <= plan.ended_ms <= stage.began_ms <= stage.ended_ms <= sinks.began_ms
    assert sinks.ended_ms == commit.began_ms
    before = [phases[name] for name in ("idle", "earlier runs", "plan") if name in phases]
    assert all(a.ended_ms == b.began_ms for a, b in pairwise(before))
    assert ("idle" in phases) == (times.ended_before is not None)


def flow_of(epochs: int) -> Flow:
    flow = Flow("phases")
    rows = flow.source("in", ListSource([[{"n": 1}]] * epochs, "n bigint"))
    rows.map("M", lambda row: row).key_by("K", "n").map("L", lambda row: row).sink("out", MemorySink())
    return flow


def test_each_epoch_reports_its_phases():
    first, second = run_local(flow_of(2), clock=Ticking()).progress
    assert [phase.name for phase in first.phases] == ["plan", "stage 0", "stage 1", "sinks", "commit"]
    assert [phase.name for phase in second.phases] == ["idle", "plan", "stage 0", "stage 1", "sinks", "commit"]
    assert all(phase.ms > 0 for phase in second.phases)
    zero, one = [phase for phase in second.phases if phase.name.startswith("stage")]
    assert zero.ended_ms <= one.began_ms, "the second reads what the first has left"
    idle = second.phases[0]
    assert idle.ended_ms == 0
    assert first.phases[-1].ms + idle.ms < 100, "idle begins where the epoch before ended"


def test_an_epoch_that_was_run_again_reports_how_long_earlier_runs_took():
    broken = ChangeAt.of(1, Update("M", lambda row: {"n": row["m"]}), preflight=False)
    progress = run_local(flow_of(3), clock=Ticking(), changes=[broken]).progress
    again = [epoch.phases for epoch in progress if "earlier runs" in [phase.name for phase in epoch.phases]]
    assert [[phase.name for phase in phases] for phases in again] == [
        ["idle", "earlier runs", "plan", "stage 0", "stage 1", "sinks", "commit"]
    ]
    assert all(phase.ms > 0 for phase in again[0])


def test_a_chart_has_a_bar_for_each_phase():
    times = EpochMoments(9.9, 9.95, 10.0, planned=10.01, computed=10.3, committed=10.35)
    phases = phases_of(times, {StageIndex(0): (10.05, 10.2), StageIndex(1): (10.21, 10.25)})
    progress = EpochProgress(7, 2, 0.0, 350.0, (), 10, 5, phases)
    drawn = ElementTree.fromstring(epoch_as_svg(progress))
    bars = [each.get("class") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars == ["idle", "earlier", "plan", "stage", "stage", "sinks", "commit"]
    assert [line.split()[0] for line in epoch_as_text(progress).splitlines()[1:]] == bars
