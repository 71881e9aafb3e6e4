"""What an expression is: frozen data with positions in its text, for errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

__all__ = ["Called", "Cased", "Cast", "Expression", "Literal", "Named"]


@dataclass(frozen=True)
class Literal:
    """A constant. ``kind`` is Arrow's type; of NULL it is Arrow's null."""

    value: Any
    kind: pa.DataType
    position: int = 0


@dataclass(frozen=True)
class Named:
    """A column, by name."""

    name: str
    position: int = 0


@dataclass(frozen=True)
class Called:
    """A function or an operator, by its name in lower case, of other expressions."""

    function: str
    arguments: tuple[Expression, ...]
    position: int = 0


@dataclass(frozen=True)
class Cast:
    """An expression in another type. ``lenient`` gives null, not an error, for a value that cannot be converted."""

    argument: Expression
    kind: pa.DataType
    lenient: bool = False
    position: int = 0


@dataclass(frozen=True)
class Cased:
    """The value behind the first condition that is true, else ``otherwise``."""

    cases: tuple[tuple[Expression, Expression], ...]
    otherwise: Expression
    position: int = 0


Expression = Literal | Named | Called | Cast | Cased
