"""Who may import whom: the architecture's layers, read from the source with `ast`, so that lazy imports count too."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.sources import PACKAGE, nodes_of, sources

ROOT = Path(__file__).parents[2]

# Lowest first. A module may import its own layer and those below it.
LAYERS = (
    {"errors", "ids", "version", "metrics", "observation"},
    {"data", "storage"},
    {"expressions"},
    {"flow"},
    {"planner"},
    {"drawing", "state"},
    {"txn"},
    {"engine"},
    {"operators"},
    {"control", "audit"},
    {"checkpoint"},
    {"change"},
    {"controllers"},
    {"runtime"},
    {"server"},
    {"cli", "testing", "__main__"},
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
FACADE = "midstream"  # __init__.py: re-exports public names, so it sees everything and only the top may use it
RANK[FACADE] = len(LAYERS) - 1

# `Flow.start` is where a description meets a runtime and its server: the one place that looks up, and only when called.
LAZY_EXCEPTIONS = {("operators/builder.py", "runtime"), ("operators/builder.py", "server")}

# Where the name to import is not the name to install.
DISTRIBUTION = {"IPython": "ipython", "zmq": "pyzmq", "sklearn": "scikit-learn"}


@dataclass(frozen=True)
class Import:
    """One imported module: who imports it, where, and whether importing the importer is enough to run it."""

    file: str
    line: int
    target: str
    deferred: bool

    @property
    def importer(self) -> str:
        return part_of_file(self.file)

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}{' when called' if self.deferred else ''}"


def part_of_file(file: str) -> str:
    head = Path(file).parts[0].removesuffix(".py")
    return FACADE if head == "__init__" else head


def part_of_module(module: str, package: Path = PACKAGE) -> str | None:
    """The part of midstream that a dotted name lies in, or None for other people's modules."""
    names = module.split(".")
    if names[0] != "midstream":
        return None
    is_part = len(names) > 1 and ((package / names[1]).is_dir() or (package / f"{names[1]}.py").is_file())
    return names[1] if is_part else FACADE


def imports_of(source: str, file: str) -> list[Import]:
    """Every import of a module, however deeply nested, `import_module("…")` and `__import__("…")` included."""
    package = ["midstream", *Path(file).parent.parts]
    return list(_walk(nodes_of(source)[0], file, package, deferred=False))


def _walk(node: ast.AST, file: str, package: list[str], deferred: bool) -> Iterator[Import]:
    for target in _targets(node, package):
        yield Import(file, getattr(node, "lineno", 0), target, deferred)
    now: Sequence[ast.AST]
    later: Sequence[ast.AST]
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        later, now = node.body, node.orelse
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        later, now = list(ast.iter_child_nodes(node)), []
    else:
        later, now = [], list(ast.iter_child_nodes(node))
    for child in now:
        yield from _walk(child, file, package, deferred)
    for child in later:
        yield from _walk(child, file, package, deferred=True)


def _targets(node: ast.AST, package: list[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package[: len(package) - level + 1] if level else []
            stem = ".".join([*base, *([module] if module else [])])
            # `from midstream import engine` names a part; `from midstream.engine import X` is settled by its stem.
            yield from (f"{stem}.{alias.name}" if stem == "midstream" else stem for alias in names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def is_allowed(found: Import) -> bool:
    """Whether an import of one part of midstream by another points downwards, or is the one exception."""
    part = part_of_module(found.target)
    if part is None or found.importer == FACADE or part == found.importer:
        return True
    if (found.file, part) in LAZY_EXCEPTIONS:
        return found.deferred
    return RANK[part] <= RANK[found.importer]


@cache
def all_imports() -> list[Import]:
    return [found for file, source in sources().items() for found in imports_of(source, file)]


def test_every_part_has_a_layer():
    parts = {part_of_file(path.name) for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    unplaced = parts - set(RANK) - {"__pycache__"}
    assert not unplaced, f"give {sorted(unplaced)} a place in LAYERS"


def test_imports_point_one_way():
    upwards = [str(found) for found in all_imports() if not is_allowed(found)]
    assert not upwards, "\n".join(["a lower layer imports a higher one:", *upwards])


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        part = part_of_module(found.target)
        if part not in (None, FACADE, found.importer) and (found.file, part) not in LAZY_EXCEPTIONS:
            graph.setdefault(found.importer, set()).add(str(part))
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circular imports: {' → '.join(error.args[1])}")
    assert {"errors", "ids"} <= set(order)


def test_only_the_edge_towards_spark_imports_pyspark():
    spark = [found for found in all_imports() if found.top in {"pyspark", "py4j"}]
    strays = [str(found) for found in spark if not found.file.startswith("runtime/spark/")]
    assert not strays, "\n".join(["only src/midstream/runtime/spark may import pyspark:", *strays])


def test_everything_imported_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    ranges = [
        *project["dependencies"],
        *(
            text
            for extra in ("spark", "fsspec", "txn", "delta", "iceberg", "server", "notebook")
            for text in extras[extra]
        ),
    ]
    declared = {Requirement(text).name for text in ranges} | {"midstream", "py4j"}  # py4j comes with pyspark
    known = declared | sys.stdlib_module_names
    strays = [str(found) for found in all_imports() if DISTRIBUTION.get(found.top, found.top) not in known]
    assert not strays, "\n".join(["imported, but not in pyproject.toml:", *strays])


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("flow/model.py", "from midstream.engine.runner import StageRunner"),
        ("flow/model.py", "def f():\n    import midstream.runtime.spark"),
        ("flow/model.py", "from midstream import Flow"),
        ("planner/stages.py", "from ..control import messages"),
        ("engine/frames.py", "class A:\n    def f(self):\n        from midstream import control"),
        ("errors.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from midstream.flow.model import Flow"),
        ("control/channel.py", "import importlib\nimportlib.import_module('midstream.runtime')"),
        ("operators/builder.py", "from midstream.runtime.spark.job import Job"),
        ("operators/builder.py", "def start():\n    from midstream.checkpoint import location"),
    ],
)
def test_an_import_that_looks_up_is_found(file, source):
    assert not all(is_allowed(found) for found in imports_of(source, file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/spark.py", "from midstream.control.messages import TaskOrder\nfrom ..flow import model"),
        ("engine/joining/runs.py", "from ..frames import Frame\nfrom ...errors import FlowError"),
        ("__init__.py", "from midstream.runtime.spark.job import Job"),
        ("operators/builder.py", "def start():\n    from midstream.runtime.spark.job import Job"),
        ("planner/stages.py", "import collections, midstream.flow.model"),
    ],
)
def test_an_import_that_looks_down_is_allowed(file, source):
    found = imports_of(source, file)
    assert found
    assert all(is_allowed(one) for one in found)


def test_a_nested_pyspark_import_is_seen():
    source = "def f():\n    if True:\n        from pyspark.sql import functions as F\n"
    assert [(found.top, found.deferred) for found in imports_of(source, "data/schema.py")] == [("pyspark", True)]
