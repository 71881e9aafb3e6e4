"""Pictures of a flow: text and Mermaid word for word, SVG by its geometry."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from textwrap import dedent

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.drawing.layout import Link, arrange
from midstream.drawing.picture import printable
from midstream.drawing.render import render
from midstream.errors import FlowError
from midstream.flow.model import Graph, KeyBy, Operator, Port, Sink, Source, Transform, Union
from midstream.flow.spec import Form, How, Spec
from midstream.operators.filter import Filter
from midstream.operators.flat_map import FlatMap
from midstream.operators.lookup import Lookup
from midstream.operators.map import Map
from midstream.operators.route import Route

ROWS = pa.schema([("card", pa.string())])
SVG = "{http://www.w3.org/2000/svg}"


def op(name: str, spec: Spec, *inputs: str | Port) -> Operator:
    return Operator(name, spec, tuple(Port(i) if isinstance(i, str) else i for i in inputs), ROWS)


FRAUD = Graph(
    "fraud",
    (
        op("payments", Source("due")),
        op("valid", Filter(Form.BATCHES), "payments"),
        op("merchants", Lookup((("m", "m"),), How.LEFT, True, ROWS), "valid"),
        op("by_customer", KeyBy(("customer",)), "merchants"),
        op("FC", Map(Form.ROWS), "by_customer"),
        op("verdict", Route(Form.ROWS, ("fraud", "clean")), "FC"),
        op("alerts", Sink(), Port("verdict", "fraud")),
        op("ledger", Sink(), Port("verdict", "clean")),
    ),
)

# A diamond, a route whose branches join again, two sources, three sinks, and a union over different depths.
UGLY = Graph(
    "ugly",
    (
        op("orders", Source()),
        op('refunds "late"', Source()),
        op("parse", Map(Form.ROWS), "orders"),
        op("left", Map(Form.ROWS), "parse"),
        op("right", FlatMap(Form.ROWS), "parse"),
        op("longer", Filter(Form.ROWS), "right"),
        op("both", Union(), "left", "longer"),
        op("kind", Route(Form.ROWS, ("card", "cash", "gift", "other")), "both"),
        op("by_card", KeyBy(("card",)), Port("kind", "card")),
        op("score", Map(Form.ROWS), "by_card"),
        op("all", Union(), "score", Port("kind", "cash"), Port("kind", "gift"), 'refunds "late"'),
        op("sql", Transform(), "all"),
        op("warehouse", Sink(), "sql"),
        op("scores", Sink(), "score"),
        op("rest", Sink(), Port("kind", "other")),
    ),
)
STAGES = dict.fromkeys(("payments", "valid", "merchants", "by_customer"), "stage 0")
STAGES |= dict.fromkeys(("FC", "verdict"), "stage 1")


def drawn(text: str) -> str:
    return dedent(text).strip("\n")


def test_text_shows_a_chain_an_exchange_and_branches():
    assert render(FRAUD) == drawn("""
        fraud
        ▶    payments     source
        ●    valid        filter
        ●    merchants    lookup
        ●    by_customer  key_by
        ┊
        ●    FC           map
        ●    verdict      route
        ├─╮
        │ ■  alerts       sink    ← verdict[fraud]
        ■    ledger       sink    ← verdict[clean]
    """)


def test_text_shows_groups_in_a_column():
    assert render(FRAUD, groups=STAGES, title="by stage") == drawn("""
        by stage
        ▶    payments     source  [stage 0]
        ●    valid        filter  [stage 0]
        ●    merchants    lookup  [stage 0]
        ●    by_customer  key_by  [stage 0]
        ┊
        ●    FC           map     [stage 1]
        ●    verdict      route   [stage 1]
        ├─╮
        │ ■  alerts       sink               ← verdict[fraud]
        ■    ledger       sink               ← verdict[clean]
    """)


def test_text_shows_diamonds_several_sources_and_branches_that_meet_again():
    assert render(UGLY, title="") == drawn("""
        ▶        orders          source
        ●        parse           map
        ├─╮
        │ ●      left            map
        ● │      right           flat_map   ← parse
        ● │      longer          filter
        ├─╯
        ●        both            union      ← left, longer
        ●        kind            route
        ├─┬─╮
        │ │ ●    by_card         key_by     ← kind[card]
        │ │ ┊
        │ │ ●    score           map
        │ │ ├─╮
        │ │ ■ │  scores          sink
        ■ │   │  rest            sink       ← kind[other]
        ▶ │   │  refunds "late"  source
        ├─┴───╯
        ●        all             union      ← score, kind[cash, gift], refunds "late"
        ●        sql             transform
        ■        warehouse       sink
    """)


def test_wide_characters_keep_text_columns_straight():
    graph = Graph("wide", (op("支払い", Source()), op("ok", Sink(), "支払い")))
    assert render(graph, title="") == "▶  支払い  source\n■  ok      sink"


def test_mermaid_numbers_the_operators_and_quotes_their_names():
    graph = Graph(
        'a "b"',
        (
            op('in "1"', Source()),
            op("by", KeyBy(("card",)), 'in "1"'),
            op("end", Route(Form.ROWS, ("x|y", "z")), "by"),
            op("#<`&`>", Map(Form.ROWS), Port("end", "x|y"), Port("end", "z")),
            op("out", Sink(), "#<`&`>"),
        ),
    )
    assert render(graph, "mermaid") == drawn("""
        ---
        title: "a \\"b\\""
        ---
        flowchart LR
            n0(["in #34;1#34;<br/>source"])
            n1[/"by<br/>key_by"/]
            n2{{"end<br/>route"}}
            n3["#35;#60;#96;#38;#96;#62;<br/>map"]
            n4[("out<br/>sink")]
            n0 --> n1
            n1 -.-> n2
            n2 -->|"x#124;y, z"| n3
            n3 --> n4
    """)


def test_mermaid_groups_are_subgraphs():
    graph = Graph("g", (op("in", Source()), op("m", Map(Form.ROWS), "in"), op("out", Sink(), "m")))
    assert render(graph, "mermaid", groups={"in": "stage 0", "m": "stage 0"}, title="") == drawn("""
        flowchart LR
            n2[("out<br/>sink")]
            subgraph g0["stage 0"]
                n0(["in<br/>source"])
                n1["m<br/>map"]
            end
            n0 --> n1
            n1 --> n2
    """)


def test_only_an_edge_that_moves_rows_to_other_tasks_is_an_exchange():
    keyed = (op("in", Source()), op("by", KeyBy(("card",)), "in"))
    assert "n1 -.-> n2" in render(Graph("g", (*keyed, op("m", Map(Form.ROWS), "by"))), "mermaid")
    assert "n1 --> n2" in render(Graph("g", (*keyed, op("out", Sink(), "by"))), "mermaid")


def test_an_unknown_style_is_refused_with_the_known_ones():
    with pytest.raises(FlowError, match="'pdf'; choose one of 'text', 'mermaid', 'svg'"):
        render(FRAUD, "pdf")  # type: ignore[arg-type]


def test_a_group_of_an_operator_that_does_not_exist_is_refused():
    with pytest.raises(FlowError, match=r"no operator 'FX' to put into group 'stage 0'.*'FC'"):
        render(FRAUD, groups={"FX": "stage 0"})


@pytest.mark.parametrize("style", ["text", "mermaid", "svg"])
def test_an_empty_flow_can_be_drawn(style):
    assert "nothing" in render(Graph("nothing", ()), style)


@pytest.mark.parametrize("style", ["text", "mermaid", "svg"])
def test_equal_graphs_give_equal_pictures(style):
    again = Graph(UGLY.name, tuple(UGLY.operators))
    assert render(again, style) == render(UGLY, style)


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def with_class(root: ET.Element, tag: str, name: str) -> list[ET.Element]:
    return [found for found in root.iter(SVG + tag) if name in (found.get("class") or "").split()]


def test_svg_is_self_contained_and_has_a_dark_scheme():
    svg = render(UGLY, "svg")
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"@import|@font-face|href|url\((?!#)", svg)


def test_svg_dashes_exchanges_and_names_branches():
    root = parse(render(UGLY, "svg"))
    assert len(with_class(root, "path", "exchange")) == 1 + 1  # the edge and its legend
    assert [label.text for label in with_class(root, "text", "label")] == ["card", "cash, gift", "other"]


def test_svg_colours_by_kind_or_else_by_group_with_a_legend():
    by_kind = parse(render(FRAUD, "svg"))
    assert with_class(by_kind, "rect", "green")[0].get("class") == "box green"
    assert not with_class(by_kind, "rect", "swatch")
    by_group = parse(render(FRAUD, "svg", groups=STAGES))
    assert [box.get("class") for box in with_class(by_group, "rect", "box")] == (
        ["box blue"] * 4 + ["box orange"] * 2 + ["box grey"] * 2
    )
    legend = [text.text for text in with_class(by_group, "text", "small") if text.text in ("stage 0", "stage 1")]
    assert legend == ["stage 0", "stage 1"]


def test_groups_that_share_a_colour_have_distinct_labels():
    names = [f"m{i}" for i in range(9)]
    graph = Graph("g", tuple(op(name, Source()) for name in names))
    root = parse(render(graph, "svg", groups={name: f"part {name}" for name in names}))
    assert sum(text.text == "source · part m8" for text in with_class(root, "text", "small")) == 1


INNER: list[Spec] = [Map(Form.ROWS), KeyBy(("card",)), Transform()]


@st.composite
def graphs(draw: st.DrawFn, names: st.SearchStrategy[str] | None = None) -> Graph:
    """Any acyclic graph: sources are what has no inputs, sinks what has no consumers."""
    count = draw(st.integers(1, 14))
    chosen = (
        [f"op{i}" for i in range(count)]
        if names is None
        else draw(st.lists(names, min_size=count, max_size=count, unique_by=printable))
    )
    inputs = [draw(st.lists(st.integers(0, i - 1), unique=True, max_size=3)) if i else [] for i in range(count)]
    consumed = {tail for tails in inputs for tail in tails}
    operators = []
    for i, tails in enumerate(inputs):
        inner = draw(st.sampled_from(INNER))
        spec: Spec = Source() if not tails else inner if i in consumed else Sink()
        operators.append(op(chosen[i], spec, *(chosen[tail] for tail in tails)))
    return Graph("random", tuple(operators))


def edges_of(text: str) -> set[tuple[str, str]]:
    """Read a drawing back: follow each lane from the operator it leaves to the one it reaches."""
    lanes: dict[int, set[str]] = {}
    edges = set()
    for line in text.splitlines():
        marks = {i: c for i, c in enumerate(re.split(r"\s\s+op", line)[0]) if i % 2 == 0}
        mark = next((i for i, c in marks.items() if c in "▶●■"), None)
        if mark is not None:
            name = re.findall(r"op\d+", line)[0]
            if marks[mark] != "▶":
                edges |= {(tail, name) for tail in lanes[mark]}
            lanes[mark] = set() if marks[mark] == "■" else {name}
        elif "├" in line:
            here = line.index("├")
            for i, c in marks.items():
                if c in "┬╮":
                    lanes[i] = set(lanes[here])
                elif c in "┴╯":
                    lanes[here] |= lanes.pop(i)
    return edges


@given(graphs())
def test_a_text_drawing_shows_exactly_which_operator_feeds_which(graph):
    assert edges_of(render(graph, title="")) == {(port.operator, name) for port, name in graph.edges}


@given(graphs(names=st.text(min_size=1, max_size=20)))
def test_svg_is_well_formed_with_every_name_once_and_no_overlapping_boxes(graph):
    root = parse(render(graph, "svg"))
    assert [text.text for text in with_class(root, "text", "name")] == [printable(operator.name) for operator in graph]
    boxes = [
        tuple(float(box.get(key, "")) for key in ("x", "y", "width", "height"))
        for box in with_class(root, "rect", "box")
    ]
    assert len(boxes) == len(graph.operators)
    for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes, 2):
        assert ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay
    assert min(x for x, _, _, _ in boxes) >= 0 <= min(y for _, y, _, _ in boxes)


@given(graphs())
def test_arrows_go_from_left_to_right_and_never_through_a_box(graph):
    number = {operator.name: i for i, operator in enumerate(graph)}
    links = [Link(number[port.operator], number[name]) for port, name in graph.edges]
    layout = arrange([80.0] * len(number), links)
    for link, route in zip(links, layout.routes, strict=True):
        tail, head = layout.boxes[link.tail], layout.boxes[link.head]
        assert list(route[0]) == pytest.approx([tail.x + tail.width, tail.y + tail.height / 2])
        assert list(route[-1]) == pytest.approx([head.x, head.y + head.height / 2])
        assert [x for x, _ in route] == sorted(x for x, _ in route)
        for (x, y), (to_x, to_y) in zip(route[1::2], route[2::2], strict=False):
            assert y == to_y
            crossed = [box for box in layout.boxes if box.x < to_x and x < box.x + box.width]
            assert not any(box.y < y < box.y + box.height for box in crossed)
