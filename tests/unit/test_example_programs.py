"""Programs in ``examples/`` can be copied: they use the public API and nothing else of this project."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))

PUBLIC = {"midstream", "midstream.errors", "midstream.testing"}
ON_SCREEN = {"midstream.cli.live", "midstream.drawing.render", "midstream.metrics"}
"""What the shows print with. Flows, functions and changes use the public API alone."""


def imported_by(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=0):
                yield str(module)


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_an_example_imports_nothing_that_a_copy_would_lack(file):
    ours = {"benchmarks", "examples", "tests"}
    assert [module for module in imported_by(file) if module.partition(".")[0] in ours] == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_an_example_uses_the_public_api(file):
    allowed = PUBLIC | (ON_SCREEN if file.name in ("__main__.py", "summary.py") else set())
    used = {module for module in imported_by(file) if module.partition(".")[0] == "midstream"}
    assert used - allowed == set()


@pytest.mark.long  # each starts the command line in a process of its own
@pytest.mark.parametrize(
    ("example", "target", "operator"),
    [
        ("fraud", "fraud.flow:flow", "by merchant"),
        ("ledger", "ledger.flow:flow", "by outcome"),
        ("spending.py", "spending.py:flow", "hurry"),
        ("moving_state.py", "moving_state.py:flow", "number"),
        ("deploying.py", "deploying.py:second", "sold"),
        ("controlling.py", "controlling.py:flow", "turnover"),
        ("steering.py", "steering.py:flow", "turnover"),
    ],
)
def test_a_copy_of_an_example_works_where_only_the_library_is(example, target, operator, tmp_path):
    copy = shutil.copytree if (EXAMPLES / example).is_dir() else shutil.copy
    copy(EXAMPLES / example, tmp_path / example)
    done = subprocess.run(
        [sys.executable, "-m", "midstream", "graph", target],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert operator in done.stdout
