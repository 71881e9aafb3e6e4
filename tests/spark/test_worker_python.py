"""The Python of Spark's workers is checked when a job starts: midstream is shipped, other problems are reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink
from midstream.runtime.spark import worker_python
from midstream.testing import run_spark
from tests.spark.conftest import PATIENCE_S, ROOT, bare_environment

# One session tries several Pythons; the driver has midstream, but not by PYTHONPATH, which workers would inherit.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from pyspark.sql import SparkSession
from midstream import Flow, GeneratorSource, MemorySink, MidstreamError
from midstream.testing import run_spark

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")


def place(row):
    import midstream, sys
    return {"python": sys.executable, "zip": ".zip" in midstream.__file__}


def attempt(python, folder):
    spark.sparkContext.pythonExec = python
    flow, out = Flow("worker"), MemorySink()
    source = GeneratorSource(lambda index, rng: {"n": index}, "n bigint", 1000, limit=10)
    flow.source("in", source).map("place", place, returns="python string, zip boolean").sink("out", out)
    try:
        run_spark(flow, spark, checkpoint=str(folder))
    except MidstreamError as error:
        return {"error": type(error).__name__, "says": str(error), "wrote": folder.exists()}
    return {"rows": len(out.rows), "zip": [row["zip"] for row in out.rows], "python": out.rows[0]["python"]}


for number, python in enumerate(sys.argv[3:]):
    print(json.dumps(attempt(python, Path(sys.argv[2]) / str(number))), flush=True)
spark.stop()
"""


def attempts(tmp_path: Path, *pythons: str) -> list[dict[str, Any]]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ran = subprocess.run(
        [sys.executable, script, ROOT / "src", tmp_path / "checkpoints", *pythons],
        env={**bare_environment(), "PYSPARK_PYTHON": pythons[0], "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture
def poor_python(bare_python: Path, tmp_path: Path) -> Path:
    """A Python that lacks two of midstream's dependencies as well."""
    home = tmp_path / "poor"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    [listed] = bare_python.parent.parent.glob("lib/python*/site-packages/dependencies.pth")
    for entry in Path(listed.read_text().strip()).iterdir():
        if entry.suffix != ".pth" and not entry.name.startswith(("lmdb", "msgspec", "midstream")):
            (packages / entry.name).symlink_to(entry)
    return home / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)
def test_workers_on_one_machine_get_midstream_or_the_start_names_what_they_lack(bare_python, poor_python, tmp_path):
    poor, nowhere, bare = attempts(tmp_path, str(poor_python), str(tmp_path / "nowhere"), str(bare_python))
    assert (poor["error"], poor["wrote"]) == ("SetupError", False)
    assert f"with {poor_python} (Python {sys.version_info[0]}.{sys.version_info[1]}" in poor["says"]
    assert "which lacks msgspec, lmdb (pip install msgspec lmdb)" in poor["says"]
    assert "PYSPARK_PYTHON (or spark.pyspark.python)" in poor["says"]
    assert (nowhere["error"], nowhere["wrote"]) == ("SetupError", False)
    assert f'Cannot run program "{tmp_path / "nowhere"}"' in nowhere["says"]
    assert "PYSPARK_PYTHON" in nowhere["says"]
    assert bare == {"rows": 10, "zip": [True] * 10, "python": str(bare_python)}


def another_python() -> str | None:
    """A Python of another minor version that can be run here, if there is one."""
    for minor in range(10, 16):
        found = shutil.which(f"python3.{minor}") if minor != sys.version_info[1] else None
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.skipif(another_python() is None, reason="there is no Python of another minor version here")
def test_workers_with_another_version_of_python_are_reported(tmp_path):
    python = another_python()
    assert python is not None
    [other] = attempts(tmp_path, python)
    assert (other["error"], other["wrote"]) == ("SetupError", False)
    assert f"Spark cannot start a Python worker with {python}" in other["says"]
    assert "PYTHON_VERSION_MISMATCH" in other["says"]
    assert "PYSPARK_PYTHON" in other["says"]


def test_workers_are_asked_once_in_an_application(spark, tmp_path, monkeypatch):
    asked: list[Any] = []
    ask = worker_python.ask

    def counted(context: Any, names: Any) -> Any:
        asked.append(names)
        return ask(context, names)

    monkeypatch.setattr(worker_python, "ask", counted)
    monkeypatch.setattr(worker_python, "_asked", set())
    for number in range(2):
        flow, out = Flow(f"asked{number}"), MemorySink()
        flow.source("in", ListSource([[{"n": 1}]], "n int")).sink("out", out)
        run_spark(flow, spark, checkpoint=str(tmp_path / str(number)))
        assert out.rows == [{"n": 1}]
    assert len(asked) == 1
