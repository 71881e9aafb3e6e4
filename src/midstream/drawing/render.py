"""Pictures of a flow: for the terminal, for Markdown, for documents.

The three styles show the same picture (`picture.py`) and have a module each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from midstream.drawing.mermaid import mermaid
from midstream.drawing.picture import Picture, picture
from midstream.drawing.svg import svg
from midstream.drawing.text import text
from midstream.errors import FlowError
from midstream.flow.model import Graph

__all__ = ["STYLES", "Style", "render"]

Style = Literal["text", "mermaid", "svg"]

STYLES: Mapping[str, Callable[[Picture], str]] = {"text": text, "mermaid": mermaid, "svg": svg}
"""The function behind each style."""


def render(
    graph: Graph,
    style: Style = "text",
    *,
    groups: Mapping[str, str] | None = None,
    title: str | None = None,
) -> str:
    """Draw a flow; equal graphs produce equal pictures.

    ``groups`` maps operators to labels of the groups they belong to, such as stages: a column in text, subgraphs in
    Mermaid, colours with a legend in SVG. ``title`` defaults to the flow's name; an empty title is left out.

    >>> import pyarrow as pa
    >>> from midstream.flow.model import KeyBy, Operator, Port, Sink, Source
    >>> from midstream.flow.spec import Form
    >>> from midstream.operators.filter import Filter
    >>> rows = pa.schema([("card", pa.string())])
    >>> graph = Graph("cards", (
    ...     Operator("payments", Source(), (), rows),
    ...     Operator("large", Filter(Form.ROWS), (Port("payments"),), rows),
    ...     Operator("alerts", Sink(), (Port("large"),), rows),
    ...     Operator("archive", Sink(), (Port("payments"),), rows),
    ... ))
    >>> print(render(graph))
    cards
    ▶   payments  source
    ├─╮
    │ ● large     filter
    │ ■ alerts    sink
    ■   archive   sink    ← payments
    """
    if style not in STYLES:
        raise FlowError(f"a flow cannot be drawn in style {style!r}; choose one of {', '.join(map(repr, STYLES))}.")
    return STYLES[style](picture(graph, groups or {}, graph.name if title is None else title))
