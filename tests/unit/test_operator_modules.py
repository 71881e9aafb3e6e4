"""An operator is defined in one module: no other module tests for its class, and an unknown operator works."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from midstream import Flow, KeyedStream, ListSource, MemorySink, Stream, Update
from midstream.checkpoint.inspection import StateReader
from midstream.data.schema import columns_of
from midstream.engine.keyed_rows import found_keys
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import ONLY, OperatorInTask
from midstream.errors import CheckpointError, FlowError
from midstream.flow import spec as spec_module
from midstream.flow.edits import revise
from midstream.flow.model import Operator
from midstream.flow.spec import SPECS, InputChange, Spec
from midstream.state.contents import in_namespace, keys_of
from midstream.state.key_arrays import decode_keys
from midstream.state.keys import Namespace
from midstream.state.task import TaskState
from midstream.testing import run_local
from tests.sources import nodes_of, sources

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"

KINDS = {
    "aggregate",
    "distinct",
    "drop",
    "filter",
    "flat_map",
    "join",
    "key_by",
    "lookup",
    "map",
    "process",
    "rename",
    "route",
    "select",
    "sink",
    "source",
    "transact",
    "transform",
    "union",
    "where",
    "with_columns",
}
STRUCTURE = {"Source", "KeyBy", "Union", "Transform", "Sink"}
"""Structural descriptions: where rows enter and leave the flow, are exchanged, and leave the stages."""

MOST_QUESTIONS = 6
"""The maximum number of places in midstream that test for each of these classes."""


# ── nobody asks for the class ─────────────────────────────────────────────────────────────────────────────────────


def classes_asked_for(source: str) -> Iterator[str]:
    """The classes that a module tests values for: by isinstance, by a case of a match, or by ``type(…) is``."""
    for node in nodes_of(source):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, asked]):
                yield from _names(asked)
            case ast.MatchClass(cls=asked):
                yield from _names(asked)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=[asked]):
                yield from _names(asked)


def _names(asked: ast.expr) -> Iterator[str]:
    for node in ast.walk(asked):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name


def specs_asked_for() -> dict[str, Counter[str]]:
    """By module, the number of tests for the class of an operator's description."""
    names = {spec.__name__ for spec in SPECS.values()}
    found = {
        file: Counter(name for name in classes_asked_for(source) if name in names) for file, source in sources().items()
    }
    return {file: asked for file, asked in found.items() if asked}


def test_no_module_tests_for_the_class_of_an_operator():
    strays = {
        file: sorted(set(asked) - STRUCTURE) for file, asked in specs_asked_for().items() if set(asked) - STRUCTURE
    }
    assert not strays, f"make it a question that Spec or TaskSpec answers: {strays}"


def test_few_modules_test_for_structural_operators():
    asked = specs_asked_for()
    assert sum(each.total() for each in asked.values()) <= MOST_QUESTIONS, asked


def test_only_the_builders_import_the_modules_of_operators():
    """A module cannot test for a class under another name if it does not import the class."""
    strays = [
        f"{file} imports {module}"
        for file, source in sources().items()
        if not file.startswith("operators/")
        for module in _imported(source)
        if module.startswith("midstream.operators.")
        and module.rpartition(".")[2] not in ("builder", "stream", "branches", "plan_edits")
    ]
    assert not strays


def _imported(source: str) -> list[str]:
    return [node.module or "" for node in nodes_of(source) if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(op.spec, Distinct)",
        "isinstance(spec, Map | Distinct)",
        "isinstance(spec, (Map, distinct.Distinct))",
        "match op.spec:\n    case Distinct(keys=keys):\n        pass",
        "match spec:\n    case Map() | Distinct():\n        pass",
        "type(spec) is Distinct",
    ],
)
def test_a_test_for_a_class_is_found(source: str):
    assert "Distinct" in classes_asked_for(source)


# ── the kinds ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_kinds_never_change_because_checkpoints_name_them():
    assert set(SPECS) == KINDS
    assert all(SPECS[kind].kind == kind for kind in SPECS)


def test_the_glossary_lists_all_kinds():
    [line] = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| **operator**")]
    assert {kind for kind in KINDS if f"`{kind}`" in line} == KINDS


def test_a_kind_names_one_operator():
    with pytest.raises(AssertionError, match=r"are both of the kind 'distinct'"):
        type("Other", (Spec,), {"kind": "distinct"})


