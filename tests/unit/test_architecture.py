"""The walks through the code in docs/architecture.md: they are what a run does, and they cross few rooms."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from midstream import FileSink, Flow, ListSource, Update, agg
from midstream.testing import ChangeAt, run_local

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
def test_a_walk_crosses_few_rooms_and_names_existing_functions(heading, most):
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


# ── what a run really does ────────────────────────────────────────────────────────────────────────────────────────

Call = tuple[str, str]

EPOCHS = [[{"k": "a", "n": n, "epoch": epoch} for n in range(200)] for epoch in range(3)]


def on_both_runtimes(heading: str) -> list[Call]:
    """The calls of a walk, without those that belong to Spark."""
    walk = [(room, call) for room, calls in walk_under(heading) for call in calls]
    return [(room, call) for room, call in walk if not call.startswith("spark.") and call != "builder.Flow.start"]


def code_of(call: Call) -> CodeType:
    function = inspect.unwrap(resolved(*call))
    code = getattr(function, "__func__", function).__code__
    assert isinstance(code, CodeType)
    return code


def calls_made(run: Callable[[], object], known: list[Call]) -> list[Call]:
    """Those of the known calls that a run makes, in order. Continuing a generator is no call."""
    by_code = {code_of(call): call for call in known}
    made: list[Call] = []
    generators: set[FrameType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in by_code and frame not in generators:
            made.append(by_code[frame.f_code])
            if frame.f_code.co_flags & inspect.CO_GENERATOR:
                generators.add(frame)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return made


def first_stray(walk: list[Call], made: list[Call]) -> Call | None:
    """The first call of a walk that is not made after those before it."""
    rest = iter(made)
    return next((call for call in walk if call not in rest), None)


def totals(folder: Path, epochs: int) -> Flow:
    flow = Flow("totals")
    rows = flow.source("in", ListSource(EPOCHS[:epochs], "k string, n bigint, epoch int")).map("m", lambda row: row)
    rows.key_by("by k", "k").aggregate("total", n=agg.count()).sink("out", FileSink(folder / "out"))
    return flow


def fail_late(row: dict[str, Any]) -> dict[str, Any]:
    if row["epoch"] == 2 and row["n"] > 150:
        raise ValueError("not this row")
    return row


def test_a_row_takes_the_walk_that_is_described(tmp_path: Path):
    walk = on_both_runtimes("One row")
    flow = totals(tmp_path, epochs=1)
    made = calls_made(lambda: run_local(flow, partitions=1, checkpoint=str(tmp_path / "c")), walk)
    assert first_stray(walk, made) is None
    published = walk.index(("checkpoint", "sink_files.SinkFolders.publish"))
    too_late = [*walk, walk[published - 2]]
    assert first_stray(too_late, made) == ("checkpoint", "location.Checkpoint.commit"), "a wrong order is noticed"


def test_a_change_takes_the_walk_that_is_described(tmp_path: Path):
    walk = on_both_runtimes("One change")
    for seed in range(100):  # until a task is told while it runs, and switches
        folder = tmp_path / str(seed)
        flow = totals(folder, epochs=3)
        change = ChangeAt.of(2, Update("m", fail_late), preflight=True)

        def run(flow: Flow = flow, seed: int = seed, folder: Path = folder, change: ChangeAt = change) -> object:
            return run_local(flow, partitions=1, seed=seed, checkpoint=str(folder / "c"), changes=[change])

        made = calls_made(run, walk)
        if ("runtime", "task.TaskRun.switch") in made and ("runtime", "switch_lock.SwitchLock.tell") in made:
            break
    assert first_stray(walk, made) is None
