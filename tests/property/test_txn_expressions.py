"""Expressions mean the same event by event, by columns, in generated Python and compiled, at the edges of 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.txn import Batch, Engine, MemoryTables, Program, Table, transaction
from midstream.txn.serial import SerialTables, run_serially
from midstream.txn.strategies import SERIAL, Strategy
from tests.examples import examples

# Kernels are compiled when they are first used, which takes a minute on a new machine.
pytestmark = pytest.mark.long

wholes = Table("wholes", key="bigint", value="bigint", default=0)
SCHEMA = {"i": "bigint", "j": "bigint", "x": "double", "y": "double", "p": "boolean"}

INTS = st.sampled_from([0, 1, -1, 2, -2, 7, -7, 2**62, -(2**62), 2**63 - 1, -(2**63), 3037000500])
FLOATS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.5, 2.5, 1e300, -1e300, 9.3e18, -9.3e18, math.inf, -math.inf, math.nan, 1e-320]
)

Build = Callable[[Any, Any], Any]
NUMERIC = ("add", "sub", "mul", "min", "max", "neg", "abs", "where")


def _whole(children: st.SearchStrategy[Build]) -> st.SearchStrategy[Build]:
    return st.tuples(st.sampled_from([*NUMERIC, "floordiv", "mod"]), children, children).map(
        lambda found: _node(*found)
    )


def _double(children: st.SearchStrategy[Build]) -> st.SearchStrategy[Build]:
    return st.tuples(st.sampled_from([*NUMERIC, "div"]), children, children).map(lambda found: _node(*found))


def _node(op: str, left: Build, right: Build) -> Build:
    def build(t: Any, e: Any) -> Any:
        a, b = left(t, e), right(t, e)
        match op:
            case "add":
                return a + b
            case "sub":
                return a - b
            case "mul":
                return a * b
            case "div":
                return a / b
            case "floordiv":
                return a // b
            case "mod":
                return a % b
            case "neg":
                return -a
            case "abs":
                return abs(a)
            case "min":
                return t.min(a, b)
            case "max":
                return t.max(a, b)
        return t.where((a < b) | ((a >= 3) & ~e.p), b, a)

    return build


int_leaves: st.SearchStrategy[Build] = st.sampled_from([lambda t, e: e.i, lambda t, e: e.j, lambda t, e: e.i * 0 + 5])
wide = st.recursive(int_leaves, _whole, max_leaves=6)
float_leaves: st.SearchStrategy[Build] = st.one_of(
    st.sampled_from([lambda t, e: e.x, lambda t, e: e.y, lambda t, e: e.x * 0.0 + 0.5]),
    wide.map(lambda build: lambda t, e: build(t, e) + 0.0),
)
rows_of_values = st.lists(st.tuples(INTS, INTS, FLOATS, FLOATS, st.booleans()), min_size=1, max_size=5)


def same(left: Any, right: Any) -> bool:
    return bool(left == right or (left != left and right != right))


def check(body: Callable[[Any, Any], Any], rows: list[tuple[Any, ...]], strategies: tuple[Strategy, ...]) -> None:
    program = Program.of(transaction(body).trace(SCHEMA))
    i, j, x, y, p = ([row[place] for row in rows] for place in range(5))
    columns = {
        "ts": np.arange(len(rows)),
        "i": np.array(i, np.int64),
        "j": np.array(j, np.int64),
        "x": np.array(x, np.float64),
        "y": np.array(y, np.float64),
        "p": np.array(p, np.bool_),
    }
    names = ("i", "j", "x", "y", "p")
    events = [(time, 0, dict(zip(names, row, strict=True))) for time, row in enumerate(rows)]
    expected = run_serially(program.types, events, SerialTables())
    for strategy in strategies:
        result = Engine(program, threads=1).execute(Batch.of(columns, order_by="ts"), MemoryTables(), strategy)
        for row, outcome in enumerate(expected):
            for name, value in outcome.returned.items():
                assert same(result.returned[name][row], value), (str(strategy), name, rows[row])


@examples(100)
@given(wide, st.recursive(float_leaves, _double, max_leaves=6), rows_of_values)
def test_any_expression_means_the_same_to_all_evaluators(whole, double, rows):
    def body(t: Any, e: Any) -> dict[str, Any]:
        t.write(wholes, e.i, t.call(int, e.i, returns="bigint"))  # a Python function, so that nothing is compiled
        result = double(t, e)
        return {"whole": whole(t, e), "double": result, "floor": t.floor(result), "truth": result != e.x}

    check(body, rows, (SERIAL, Strategy("strata")))


EDGES: list[tuple[Any, ...]] = [
    (i, j, x, y, p)
    for (i, j) in [(-(2**63), -1), (2**63 - 1, 1), (7, 0), (-7, 2), (7, -2), (-(2**63), 0), (3037000500, 3037000500)]
    for (x, y) in [(0.0, -0.0), (math.nan, 1.0), (1.0, math.nan), (9.3e18, 0.0), (-9.3e18, -1.5), (math.inf, -math.inf)]
    for p in (False, True)
]


def test_every_compiled_operation_is_correct_at_the_edges_of_64_bits():
    def body(t: Any, e: Any) -> dict[str, Any]:
        t.write(wholes, e.i, e.j)
        return {
            "sum": e.i + e.j,
            "difference": e.i - e.j,
            "product": e.i * e.j,
            "quotient": e.i / e.j,
            "floordiv": e.i // e.j,
            "mod": e.i % e.j,
            "negative": -e.i,
            "absolute": abs(e.i),
            "least": t.min(e.x, e.y, 1.0),
            "most": t.max(e.x, e.y),
            "ratio": e.x / e.y,
            "floor": t.floor(e.x),
            "mixed": e.i + e.x,
            "chosen": t.where(e.p & (e.x < e.y) | (e.i == e.j), e.x, e.y),
            "order": (e.x <= e.y) != (e.i >= e.j),
            "not": ~e.p,
            "constant": e.i + (-(2**63)),
            "infinite": e.x * math.inf + math.nan * 0.0,
        }

    check(body, EDGES, (SERIAL,))
