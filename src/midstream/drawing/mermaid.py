"""A flow as a Mermaid flowchart, which GitHub and many editors draw inside Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator

from midstream.drawing.picture import Arrow, Box, Picture

_SHAPES = {"source": '(["{}"])', "sink": '[("{}")]', "route": '{{{{"{}"}}}}', "key_by": '[/"{}"/]'}
_PLAIN = '["{}"]'
# Characters that Mermaid reads literally inside quotes; all others are written as character codes.
_SAFE = frozenset(" .,:-_+=/()[]")


def mermaid(picture: Picture) -> str:
    """A left-to-right flowchart; groups become subgraphs, exchanges dotted arrows."""
    return "\n".join(_lines(picture))


def _lines(picture: Picture) -> Iterator[str]:
    if picture.title:
        # A JSON string is also a YAML string, and the front matter is YAML.
        yield from ("---", f"title: {json.dumps(picture.title, ensure_ascii=False)}", "---")
    yield "flowchart LR"
    for i, box in enumerate(picture.boxes):
        if box.group is None:
            yield f"    {_box(i, box)}"
    for g, label in enumerate(picture.groups):
        yield f'    subgraph g{g}["{_escaped(label)}"]'
        for i, box in enumerate(picture.boxes):
            if box.group == g:
                yield f"        {_box(i, box)}"
        yield "    end"
    for arrow in picture.arrows:
        yield f"    {_arrow(arrow)}"


def _box(number: int, box: Box) -> str:
    text = f"{_escaped(box.name)}<br/>{box.kind}"
    return f"n{number}" + _SHAPES.get(box.kind, _PLAIN).format(text)


def _arrow(arrow: Arrow) -> str:
    line = "-.->" if arrow.exchange else "-->"
    label = f'|"{_escaped(arrow.label)}"|' if arrow.label else ""
    return f"n{arrow.tail} {line}{label} n{arrow.head}"


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() or c in _SAFE else f"#{ord(c)};" for c in text)
