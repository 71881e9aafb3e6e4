"""Pictures of a change: the flow, with the components of the change in colour and the effect on each operator."""

from __future__ import annotations

from dataclasses import replace

from midstream.drawing.picture import Arrow, Box, Picture, picture
from midstream.drawing.svg import svg
from midstream.drawing.text import text
from midstream.flow.model import Graph
from midstream.planner.change_plan import ChangePlan, Scheduler
from midstream.planner.merged_flow import MergedFlow

__all__ = ["change_to_svg", "change_to_text"]

_MEANINGS = {
    "head": "the change begins here",
    "updated": "gets a new function",
    "added": "comes with the change",
    "removed": "goes with the change",
    "rewired": "reads something else",
    "before": "its place until now",
    "decides": "its rows have other readers",
    "crossed": "blocks: next epoch",
    "pruned": "emits several rows per row, but need not take part",
}


def change_to_text(graph: Graph, plan: ChangePlan, merged: MergedFlow | None = None) -> str:
    """The flow for a terminal, with each operator's component and role in the change.

    For a change of the plan, ``graph`` is the merged flow of ``merged``.

    >>> import pyarrow as pa
    >>> from midstream.flow.model import Operator, Port, Sink, Source
    >>> from midstream.flow.spec import Form
    >>> from midstream.operators.map import Map
    >>> from midstream.planner.change_plan import plan_change
    >>> rows = pa.schema([])
    >>> graph = Graph("fraud", (
    ...     Operator("payments", Source(), (), rows),
    ...     Operator("FM", Map(Form.ROWS), (Port("payments"),), rows),
    ...     Operator("MC", Map(Form.ROWS), (Port("FM"),), rows),
    ...     Operator("alerts", Sink(), (Port("MC"),), rows),
    ...     Operator("archive", Sink(), (Port("payments"),), rows),
    ... ))
    >>> print(change_to_text(graph, plan_change(graph, ["FM", "MC"])))
    fraud: change of FM, MC
    ▶    payments  source  pruned
    ├─╮
    │ ●  FM        map     [component 1] head, updated
    │ ●  MC        map     [component 1] updated
    │ ■  alerts    sink
    ■    archive   sink                                 ← payments
    """
    return text(_drawn(graph, plan, merged))


def change_to_svg(graph: Graph, plan: ChangePlan, merged: MergedFlow | None = None) -> str:
    """The same as a self-contained SVG document, for light and dark backgrounds.

    Each component has a colour, which the arrows along which the change travels share. Updated operators have thick
    frames, pruned ones dashed frames.
    """
    return svg(_drawn(graph, plan, merged))


def _drawn(graph: Graph, plan: ChangePlan, merged: MergedFlow | None) -> Picture:
    groups = {
        name: f"component {number}"
        for number, component in enumerate(plan.components, 1)
        for name in component.operators
    }
    scheduler = "" if plan.scheduler is Scheduler.FRIES else f" ({plan.scheduler})"
    what = ", ".join(_subjects(plan, merged))
    plain = picture(graph, groups, f"{graph.name}: change of {what}{scheduler}")
    boxes = tuple(_marked(box, op.name, plan, merged) for box, op in zip(plain.boxes, graph, strict=True))
    names = [op.name for op in graph]
    inside = {edge for component in plan.components for edge in component.edges}

    def coloured(arrow: Arrow) -> Arrow:
        travelled = (names[arrow.tail], names[arrow.head]) in inside
        return replace(arrow, group=boxes[arrow.tail].group) if travelled else arrow

    used = {badge for box in boxes for badge in box.badges}
    return replace(
        plain,
        boxes=boxes,
        arrows=tuple(map(coloured, plain.arrows)),
        meanings=tuple((badge, meaning) for badge, meaning in _MEANINGS.items() if badge in used),
    )


def _subjects(plan: ChangePlan, merged: MergedFlow | None) -> list[str]:
    """The subjects of a change, with signs for operators that are added or removed."""
    if merged is None or not merged.difference:
        return list(plan.updated)
    signs = {"added": "+", "removed": "-"}
    names = [name for name in merged.names if name in merged.functions or merged.role(name) not in ("", "before")]
    return [signs.get(merged.role(name), "") + name for name in names]


def _marked(box: Box, name: str, plan: ChangePlan, merged: MergedFlow | None) -> Box:
    role = "" if merged is None else merged.role(name)
    decides = merged is not None and bool(merged.difference) and name not in merged.functions and not role
    parts = {
        "head": name in plan.heads,
        "updated": name in plan.updated and not decides and role in ("", "rewired") and _is_updated(name, merged),
        "added": role == "added",
        "removed": role == "removed",
        "rewired": role == "rewired",
        "before": role == "before",
        "decides": name in plan.updated and decides,
        "crossed": name in plan.crosses,
        "pruned": any(name == each.operator for each in plan.pruned),
    }
    badges = tuple(badge for badge, holds in parts.items() if holds)
    strong = parts["updated"] or parts["added"]
    faint = parts["pruned"] or parts["removed"] or parts["before"]
    return replace(box, badges=badges, strong=strong, faint=faint)


def _is_updated(name: str, merged: MergedFlow | None) -> bool:
    return merged is None or not merged.difference or name in merged.functions
