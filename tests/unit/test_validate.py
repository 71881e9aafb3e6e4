"""Rules for graphs that were put together by hand, where the builder could not watch."""

from __future__ import annotations

import pyarrow as pa
import pytest

from midstream.errors import FlowError
from midstream.flow.model import Graph, Operator, Port, Sink, Source, Union
from midstream.flow.spec import Form
from midstream.flow.validate import MAX_NAME, check_name, validate
from midstream.operators.map import Map
from midstream.operators.route import Route

ROWS = pa.schema([("n", pa.int64())])
MAP = Map(Form.ROWS)


def op(name: str, spec, *inputs: str) -> Operator:
    return Operator(name, spec, tuple(Port(*each.split("/")) for each in inputs), ROWS)


def graph(*operators: Operator, name: str = "g") -> Graph:
    return Graph(name, operators)


GOOD = (op("in", Source()), op("m", MAP, "in"), op("out", Sink(), "m"))


def test_a_sound_graph_comes_back_as_it_is():
    sound = graph(*GOOD)
    assert validate(sound) is sound


@pytest.mark.parametrize(
    ("operators", "says"),
    [
        (
            (*GOOD, op("m", Union(), "in", "in")),
            r"flow 'g': 2 operators are called 'm' \(map, union\); names identify state and changes and must be unique",
        ),
        (
            (op("in", Source()), op("out", Sink(), "inn")),
            r"operator 'out' reads 'inn', which no operator of flow 'g' emits; did you mean 'in'\?",
        ),
        (
            (op("in", Source()), op("r", Route(Form.ROWS, ("low", "high")), "in"), op("out", Sink(), "r")),
            r"operator 'out' reads 'r', which no operator of flow 'g' emits",
        ),
        (
            (op("in", Source()), op("r", Route(Form.ROWS, ("low", "high")), "in"), op("out", Sink(), "r/lwo")),
            r"reads 'r\[lwo\]', which .* did you mean 'r\[low\]'\?",
        ),
        ((op("m", MAP, "m"), op("out", Sink(), "m")), "flow 'g' has a cycle: m → m; a flow must be acyclic"),
        (
            (
                op("in", Source()),
                op("u", Union(), "in", "b"),
                op("a", MAP, "u"),
                op("b", MAP, "a"),
                op("o", Sink(), "b"),
            ),
            "flow 'g' has a cycle: u → a → b → u; a flow must be acyclic",
        ),
        (GOOD[::-1], "flow 'g': operators must be listed after the operators they read from"),
        ((), "flow 'g' has no source"),
        ((op("in", Source()),), "flow 'g' has no sink"),
        ((op("in", Source()), op("m", MAP, "in"), op("out", Sink(), "in")), r"nothing reads operator 'm' \(map\)"),
        ((*GOOD, op("9", MAP, "in")), "map: '9' cannot be a name"),
    ],
)
def test_each_rule_says_what_is_wrong(operators, says):
    with pytest.raises(FlowError, match=says):
        validate(graph(*operators))


def test_a_very_long_cycle_is_found_without_recursion():
    ring = [op(f"m{i}", MAP, f"m{(i - 1) % 5_000}") for i in range(5_000)]
    with pytest.raises(FlowError, match="has a cycle: "):
        validate(graph(op("in", Source()), *ring, op("out", Sink(), "m7")))


def test_two_ways_to_one_operator_are_no_cycle():
    diamond = (
        op("in", Source()),
        op("a", MAP, "in"),
        op("b", MAP, "in"),
        op("u", Union(), "a", "b"),
        op("o", Sink(), "u"),
    )
    assert validate(graph(*diamond)).consumers(Port("in")) == ("a", "b")


def test_the_flow_has_a_proper_name_too():
    with pytest.raises(FlowError, match="flow: '' cannot be a name"):
        validate(graph(*GOOD, name=""))


def test_names_may_be_long_but_not_endless():
    assert check_name("x" * MAX_NAME, "map") == "x" * MAX_NAME
    with pytest.raises(FlowError, match=f"at most {MAX_NAME} characters"):
        check_name("x" * (MAX_NAME + 1), "map")


@pytest.mark.parametrize("name", [None, 3, b"x", len, ["a"]])
def test_a_name_is_a_string(name):
    with pytest.raises(FlowError, match="map: the name comes first and must be a string, found " + type(name).__name__):
        check_name(name, "map")
