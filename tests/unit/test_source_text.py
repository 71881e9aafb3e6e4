"""The text of functions for the history, against what ``inspect`` finds by reading tokens."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.change import prepare, trial
from midstream.flow import functions
from midstream.flow.source_text import source_text
from midstream.storage import blobs

MODULES = (prepare, trial, functions, blobs)


def functions_of(module: Any) -> list[Callable[..., Any]]:
    """All functions and methods that are written in a module."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    members = [member for each in own if inspect.isclass(each) for member in vars(each).values()]
    found = [each for each in (*own, *members) if inspect.isfunction(each)]
    return [each for each in found if inspect.unwrap(each).__code__.co_filename == module.__file__]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_it_is_what_inspect_finds(module: Any) -> None:
    found = functions_of(module)
    assert len(found) > 5
    for each in found:
        assert source_text(each) == inspect.getsource(each), each.__qualname__


class Scores:
    """An object that is called."""

    def __call__(self, row: Any) -> Any:
        """Score."""
        return [each for each in row if each]

    def scored(self, row: Any) -> Any:
        return row


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any) -> Any:
        return function(*given)

    return call


@logged
def decorated(row: Any) -> Any:
    return row


@pytest.mark.parametrize(
    ("function", "first", "last"),
    [
        (Scores(), "    def __call__(self, row: Any) -> Any:", "        return [each for each in row if each]"),
        (Scores().scored, "    def scored(self, row: Any) -> Any:", "        return row"),
        (decorated, "@logged", "    return row"),
    ],
)
def test_it_ends_with_the_last_line_of_the_body(function: Any, first: str, last: str) -> None:
    lines = source_text(function).splitlines()
    assert (lines[0], lines[-1]) == (first, last)


@pytest.mark.parametrize("function", [len, functools.partial(decorated, 1), Scores, 3, eval("lambda row: row")])
def test_without_lines_it_is_empty(function: Any) -> None:
    assert source_text(function) == ""


def test_a_cell_of_a_notebook_is_found_where_the_notebook_keeps_it() -> None:
    cell, name = "def f(row):\n    return row\n\nx = 1\n", "<ipython-input-1>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    try:
        made: dict[str, Any] = {}
        exec(compile(cell, name, "exec"), made)
        assert source_text(made["f"]) == "def f(row):\n    return row\n"
    finally:
        del linecache.cache[name]


def test_a_file_that_was_edited_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    made: dict[str, Any] = {}
    for value in ("1", "23"):
        file.write_text(f"def f(row):\n    return {value}\n")
        exec(compile(file.read_text(), str(file), "exec"), made)
        assert source_text(made["f"]) == file.read_text()
