"""How often the table of a lookup is read again while a job runs, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midstream.data.durations import duration
from midstream.errors import FlowError, FunctionError

__all__ = ["TableRefresh", "read_table"]


@dataclass(frozen=True)
class TableRefresh:
    """A function that reads a lookup's table, and how often it is called.

    >>> TableRefresh.of(lambda: None, "1 hour", None, "lookup 'rates'").every_s
    3600.0
    """

    read: Callable[[], Any]
    every_s: float
    version: Callable[[], Any] | None = None
    """Returns something that changes with the table and is cheaper than reading it."""

    @classmethod
    def of(cls, read: Any, every: Any, version: Any, what: str) -> TableRefresh:
        """Check what a user gave; ``what`` names the lookup in errors."""
        every_s = duration(every, f"{what}: refresh") / 1e6
        for name, function in (("table", read), ("version", version)):
            if function is None and name == "version":
                continue
            if not callable(function) or inspect.isclass(function) or not _takes_nothing(function):
                raise FunctionError(
                    f"{what}: with refresh=, {name} must be a function without parameters, found "
                    f"{type(function).__name__} {function!r:.60}"
                )
        return cls(read, every_s, version)


def read_table(read: Callable[[], Any], what: str) -> Any:
    """Call the function for the first time, while the flow is built."""
    try:
        return read()
    except Exception as error:
        raise FlowError(f"{what}: the table cannot be read: {type(error).__name__}: {error}") from error


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # builtins without a signature: nothing to check against
        return True
    return True
