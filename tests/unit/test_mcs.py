"""The minimal covering sub-DAG and its components, on the paper's Figures 5 to 7."""

from __future__ import annotations

import pyarrow as pa
import pytest

from midstream.flow.model import Graph, Operator, Port, Source, Union
from midstream.flow.spec import Form
from midstream.operators.map import Map
from midstream.planner.mcs import Component, components_of, covering

ROWS = pa.schema([])


def flow(**inputs: str) -> Graph:
    """Operators with one-letter names, each with the letters of its inputs."""
    operators = [
        Operator(
            name,
            Source() if not read else Map(Form.ROWS) if len(read) == 1 else Union(),
            tuple(map(Port, read)),
            ROWS,
        )
        for name, read in inputs.items()
    ]
    return Graph("letters", tuple(operators))


FIGURE_5 = flow(A="", B="", C="A", G="B", D="C", E="C", F="DE", H="FG")


@pytest.mark.parametrize(
    ("chosen", "covered"),
    [
        ("C", "C"),
        ("CFG", "CDEFG"),
        ("AH", "ACDEFH"),
        ("BH", "BGH"),
        ("DE", "DE"),
        ("ABH", "ABCDEFGH"),
        ("DH", "DFH"),
    ],
)
def test_what_lies_between_chosen_operators_is_covered_and_nothing_else(chosen, covered):
    assert covering(FIGURE_5, set(chosen)) == set(covered)


def test_figure_7_has_two_components():
    assert components_of(FIGURE_5, covering(FIGURE_5, set("CFG")), set("CFG")) == (
        Component(
            operators=("C", "D", "E", "F"),
            edges=(("C", "D"), ("C", "E"), ("D", "F"), ("E", "F")),
            heads=("C",),
            updated=("C", "F"),
        ),
        Component(operators=("G",), edges=(), heads=("G",), updated=("G",)),
    )


def test_components_stand_in_the_order_of_their_first_operators():
    graph = flow(A="", B="", X="B", Y="A", P="X", Q="Y")
    found = components_of(graph, covering(graph, {"A", "Q", "X", "P"}), {"Q", "P"})
    assert [str(each) for each in found] == ["{A, Y, Q}", "{X, P}"]
    assert [each.updated for each in found] == [("Q",), ("P",)]


def test_operators_that_meet_only_below_are_one_component_with_two_heads():
    graph = flow(A="", B="", X="A", Y="B", U="XY")
    [component] = components_of(graph, covering(graph, {"X", "Y", "U"}), {"X", "Y", "U"})
    assert component.heads == ("X", "Y")
    assert component.edges == (("X", "U"), ("Y", "U"))


def test_two_edges_between_two_operators_are_one():
    graph = flow(A="", U="AA")
    assert components_of(graph, {"A", "U"}, {"U"}) == (Component(("A", "U"), (("A", "U"),), ("A",), ("U",)),)
