"""``OPERATOR MODULE:FUNCTION`` on the command line: new functions for operators."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import cloudpickle

from midstream.cli.target import TargetError, calling_user_code, find, needs_session, to_flow
from midstream.flow.edits import Update
from midstream.flow.model import Graph
from midstream.runtime.spark.session import local_session

__all__ = ["Functions", "named_functions", "script_of", "updates_of"]

_HOW = "Write MODULE:FUNCTION, e.g. models.new:score or models/new.py:score; MODULE:make() calls make first."


class Functions:
    """Loads functions; each module is loaded once, however many of its functions are used."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}

    def load(self, text: str) -> Any:
        """A function, a callable object or a table; or, with ``()`` after the name, the result of calling it."""
        name = text.removesuffix("()")
        target = find(name, "a function", _HOW)
        place = name.rpartition(":")[0]
        if place not in self._modules:
            self._modules[place] = target.import_module()
            # Installed modules, too: the job may have loaded an older version.
            cloudpickle.register_pickle_by_value(self._modules[place])
        module = self._modules[place]
        try:
            found = getattr(module, target.attribute)
        except AttributeError:
            raise TargetError(_no_attribute(place, target.attribute, module)) from None
        if text == name:
            return found
        if not callable(found):
            raise TargetError(f"{name} is a {type(found).__name__} and cannot be called; leave out the ().")
        return calling_user_code(found)


@contextmanager
def script_of(text: str) -> Iterator[Graph]:
    """The flow of ``MODULE:FLOW``, whose functions travel to the job by value.

    A function that takes the SparkSession gets one of its own, with which it only describes its sources.
    """
    target = find(text)
    found = target.load()
    cloudpickle.register_pickle_by_value(sys.modules[target.module])
    if not needs_session(found):
        yield to_flow(found, target).graph
        return
    spark = local_session("local[1]")
    try:
        yield to_flow(found, target, spark).graph
    finally:
        spark.stop()


def updates_of(pairs: Sequence[str], migrate: Sequence[str], returns: Sequence[str]) -> tuple[Update, ...]:
    """The updates of a command line: pairs of operator and function, and options by operator."""
    if len(pairs) % 2:
        raise TargetError(f"{pairs[-1]!r} has no partner: write operators and functions in pairs. {_HOW}")
    functions = Functions()
    operators = pairs[::2]
    steps = named_functions(migrate, functions)
    columns = dict(_named(text, "--returns", "OPERATOR=DDL") for text in returns)
    for option, names in (("--migrate", steps), ("--returns", columns)):
        if strangers := sorted(set(names) - set(operators)):
            raise TargetError(
                f"{option} names {', '.join(strangers)}; the operators of this change are {', '.join(operators)}."
            )
    return tuple(
        Update(operator, functions.load(text), migrate=steps.get(operator), returns=columns.get(operator))
        for operator, text in zip(operators, pairs[1::2], strict=True)
    )


def named_functions(texts: Sequence[str], functions: Functions | None = None) -> Mapping[str, Any]:
    """The functions of ``--migrate``, by operator."""
    loader = functions or Functions()
    named = [_named(text, "--migrate", "OPERATOR=MODULE:FUNCTION") for text in texts]
    return {operator: loader.load(text) for operator, text in named}


def _named(text: str, option: str, form: str) -> tuple[str, str]:
    operator, equals, value = text.partition("=")
    if not operator or not equals or not value:
        raise TargetError(f"{option} {text!r} is not {form}.")
    return operator, value


def _no_attribute(place: str, attribute: str, module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    close = get_close_matches(attribute, names, n=1)
    own = [name for name in names if getattr(vars(module)[name], "__module__", None) == module.__name__]
    hint = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(own)}." if own else "It has no functions."
    return f"{place} has no {attribute!r}. {hint}"
