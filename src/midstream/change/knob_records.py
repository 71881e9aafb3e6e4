"""Knobs through changes: their values after a change, what is recorded of them, what undoes that, what a restart sets.

A tuned value overrides the script's, as a changed function does, until the script has it too or the changes are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from midstream.checkpoint.change_records import ChangeRecord, Outcome, TuneRecord
from midstream.errors import FlowError
from midstream.flow.edits import Tune
from midstream.flow.knobs import KNOBS, in_words, require_takers
from midstream.flow.model import Graph

__all__ = [
    "after_tuning",
    "described_knobs",
    "knob_warnings",
    "recorded_knobs",
    "tune_record",
    "undone_knobs",
    "untuned",
]


def after_tuning(knobs: Mapping[str, int], tuned: Mapping[str, int | None]) -> dict[str, int]:
    """The knobs that do not have their defaults after a change.

    >>> after_tuning({"pace": 1000, "slice": 200}, {"pace": None, "frame": 4096})
    {'slice': 200, 'frame': 4096}
    """
    return {name: value for name, value in {**knobs, **tuned}.items() if value not in (None, KNOBS[name].default)}


def tune_record(before: Mapping[str, int], tuned: Mapping[str, int | None]) -> TuneRecord:
    """The record of the knobs that a change sets."""
    return TuneRecord(dict(tuned), {name: before.get(name) for name in tuned})


def described_knobs(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """A line for each knob that changes."""
    return [
        f"{name}: {in_words(name, before.get(name))} → {in_words(name, after.get(name))}"
        for name in KNOBS
        if before.get(name) != after.get(name)
    ]


def recorded_knobs(records: Iterable[ChangeRecord]) -> dict[str, int | None]:
    """The newest value of each knob that changes have set since the script alone was last in force."""
    found: dict[str, int | None] = {}
    for record in records:
        if record.outcome is Outcome.APPLIED:
            found = {} if record.drops else {**found, **record.tuned}
    return {name: value for name, value in found.items() if name in KNOBS}


def undone_knobs(since: Iterable[ChangeRecord]) -> dict[str, int | None]:
    """The values that knobs had before these changes, oldest first, for those that they set."""
    found: dict[str, int | None] = {}
    for record in since:
        for edit in record.edits:
            if isinstance(edit, TuneRecord):
                found = {**edit.before, **found}
    return found


def untuned(since: Iterable[ChangeRecord]) -> tuple[Tune, ...]:
    """The edit that undoes the tuning of these changes, if there was any."""
    knobs = undone_knobs(since)
    return (Tune(**knobs),) if knobs else ()


def knob_warnings(
    script: Mapping[str, int], recorded: Mapping[str, int | None], graph: Graph
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The knobs of a restart, and one sentence for each that does not have the script's value."""
    found, told = dict(script), []
    for name, value in recorded.items():
        tuned = after_tuning({}, {name: value}).get(name)
        if tuned == script.get(name):
            continue
        try:
            require_takers(graph, {name: tuned})
        except FlowError as error:
            told.append(f"the value to which a change tuned {name} is ignored: {error}")
            continue
        found = after_tuning(found, {name: tuned})
        told.append(
            f"knob {name} is {in_words(name, tuned)}, to which it was tuned while the job ran, not "
            f"{in_words(name, script.get(name))} as the script says: put that into flow.start(knobs=…), or start with "
            f"changes='drop' to go by the script"
        )
    return found, tuple(told)
