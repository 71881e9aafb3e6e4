"""How a budget is divided: no job can have more for its weight but from one that has less."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from midstream import Share
from tests.examples import examples

NAMES = "abc"


def filled(share: Share, needs: Mapping[str, float]) -> dict[str, int]:
    """The oracle: one unit after the other goes to the job that has least for its weight and needs more."""
    found = dict.fromkeys(needs, share.least)
    for _ in range(share.total - sum(found.values())):
        short = [job for job in found if found[job] + 1 <= needs[job]]
        if not short:
            break
        found[min(short, key=lambda job: found[job] / share.weights.get(job, 1))] += 1
    return found


@st.composite
def shared(draw: st.DrawFn) -> tuple[Share, dict[str, float]]:
    names = NAMES[: draw(st.integers(1, 3))]
    least = draw(st.integers(1, 3))
    total = draw(st.integers(least * len(names), 24))
    weights = {name: draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for name in names if draw(st.booleans())}
    share = Share(cores=total, weights=weights, least=least)
    return share, {name: draw(st.one_of(st.just(math.inf), st.integers(0, 30).map(float))) for name in names}


@examples(150)
@given(shared())
def test_nobody_could_have_more_but_from_one_that_has_less(case: tuple[Share, dict[str, float]]) -> None:
    share, needs = case
    found = share.split(needs)
    assert set(found) == set(needs)
    assert all(part >= share.least for part in found.values())
    most = {job: max(share.least, need) for job, need in needs.items()}
    assert sum(found.values()) == share.total, "all of it is given out"
    if sum(most.values()) <= share.total:
        assert all(found[job] >= need for job, need in most.items()), "there is enough for all"
    else:
        assert all(found[job] <= need for job, need in most.items()), "nobody has more than it needs"
        oracle = filled(share, needs)
        assert all(abs(found[job] - oracle[job]) <= 1 for job in found), "but for rounding"
        for poor, rich in ((poor, rich) for poor in found for rich in found if found[poor] + 1 <= most[poor]):
            if found[rich] > share.least and poor != rich:
                left, got = (found[job] / share.weights.get(job, 1) for job in (rich, poor))
                step = sum(1 / share.weights.get(job, 1) for job in (rich, poor))
                assert left - got <= step, "one more for the poor would cost the rich what it has more"