# ── an operator that no module of midstream knows ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Every(TaskSpec):
    """Passes every ``n``-th row of each key. State: a count for each key."""

    kind: ClassVar[str] = "every"
    is_stateful: ClassVar[bool] = True

    keys: tuple[str, ...]
    n: int

    @property
    def keyed_by(self) -> tuple[str, ...]:
        return self.keys

    def check_input(self, change: InputChange) -> None:
        change.require(self.keys)

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        return OperatorInTask((EveryStep(operator, self, parts.state(operator)),))

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        schema = columns_of(takes[0], self.keys)
        found = in_namespace(rows, Namespace.VALUE)
        counts = pa.array([int(value) for value in found["value"].to_pylist()], pa.int64())
        return pa.table([*decode_keys(keys_of(found), schema), counts], [*self.keys, "count"])


class EveryStep:
    def __init__(self, operator: Operator, spec: Every, state: TaskState) -> None:
        self._operator, self._spec, self._state = operator, spec, state

    def __call__(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        keys = found_keys(self._operator, batch, self._spec.keys, f"every {self._operator.name!r}", self._state.space)
        names = keys.stored.to_pylist()
        counts = {name: int(value or b"0") for name, value in zip(names, self._stored(names), strict=True)}
        chosen = []
        for row, group in enumerate(keys.group_of_row.tolist()):
            counts[names[group]] += 1
            if counts[names[group]] % self._spec.n == 0:
                chosen.append(row)
        ordered = sorted(names)
        self._state.put_many(ordered, [str(counts[name]).encode() for name in ordered])
        return {ONLY: batch.take(pa.array(chosen, pa.int64()))}

    def _stored(self, names: list[bytes]) -> list[bytes | None]:
        ordered = sorted(names)
        found = dict(zip(ordered, self._state.get_many(ordered), strict=True))
        return [found[name] for name in names]


spec_module._specs.pop("every")  # of these tests only


@pytest.fixture(autouse=True)
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "every" in request.node.name:
        monkeypatch.setitem(spec_module._specs, "every", Every)


def every(stream: KeyedStream, name: str, n: int) -> Stream:
    """Stands for a base class of ``KeyedStream`` with the operator's method."""
    return stream._flow._add(name, Every(stream.keys, n), (stream._port,), stream.schema)


def counted(epochs: list[list[dict[str, Any]]], out: MemorySink, n: int = 2, ddl: str = "k string, i int") -> Flow:
    flow = Flow("f")
    rows = flow.source("in", ListSource(epochs, ddl)).map("m", lambda row: row)
    every(rows.key_by("by_k", "k"), "second", n).sink("out", out)
    return flow


def rows_of(keys: str) -> list[dict[str, Any]]:
    return [{"k": key, "i": i} for i, key in enumerate(keys)]


def test_every_second_row_over_two_runs_of_a_job(tmp_path: Path):
    first, second = MemorySink(), MemorySink()
    run_local(counted([rows_of("aab"), rows_of("a")], first), checkpoint=str(tmp_path))
    assert [(row["k"], row["i"]) for row in first.rows] == [("a", 1)]
    shown = StateReader.at(str(tmp_path)).table("second")
    assert sorted((row["k"], row["count"]) for row in shown.to_pylist()) == [("a", 3), ("b", 1)]
    run_local(counted([rows_of("ba")], second), checkpoint=str(tmp_path))
    assert sorted((row["k"], row["i"]) for row in second.rows) == [("a", 1), ("b", 0)]


def test_the_state_of_an_every_fits_only_the_same_layout(tmp_path: Path):
    run_local(counted([rows_of("a")], MemorySink()), checkpoint=str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"every\(keys=\('k',\), n=2\)[^\n]*\nbut the flow has\n  every\(.*n=3\)"
    ) as found:
        run_local(counted([rows_of("a")], MemorySink(), n=3), checkpoint=str(tmp_path))
    assert "second" in str(found.value)


def test_an_every_takes_part_in_changes():
    graph = counted([[]], MemorySink()).graph
    wider = revise(graph, [Update("m", lambda row: row, returns="k string, i int, more int")])
    assert wider["second"].schema.names == ["k", "i", "more"]
    with pytest.raises(FlowError, match=r"update of every 'second': a every has no function to replace"):
        revise(graph, [Update("second", len)])
