"""A scheduler that is wrong, to show that tests and the auditor notice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from midstream.flow.model import Graph
from midstream.planner import change_plan
from midstream.planner.change_plan import ChangePlan, Component, Scheduler, plan_change


def _each_by_itself(graph: Graph, names: tuple[str, ...]) -> tuple[tuple[Component, ...], tuple[()]]:
    return tuple(Component((name,), (), (name,), (name,)) for name in names), ()


@contextmanager
def naive_scheduler() -> Iterator[None]:
    """While it lasts, the scheduler `fries` lets each updated operator switch by itself."""
    with patch.dict(change_plan._PLANNERS, {Scheduler.FRIES: _each_by_itself}):
        yield


def naive_plan(graph: Graph, updated: Collection[str]) -> ChangePlan:
    with naive_scheduler():
        return plan_change(graph, updated)
