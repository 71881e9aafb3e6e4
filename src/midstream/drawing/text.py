"""Draws a flow for the terminal: one line per operator, with lanes on the left that split and join like the flow.

A lane is an arrow on its way down to its head. Operators are in depth-first order, so each branch is shown to its end
before the next begins. The first branch takes the rightmost lane: so lanes close from the right, and lines rarely
cross.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from midstream.drawing.picture import Arrow, Picture, cells

_MARKS = {"source": "▶", "sink": "■"}
_MARK = "●"

_Lanes = list[Arrow | None]


def text(picture: Picture) -> str:
    """Lanes, name, kind, group and badges, and the inputs unless the only one is the operator on the line above."""
    rows = list(_rows(picture))
    width = max((cells(lanes) for lanes, _ in rows), default=0)
    order = [number for _, number in rows if number is not None]
    columns = [_columns(picture, number, above) for number, above in zip(order, [None, *order], strict=False)]
    widths = [max(cells(column[i]) for column in columns) for i in range(4)] if columns else []
    described = iter(columns)
    lines = [picture.title] if picture.title else []
    for lanes, box in rows:
        parts = [] if box is None else [_padded(part, w) for part, w in zip(next(described), widths, strict=True) if w]
        lines.append("  ".join([_padded(lanes, width), *parts]).rstrip())
    return "\n".join(lines)


def _rows(picture: Picture) -> Iterator[tuple[str, int | None]]:
    """The lanes of each line, and the number of its box; lines without a box only split, join or continue lanes."""
    lanes: _Lanes = []
    leaving: dict[int, list[Arrow]] = {}
    for arrow in picture.arrows:
        leaving.setdefault(arrow.tail, []).append(arrow)
    for number in _depth_first(picture):
        arriving = [i for i, arrow in enumerate(lanes) if arrow is not None and arrow.head == number]
        lane = arriving[0] if arriving else _free_lane(lanes, 0)
        if len(arriving) > 1:
            yield _connector(lanes, lane, arriving[1:], "┴╯"), None
        for i in arriving:
            lanes[i] = None
        yield _drawn(lanes, {lane: _MARKS.get(picture.boxes[number].kind, _MARK)}), number
        arrows = leaving.get(number, [])
        opened = _open(lanes, lane, arrows)
        if opened:
            yield _connector(lanes, lane, opened, "┬╮"), None
        elif arrows and arrows[0].exchange:
            yield _drawn(lanes, {}), None


def _depth_first(picture: Picture) -> Iterator[int]:
    missing = [0] * len(picture.boxes)
    heads: dict[int, list[int]] = {}
    for arrow in picture.arrows:
        missing[arrow.head] += 1
        heads.setdefault(arrow.tail, []).append(arrow.head)
    ready = [i for i in reversed(range(len(picture.boxes))) if not missing[i]]
    while ready:
        number = ready.pop()
        yield number
        for head in reversed(heads.get(number, [])):
            missing[head] -= 1
            if not missing[head]:
                ready.append(head)


def _open(lanes: _Lanes, lane: int, arrows: list[Arrow]) -> list[int]:
    """Give each arrow a lane, the last one that of its tail; return the new lanes."""
    if not arrows:
        return []
    lanes[lane] = arrows[-1]
    opened: list[int] = []
    for arrow in reversed(arrows[:-1]):
        new = _free_lane(lanes, max([lane, *opened]) + 1)
        lanes[new] = arrow
        opened.append(new)
    return opened


def _free_lane(lanes: _Lanes, start: int) -> int:
    for i in range(start, len(lanes)):
        if lanes[i] is None:
            return i
    lanes.extend([None] * (max(start, len(lanes)) + 1 - len(lanes)))
    return len(lanes) - 1


def _connector(lanes: _Lanes, lane: int, others: Collection[int], glyphs: str) -> str:
    """A line that connects `others`, all to the right of `lane`, to it; it passes under the lanes in between."""
    last = max(others)
    marks = {lane: "├", last: glyphs[1]} | {i: glyphs[0] for i in others if i != last}
    return _drawn(lanes, marks, tied=range(lane, last))


def _drawn(lanes: _Lanes, marks: dict[int, str], tied: range = range(0)) -> str:
    drawn = []
    for i, arrow in enumerate(lanes):
        rest = "─" if i in tied else " "
        line = rest if arrow is None else "┊" if arrow.exchange else "│"
        drawn.append(marks.get(i, line) + rest)
    return "".join(drawn).rstrip()


def _columns(picture: Picture, number: int, above: int | None) -> tuple[str, str, str, str]:
    box = picture.boxes[number]
    group = [] if box.group is None else [f"[{picture.groups[box.group]}]"]
    badges = [", ".join(box.badges)] if box.badges else []
    inputs = [arrow for arrow in picture.arrows if arrow.head == number]
    obvious = not inputs or (len(inputs) == 1 and not inputs[0].label and inputs[0].tail == above)
    origins = "" if obvious else "← " + ", ".join(_origin(picture, arrow) for arrow in inputs)
    return box.name, box.kind, " ".join(group + badges), origins


def _origin(picture: Picture, arrow: Arrow) -> str:
    name = picture.boxes[arrow.tail].name
    return f"{name}[{arrow.label}]" if arrow.label else name


def _padded(part: str, width: int) -> str:
    return part + " " * (width - cells(part))
