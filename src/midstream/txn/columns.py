"""Evaluates the nodes of a trace for many events at once, with numpy: keys before a batch runs, and strata of Python
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.flow.transactions.expressions import ExpressionNode, TransactionType

__all__ = ["evaluate"]

Array = npt.NDArray[Any]
Leaf = Callable[[ExpressionNode], Array]


def evaluate(kind: TransactionType, index: int, known: dict[int, Array], leaf: Leaf) -> Array:
    """The values of a node; ``leaf`` returns those of columns, constants, accesses and calls. Fills ``known``."""
    if index not in known:
        node = kind.nodes[index]
        if node.op in _OPERATIONS:
            args = [evaluate(kind, arg, known, leaf) for arg in node.args]
            with np.errstate(all="ignore"):  # division by zero and overflow have defined results here
                known[index] = _OPERATIONS[node.op](*args)
        else:
            known[index] = leaf(node)
    return known[index]


def _where(test: Array, a: Array, b: Array) -> Array:
    return np.where(test, a, b)


def _floordiv(a: Array, b: Array) -> Array:
    zero = b == 0
    return np.where(zero, 0, np.floor_divide(a, np.where(zero, 1, b)))


def _mod(a: Array, b: Array) -> Array:
    zero = (b == 0) | (b == -1)
    return np.where(zero, 0, np.mod(a, np.where(zero, 1, b)))


def _floor(a: Array) -> Array:
    inside = (a >= -(2.0**63)) & (a < 2.0**63)
    ends = np.where(a >= 2.0**63, 2**63 - 1, np.where(a < -(2.0**63), -(2**63), 0))
    return np.where(inside, np.floor(np.where(inside, a, 0.0)).astype(np.int64), ends)


_OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": np.negative,
    "abs": np.abs,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "where": _where,
    "min": lambda a, b: _where(b < a, b, a),
    "max": lambda a, b: _where(b > a, b, a),
    "floor": _floor,
    "to_double": lambda a: a.astype(np.float64),
    "key": lambda a: a,
}
