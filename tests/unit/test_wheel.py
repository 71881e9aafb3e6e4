"""What users install: a wheel in an environment without this checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = """
import midstream
from midstream import Flow, ListSource, MemorySink
from midstream.testing import run_local

flow, out = Flow("doubles"), MemorySink()
numbers = flow.source("numbers", ListSource([[{"n": 1}, {"n": 2}]], "n bigint"))
numbers.map("double", lambda row: {"n": 2 * row["n"]}).sink("out", out)
run_local(flow)
print(midstream.__file__, out.rows)
"""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "hatchling" in done.stderr:
        pytest.skip("the tool that builds wheels, hatchling, cannot be fetched here")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_is_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert modules <= names
    assert "midstream/py.typed" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in names)


@pytest.mark.slow
def test_a_flow_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home, folder=tmp_path)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, folder=tmp_path)
    # What midstream needs is already here. A folder that a .pth file adds brings its packages. What .pth files in that
    # folder add, and so this checkout, stays out.
    libraries = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip()
    )
    (libraries / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    where, rows = run(python, "-c", DOUBLES, folder=tmp_path).split(" ", 1)
    assert Path(where).is_relative_to(libraries)
    assert rows.strip() == "[{'n': 2}, {'n': 4}]"
    assert "savepoint" in run(home / "bin" / "midstream", "--help", folder=tmp_path)
