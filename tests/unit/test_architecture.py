"""The walks through the code in docs/architecture.md: every step exists, and they cross few rooms."""

from __future__ import annotations

import importlib
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk_under(heading: str) -> list[tuple[str, list[str]]]:
    """The lines of a walk: a room, and the calls in it."""
    [section] = re.findall(rf"^### {heading}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [(room.strip(" `"), re.findall(r"`([\w.]+)`", calls)) for room, calls in rows]


def resolved(room: str, call: str) -> Any:
    """The function that a dotted name stands for; AttributeError or ImportError if there is none."""
    parts = call.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(f"midstream.{room}.{'.'.join(parts[:length])}")
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"midstream.{room} has no {call}")


@pytest.mark.parametrize(("heading", "most"), [("One row", 40), ("One change", 28)])
def test_a_walk_crosses_few_rooms_and_names_what_exists(heading, most):
    walk = walk_under(heading)
    assert len(walk) > 15
    for room, calls in walk:
        assert calls, room
        assert all(callable(resolved(room, call)) for call in calls)
    crossings = sum(1 for _ in groupby(walk, key=lambda line: line[0])) - 1
    assert crossings == len(walk) - 1, "two lines of one room stand together"
    assert crossings <= most


def test_a_step_that_does_not_exist_is_noticed():
    with pytest.raises(AttributeError):
        resolved("runtime", "driver.Driver.no_such_step")
    with pytest.raises(ImportError):
        resolved("runtime", "no_such_module.f")
