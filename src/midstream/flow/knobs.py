"""Knobs: the numbers by which a running job trades latency against throughput and memory. Their values never decide
which rows leave a job, only when and in what portions.

A job has a value of each: what was tuned last, else what the script says (``flow.start(knobs=…)``), else the default.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.data.ddl import closest
from midstream.data.durations import ALLOWED, microseconds
from midstream.data.sizes import size_in_bytes, size_in_words
from midstream.errors import FlowError
from midstream.flow.model import Graph, Source
from midstream.flow.sources import GeneratorSource

__all__ = ["KNOBS", "Knob", "Unit", "in_words", "knob_value", "knobs_of_tasks", "require_takers", "values_of"]


class Unit(enum.StrEnum):
    """The unit of a knob's number."""

    TIME = "microseconds"
    BYTES = "bytes"
    ROWS = "rows"


@dataclass(frozen=True)
class Knob:
    """One knob. ``default`` is None where no knob means no limit."""

    name: str
    unit: Unit
    default: int | None
    least: int
    most: int
    does: str

    def parsed(self, given: object) -> int:
        """The number that a user means. Raises :class:`FlowError` if it is not one, or out of range.

        >>> KNOBS["pace"].parsed("500 ms"), KNOBS["frame"].parsed("1 MiB"), KNOBS["key_sample"].parsed(0)
        (500000, 1048576, 0)
        """
        found = self._number(given)
        if found is None:
            raise FlowError(f"knob {self.name}={given!r:.40} cannot be read; give {self._allowed}")
        if not self.least <= found <= self.most:
            raise FlowError(f"knob {self.name}={given!r:.40} is out of range; give {self._allowed}")
        return found

    def _number(self, given: object) -> int | None:
        if type(given) is int:
            return given
        text = given.strip() if isinstance(given, str) else ""
        if text.isascii() and text.isdigit():
            return int(text)
        match self.unit:
            case Unit.TIME:
                return microseconds(text)
            case Unit.BYTES:
                return size_in_bytes(text)
            case Unit.ROWS:
                return None

    @property
    def _allowed(self) -> str:
        ends = f"from {self.in_words(self.least)} to {self.in_words(self.most)}"
        match self.unit:
            case Unit.TIME:
                return f"a length of time {ends}, such as {ALLOWED}, or a number of microseconds"
            case Unit.BYTES:
                return f"a size {ends}, such as '16 MB' or '1 MiB', or a number of bytes"
            case Unit.ROWS:
                return f"a number of rows {ends}"

    def in_words(self, value: int | None) -> str:
        """A value for people.

        >>> KNOBS["pace"].in_words(1_500_000), KNOBS["rows_per_epoch"].in_words(None)
        ('1500 ms', 'no limit')
        """
        if value is None:
            return "no limit"
        match self.unit:
            case Unit.TIME:
                return f"{value / 1000:g} ms" if value < 10_000_000 else f"{value / 1e6:g} s"
            case Unit.BYTES:
                return size_in_words(value)
            case Unit.ROWS:
                return f"{value} rows"


KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            "pace",
            Unit.TIME,
            default=0,
            least=0,
            most=3_600_000_000,
            does="least time from the beginning of one epoch to the beginning of the next",
        ),
        Knob(
            "rows_per_epoch",
            Unit.ROWS,
            default=None,
            least=1,
            most=1 << 40,
            does="most rows that an epoch takes from each GeneratorSource",
        ),
        Knob(
            "slice",
            Unit.TIME,
            default=5_000,
            least=100,
            most=1_000_000,
            does="how long a slice should take; a change waits for the slices in progress",
        ),
        Knob(
            "frame",
            Unit.BYTES,
            default=1 << 20,
            least=1 << 12,
            most=1 << 26,
            does="bytes of rows in a frame, the unit in which rows go through an exchange",
        ),
        Knob(
            "held_output",
            Unit.BYTES,
            default=64 << 20,
            least=1 << 16,
            most=1 << 32,
            does="most bytes of rows that a task holds until its frames are full",
        ),
        Knob(
            "batch",
            Unit.BYTES,
            default=64 << 20,
            least=1 << 16,
            most=1 << 30,
            does="bytes of rows that Spark hands to Python at a time",
        ),
        Knob(
            "key_sample",
            Unit.ROWS,
            default=32,
            least=0,
            most=4096,
            does="most rows of a slice that are looked at to find heavy keys; 0 for none",
        ),
    )
}
"""All knobs by name."""


def values_of(given: Mapping[str, Any]) -> dict[str, int | None]:
    """The knobs that a user sets, as numbers; None stands for the default. Raises :class:`FlowError`.

    >>> values_of({"pace": "1 second", "slice": None})
    {'pace': 1000000, 'slice': None}
    >>> values_of({"paec": 1})
    Traceback (most recent call last):
    ...
    midstream.errors.FlowError: there is no knob 'paec'; did you mean 'pace'? Knobs: pace, rows_per_epoch, slice...
    """
    found: dict[str, int | None] = {}
    for name, value in given.items():
        knob = KNOBS.get(name)
        if knob is None:
            near = closest(str(name), list(KNOBS))
            hint = f"; did you mean {near!r}?" if near else "."
            raise FlowError(f"there is no knob {name!r}{hint} Knobs: {', '.join(KNOBS)}")
        found[name] = None if value is None else knob.parsed(value)
    return found


def knob_value(knobs: Mapping[str, int], name: str) -> int:
    """The value of a knob that always has one, given those that do not have their defaults.

    >>> knob_value({}, "slice"), knob_value({"slice": 1000}, "slice")
    (5000, 1000)
    """
    value = knobs.get(name, KNOBS[name].default)
    assert value is not None, f"{name} may have no limit"
    return value


def in_words(name: str, value: int | None) -> str:
    """A value of a knob for people; None is its default. Histories may name knobs that no longer exist."""
    knob = KNOBS.get(name)
    if knob is None:
        return str(value)
    return knob.in_words(knob.default if value is None else value)


def knobs_of_tasks(knobs: Mapping[str, int]) -> dict[str, int]:
    """The knobs that tasks need; the others concern only the driver."""
    return {name: value for name, value in knobs.items() if name in _TOLD}


_TOLD = ("slice", "frame", "held_output", "key_sample")


def require_takers(graph: Graph, names: Mapping[str, int | None]) -> None:
    """Refuse a limit of rows for sources that cannot be given one while they are read."""
    if names.get("rows_per_epoch") is None:
        return
    others = [op.name for op in graph.of(Source) if not isinstance(graph.payloads.get(op.name), GeneratorSource)]
    if others:
        raise FlowError(
            f"knob rows_per_epoch is for a GeneratorSource, and {', '.join(map(repr, others))} is none: a "
            f"ListSource says its epochs itself, and Spark fixes the limits of its sources (maxOffsetsPerTrigger, "
            f"maxFilesPerTrigger) when a query starts. Tune pace instead, or set Spark's option in the script"
        )
