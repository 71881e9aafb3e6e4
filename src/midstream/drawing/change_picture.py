"""Pictures of a change: the flow, with the components of the change in colour and the effect on each operator."""

from __future__ import annotations

from dataclasses import replace

from midstream.drawing.picture import Arrow, Box, Picture, picture
from midstream.drawing.svg import svg
from midstream.drawing.text import text
from midstream.flow.model import Graph
from midstream.planner.change_plan import ChangePlan, Scheduler

__all__ = ["change_to_svg", "change_to_text"]

_MEANINGS = {
    "head": "the change begins here",
    "updated": "gets a new function",
    "crossed": "blocks: next epoch",
    "pruned": "emits several rows per row, but need not take part",
}


def change_to_text(graph: Graph, plan: ChangePlan) -> str:
    """The flow for a terminal, with each operator's component and role in the change.

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
    return text(_drawn(graph, plan))


def change_to_svg(graph: Graph, plan: ChangePlan) -> str:
    """The same as a self-contained SVG document, for light and dark backgrounds.

    Each component has a colour, which the arrows along which the change travels share. Updated operators have thick
    frames, pruned ones dashed frames.
    """
    return svg(_drawn(graph, plan))


def _drawn(graph: Graph, plan: ChangePlan) -> Picture:
    groups = {
        name: f"component {number}"
        for number, component in enumerate(plan.components, 1)
        for name in component.operators
    }
    scheduler = "" if plan.scheduler is Scheduler.FRIES else f" ({plan.scheduler})"
    plain = picture(graph, groups, f"{graph.name}: change of {', '.join(plan.updated)}{scheduler}")
    boxes = tuple(_marked(box, op.name, plan) for box, op in zip(plain.boxes, graph, strict=True))
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


def _marked(box: Box, name: str, plan: ChangePlan) -> Box:
    parts = {
        "head": name in plan.heads,
        "updated": name in plan.updated,
        "crossed": name in plan.crosses,
        "pruned": any(name == each.operator for each in plan.pruned),
    }
    badges = tuple(badge for badge, holds in parts.items() if holds)
    return replace(box, badges=badges, strong=parts["updated"], faint=parts["pruned"])
