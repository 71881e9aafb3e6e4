"""Digests of compiled functions: equal digests mean equal machine code.

numba compiles more than the function's own code: also the constants around it and the functions that it calls. If the
value of any such part cannot be determined, there is no digest, and the function is compiled anew.
"""

from __future__ import annotations

import hashlib
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np

__all__ = ["digest_of"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))


class _Unknown(Exception):
    """A part of a function has a value that cannot be determined."""


def digest_of(function: Any) -> str | None:
    """The digest of a function that numba has compiled or will compile; None if it cannot be determined.

    >>> def double(x): return 2 * x
    >>> def triple(x): return 3 * x
    >>> digest_of(double) == digest_of(double), digest_of(double) == digest_of(triple), digest_of(print)
    (True, False, None)
    """
    try:
        parts = [f"numba {numba.__version__}, numpy {np.__version__}"]
        _describe(function, parts, set())
    except _Unknown:
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _describe(function: Any, parts: list[str], seen: set[int]) -> None:
    parts.append(f"options {sorted(getattr(function, 'targetoptions', {}).items())!r}")
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType):
        raise _Unknown
    if id(function) in seen:  # recursive, or called twice
        parts.append(f"again {function.__qualname__}")
        return
    seen.add(id(function))
    _code(function.__code__, parts)
    for cell in function.__closure__ or ():
        _value(cell.cell_contents, parts, seen)
    for value in function.__defaults__ or ():
        _value(value, parts, seen)
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            parts.append(name)
            _value(function.__globals__[name], parts, seen)


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes that the code refers to, including nested functions."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _code(code: CodeType, parts: list[str]) -> None:
    parts.append(f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _code(constant, parts)
        else:
            parts.append(repr(constant))


def _value(value: Any, parts: list[str], seen: set[int]) -> None:
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)):
        parts.append(repr(value))
    elif isinstance(value, np.generic):
        parts.append(f"{value.dtype} {value!r}")
    elif isinstance(value, ModuleType) and value.__name__.partition(".")[0] in ("math", "numpy", "numba"):
        parts.append(f"{value.__name__} {getattr(value, '__version__', '')}")
    elif isinstance(value, BuiltinFunctionType | np.ufunc | type) and getattr(value, "__module__", "numpy") in (
        "builtins",
        "math",
        "numpy",
        None,
    ):
        parts.append(repr(value))
    elif isinstance(value, FunctionType) or isinstance(getattr(value, "py_func", None), FunctionType):
        _describe(value, parts, seen)
    else:
        raise _Unknown
