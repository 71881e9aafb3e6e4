"""Draws a flow as a self-contained SVG file: own layout, own style sheet, light and dark.

Colours are classes, never attributes, so that the dark scheme can replace all of them. Operators are coloured by kind,
or by group if there are groups; the kind is always written under the name. Badges sit on a box's upper edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from midstream.drawing.layout import GraphLayout, Link, Rect, arrange
from midstream.drawing.picture import Arrow, Box, Picture, cells

_MARGIN = 24
_TITLE_HEIGHT = 34
_LEGEND_HEIGHT = 34
_NAME_ADVANCE = 7.9  # one column of the 13 px monospace font
_SMALL_ADVANCE = 6.4  # one column of the 11 px font, on average
_BOX_PADDING = 26
_MIN_BOX_WIDTH = 76
_BADGE_HEIGHT = 15
_BADGE_PADDING = 12
_BADGE_GAP = 4

# Name: fill and stroke in the light scheme, then in the dark one.
_COLOURS = {
    "grey": ("#f3f5f7", "#8b949e", "#1d232b", "#768390"),
    "green": ("#e0f7e6", "#2f9e50", "#13281c", "#3fb35c"),
    "orange": ("#fff0e3", "#df7226", "#2f1f13", "#e0823d"),
    "blue": ("#e3f1fe", "#2f86e0", "#10243a", "#4a9bf0"),
    "teal": ("#daf5f1", "#159a93", "#0d2a2a", "#35bdb2"),
    "purple": ("#f3ecfe", "#9065e0", "#241c38", "#a482f0"),
    "pink": ("#fdebf4", "#d9569f", "#331c2a", "#e071af"),
    "yellow": ("#fdf6cf", "#b98a06", "#2c240d", "#d3a52a"),
}
_OF_KIND = {
    "source": "green",
    "sink": "orange",
    "map": "blue",
    "filter": "blue",
    "flat_map": "blue",
    "lookup": "teal",
    "route": "purple",
    "union": "purple",
    "transform": "pink",
}
_OF_GROUP = ("blue", "orange", "green", "purple", "teal", "pink", "yellow")

_FONTS = """
.midstream .title{font:600 15px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.midstream .small{font:11px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.midstream .name{font:600 13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.midstream .middle{text-anchor:middle}
.midstream .label{paint-order:stroke;stroke-width:5px;stroke-linejoin:round}
.midstream .box,.midstream .swatch{stroke-width:1.5px}
.midstream .arrow{fill:none;stroke-width:1.5px}
.midstream .exchange{stroke-dasharray:5 4}
"""
# Only in pictures that have badges.
_BADGE_FONTS = """\
.midstream .badge{font:600 10px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.midstream .pill{stroke-width:1.2px}
.midstream .box.strong{stroke-width:3px}
.midstream .box.faint{stroke-dasharray:5 4}
.midstream .arrow.travelled{stroke-width:2.5px}
"""


def svg(picture: Picture) -> str:
    """A complete SVG document, left to right."""
    layout = arrange([_box_width(picture, box) for box in picture.boxes], [_link(arrow) for arrow in picture.arrows])
    legend = _legend(picture)
    top = _MARGIN + (_TITLE_HEIGHT if picture.title else 0)
    needed = max(layout.width, cells(picture.title) * 8.6, sum(width for _, width in legend))
    width = needed + 2 * _MARGIN
    height = top + layout.height + (_LEGEND_HEIGHT if legend else 0) + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="midstream" role="img" '
            f'aria-label="{escape(picture.title or "flow")}" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{_style(picture)}</style>",
            f"<defs>{''.join(_tips(picture))}</defs>",
            f'<rect class="sheet" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="10"/>',
            *_title(picture),
            f'<g transform="translate({_MARGIN} {top})">',
            *_arrows(picture, layout),
            *_boxes(picture, layout),
            *_labels(picture, layout),
            "</g>",
            *_placed(legend, top + layout.height + _LEGEND_HEIGHT),
            "</svg>",
        ]
    )


def _tips(picture: Picture) -> Iterator[str]:
    """The tip of plain arrows, then those of coloured ones: a marker does not inherit the colour of its line."""
    colours = sorted({_of_group(arrow.group) for arrow in picture.arrows if arrow.group is not None})
    for name, style in (("", "tip"), *((f"-{colour}", f"tip {colour}") for colour in colours)):
        # A thick line scales its tip, so a smaller tip comes out as large as the others.
        size = "7" if not name else "4.8"
        yield (
            f'<marker id="midstream-tip{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" '
            f'markerHeight="{size}" orient="auto"><path class="{style}" d="M0 0.6 7.5 4 0 7.4Z"/></marker>'
        )


def _box_width(picture: Picture, box: Box) -> float:
    text = max(cells(box.name) * _NAME_ADVANCE, cells(_caption(picture, box)) * _SMALL_ADVANCE)
    return max(_MIN_BOX_WIDTH, text + _BOX_PADDING, sum(map(_badge_width, box.badges)) + _BOX_PADDING / 2)


def _badge_width(badge: str) -> float:
    """The width of a badge, including the gap to the next one."""
    return cells(badge) * _SMALL_ADVANCE + _BADGE_PADDING + _BADGE_GAP


def _caption(picture: Picture, box: Box) -> str:
    """The kind; also the group if there are more groups than colours."""
    if box.group is None or len(picture.groups) <= len(_OF_GROUP):
        return box.kind
    return f"{box.kind} · {picture.groups[box.group]}"


def _link(arrow: Arrow) -> Link:
    return Link(arrow.tail, arrow.head, cells(arrow.label) * _SMALL_ADVANCE)


def _style(picture: Picture) -> str:
    badged = bool(picture.meanings) or any(box.badges for box in picture.boxes)
    used = sorted({_colour(picture, i) for i in range(len(picture.boxes))} | ({"grey"} if badged else set()))
    light = _scheme("#ffffff", "#d5dbe1", "#1c2128", "#5b6570", "#8b949e", {c: _COLOURS[c][:2] for c in used}, badged)
    dark = _scheme("#0f141a", "#323a44", "#e8edf2", "#9aa5b1", "#77828e", {c: _COLOURS[c][2:] for c in used}, badged)
    fonts = _FONTS + _BADGE_FONTS if badged else _FONTS
    return f"{fonts}{light}@media (prefers-color-scheme: dark){{\n{dark}}}\n"


def _scheme(
    paper: str, frame: str, ink: str, faint: str, line: str, colours: dict[str, tuple[str, ...]], badged: bool
) -> str:
    rules = [
        f".sheet{{fill:{paper};stroke:{frame}}}",
        f".name,.midstream .title{{fill:{ink}}}",
        f".small{{fill:{faint}}}",
        f".label{{stroke:{paper}}}",
        f".arrow{{stroke:{line}}}",
        f".tip{{fill:{line}}}",
        *(f".{name}{{fill:{fill};stroke:{stroke}}}" for name, (fill, stroke) in colours.items()),
    ]
    if badged:
        rules += [f".badge{{fill:{ink}}}"]
        for name, (_, stroke) in colours.items():
            rules += [
                f".pill.{name}{{fill:{paper}}}",
                f".arrow.{name}{{fill:none}}",
                f".tip.{name}{{fill:{stroke};stroke:none}}",
            ]
    return "".join(f".midstream {rule}\n" for rule in rules)


def _colour(picture: Picture, number: int) -> str:
    box = picture.boxes[number]
    if not picture.groups:
        return _OF_KIND.get(box.kind, "grey")
    return "grey" if box.group is None else _of_group(box.group)


def _of_group(group: int) -> str:
    return _OF_GROUP[group % len(_OF_GROUP)]


def _title(picture: Picture) -> Iterator[str]:
    if picture.title:
        yield f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 12}">{escape(picture.title)}</text>'


def _arrows(picture: Picture, layout: GraphLayout) -> Iterator[str]:
    for arrow, route in zip(picture.arrows, layout.routes, strict=True):
        style = "arrow exchange" if arrow.exchange else "arrow"
        tip = "midstream-tip"
        if arrow.group is not None:
            style += f" travelled {_of_group(arrow.group)}"
            tip += f"-{_of_group(arrow.group)}"
        yield f'<path class="{style}" marker-end="url(#{tip})" d="{_path(route)}"/>'


def _path(route: tuple[tuple[float, float], ...]) -> str:
    drawn: list[str] = []
    for (x, y), (to_x, to_y) in zip(route[::2], route[1::2], strict=True):
        middle = (x + to_x) / 2
        drawn.append(f"{'L' if drawn else 'M'}{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}")
    return "".join(drawn)


def _boxes(picture: Picture, layout: GraphLayout) -> Iterator[str]:
    for i, (box, rect) in enumerate(zip(picture.boxes, layout.boxes, strict=True)):
        middle = rect.x + rect.width / 2
        colour = _colour(picture, i)
        yield _rect(rect, colour + " strong" * box.strong + " faint" * box.faint)
        yield f'<text class="name middle" x="{middle:g}" y="{rect.y + 20:g}">{escape(box.name)}</text>'
        yield f'<text class="small middle" x="{middle:g}" y="{rect.y + 36:g}">{escape(_caption(picture, box))}</text>'
        x = rect.x + 8
        for badge in box.badges:
            yield _badge(badge, colour, x, rect.y - 3)
            x += _badge_width(badge)


def _badge(badge: str, colour: str, x: float, middle: float) -> str:
    """A pill around ``middle``."""
    width = _badge_width(badge) - _BADGE_GAP
    return (
        f'<rect class="pill {colour}" x="{x:g}" y="{middle - _BADGE_HEIGHT / 2:g}" width="{width:g}" '
        f'height="{_BADGE_HEIGHT}" rx="{_BADGE_HEIGHT / 2:g}"/>'
        f'<text class="badge middle" x="{x + width / 2:g}" y="{middle + 3.5:g}">{escape(badge)}</text>'
    )


def _rect(rect: Rect, style: str) -> str:
    place = f'x="{rect.x:g}" y="{rect.y:g}" width="{rect.width:g}" height="{rect.height:g}"'
    return f'<rect class="box {style}" {place} rx="9"/>'


def _labels(picture: Picture, layout: GraphLayout) -> Iterator[str]:
    """Branch names, a little past the middle of the first swing, where the arrows of one route have separated."""
    for arrow, route in zip(picture.arrows, layout.routes, strict=True):
        if arrow.label:
            # The point of the curve in `_path` at t = 0.6.
            (x, y), (to_x, to_y) = route[:2]
            place = f'x="{x + 0.576 * (to_x - x):g}" y="{y + 0.648 * (to_y - y) + 3.5:g}"'
            yield f'<text class="small label middle" {place}>{escape(arrow.label)}</text>'


def _legend(picture: Picture) -> list[tuple[str, float]]:
    """Entries, each with its width, drawn with their baseline at y = 0."""
    entries = []
    for g, label in enumerate(picture.groups):
        entries.append(
            (f'<rect class="swatch {_of_group(g)}" x="0" y="-10" width="18" height="12" rx="3"/>', 25.0, label)
        )
    for badge, meaning in picture.meanings:
        entries.append((_badge(badge, "grey", 0, -4), _badge_width(badge) + 3, meaning))
    if any(arrow.exchange for arrow in picture.arrows):
        entries.append(('<path class="arrow exchange" d="M0 -4H26"/>', 34.0, "exchange"))
    return [
        (f'{swatch}<text class="small" x="{x:g}" y="0">{escape(label)}</text>', w)
        for swatch, x, label in entries
        for w in [max(x, 34) + cells(label) * _SMALL_ADVANCE + 22]
    ]


def _placed(legend: list[tuple[str, float]], baseline: float) -> Iterator[str]:
    x = float(_MARGIN)
    for entry, width in legend:
        yield f'<g transform="translate({x:g} {baseline:g})">{entry}</g>'
        x += width
