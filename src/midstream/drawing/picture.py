"""The content of a drawing before any style: boxes, arrows and groups. Shared by all styles of `render`.

A box is an operator; an arrow stands for all edges between two operators, so a route that sends two branches to one
union has one arrow with both branches on it. Boxes are numbered, because a name may contain any character, while a
number is safe in every output format.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import FlowError
from midstream.flow.model import Graph


@dataclass(frozen=True)
class Box:
    """An operator as drawn. ``group`` is an index into :attr:`Picture.groups`.

    ``badges`` are words on the box, ``strong`` gives it a thick frame and ``faint`` a dashed one; Mermaid shows
    neither.
    """

    name: str
    kind: str
    group: int | None
    badges: tuple[str, ...] = ()
    strong: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Arrow:
    """All edges from one operator to another; ``tail`` and ``head`` are indexes into :attr:`Picture.boxes`.

    ``group`` is the group that the arrow itself belongs to, if any: an index as in :class:`Box`.
    """

    tail: int
    head: int
    label: str
    exchange: bool
    group: int | None = None


@dataclass(frozen=True)
class Picture:
    """Boxes in the graph's order, so that an arrow's tail always comes before its head.

    ``meanings`` are pairs of a badge and its explanation, for the legend.
    """

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    groups: tuple[str, ...]
    meanings: tuple[tuple[str, str], ...] = ()


def picture(graph: Graph, groups: Mapping[str, str], title: str) -> Picture:
    """The picture of a graph; all texts are printable."""
    unknown = [name for name in groups if name not in graph]
    if unknown:
        raise FlowError(
            f"flow {graph.name!r} has no operator {unknown[0]!r} to put into group {groups[unknown[0]]!r}; "
            f"its operators are {', '.join(repr(op.name) for op in graph)}. Group only operators of this flow."
        )
    labels = tuple(dict.fromkeys(groups[op.name] for op in graph if op.name in groups))
    boxes = tuple(
        Box(printable(op.name), op.kind, labels.index(groups[op.name]) if op.name in groups else None) for op in graph
    )
    return Picture(printable(title), boxes, _arrows(graph), tuple(printable(label) for label in labels))


def _arrows(graph: Graph) -> tuple[Arrow, ...]:
    number = {op.name: i for i, op in enumerate(graph)}
    branches: dict[tuple[int, int], list[str]] = {}
    keyed: set[tuple[int, int]] = set()
    for port, consumer in graph.edges:
        ends = number[port.operator], number[consumer]
        seen = branches.setdefault(ends, [])
        # Rows behind a key_by move to other tasks, except into what Catalyst runs, which shuffles for itself if at all.
        if graph.is_keyed(port) and not graph[consumer].spec.is_outlet:
            keyed.add(ends)
        if port.branch and port.branch not in seen:
            seen.append(port.branch)
    return tuple(
        Arrow(*ends, printable(", ".join(labels)), exchange=ends in keyed) for ends, labels in branches.items()
    )


def printable(text: str) -> str:
    r"""Escape characters that would break a line or an XML file: control characters, lone surrogates, odd spaces.

    >>> printable("a\tb")
    'a\\tb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cells(text: str) -> int:
    """Width of a text in a terminal, in columns.

    >>> cells("card"), cells("支払い")
    (4, 6)
    """
    return sum(_cells_of(c) for c in text)


def _cells_of(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
