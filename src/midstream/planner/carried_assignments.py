"""The assignments of a job's stages after a change of its plan: state stays with its owner where that is possible.

Pure. A stage is recognised by the operators with state that it hosts, otherwise by any of its operators. State lies in
the checkpoint by bin, so where two stages become one, one of their assignments is as good as the other.
"""

from __future__ import annotations

from dataclasses import replace

from midstream.ids import BINS, StageIndex
from midstream.planner.assignment import Assignment, Assignments, spread
from midstream.planner.stages import Plan

__all__ = ["carried", "under_plan"]


def carried(
    before: Plan, assignments: Assignments, after: Plan, partitions: int, bins: int = BINS
) -> dict[StageIndex, Assignment]:
    """The assignments of ``after``. Stages that ``before`` does not have spread their bins over ``partitions``.

    New stages have as many bins as the others, because state is addressed by bin; ``bins`` if there are no others.
    """
    bins = next((each.bins for each in assignments.values()), bins)
    return {index: spread(partitions, bins) for index in after.exchanged} | _of_same_stages(before, assignments, after)


def under_plan(
    before: Plan, assignments: Assignments, after: Plan, present: Assignments
) -> dict[StageIndex, Assignment]:
    """The same owners under another plan of the same job. Stages that ``before`` does not have keep their ``present``
    assignments."""
    return {**present, **_of_same_stages(before, assignments, after)}


def _of_same_stages(before: Plan, assignments: Assignments, after: Plan) -> dict[StageIndex, Assignment]:
    host = {name: stage.index for stage in before.stages for name in stage.operators}
    found: dict[StageIndex, Assignment] = {}
    for index in after.exchanged:
        operators = after.stages[index].operators
        stateful = [name for name in operators if after.graph[name].spec.is_stateful]
        for name in (*stateful, *operators):
            if host.get(name) in assignments:
                kept = assignments[host[name]]
                hosts = {host[one] for one in operators if host.get(one) in assignments}
                found[index] = replace(
                    kept,
                    divided=tuple(each for stage in sorted(hosts) for each in assignments[stage].divided),
                    united=tuple(each for stage in sorted(hosts) for each in assignments[stage].united),
                )
                break
    return found
