"""On separate executors whose Python has the dependencies but not midstream: what the driver runs is what they get."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pyspark
import pytest

from tests.spark.conftest import PATIENCE_S, ROOT

SIBLING = """
from midstream import ListSource

ROWS = [{"n": n, "user": f"u{n % 5}"} for n in range(60)]

def source():
    return ListSource.of(ROWS, schema="n bigint, user string", epoch_rows=20, partitions=2)

def double(row):
    return {**row, "n": 2 * row["n"]}
"""

SCRIPT = """
import os
import sys

from pyspark.sql import SparkSession

import sibling
from midstream import FileSink, Flow, MemorySink
from midstream.testing import run_spark


class Place:
    \"\"\"Says on which executor a row was seen, and where that has midstream from.\"\"\"

    def __call__(self, row):
        import midstream

        return {**row, "zip": ".zip" in midstream.__file__, "executor": os.getcwd()}


def increment(row):
    return {**row, "n": row["n"] + OFFSET}


OFFSET = 1
spark = SparkSession.builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
places = MemorySink()
flow = Flow("cluster")
stream = flow.source("rows", sibling.source()).map("double", sibling.double)
stream = stream.key_by("by_user", "user").map("increment", increment).key_by("by_n", "n")
stream.sink("files", FileSink(sys.argv[1] + "/out"))
place = stream.map("place", Place(), returns="n bigint, user string, zip boolean, executor string")
place.sink("places", places)
os.chdir(sys.argv[1])
run_spark(flow, spark, checkpoint="checkpoint", partitions=4)

expected = sorted((2 * row["n"] + 1, row["user"]) for row in sibling.ROWS)
print("memory", sorted((row["n"], row["user"]) for row in places.rows) == expected)
print("files", sorted((row.n, row.user) for row in spark.read.parquet(sys.argv[1] + "/out").collect()) == expected)
print("shipped", all(row["zip"] for row in places.rows))
print("executors", len({row["executor"] for row in places.rows}))
spark.stop()
"""


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python that finds all packages that this one has, but not midstream."""
    home = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    # Of a folder that is added like this the .pth files do not count, so an editable midstream stays unseen.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = home / "bin" / "python"
    probe = "import pyarrow, zmq, msgspec, importlib.util as u; print(u.find_spec('midstream'))"
    found = subprocess.run([python, "-c", probe], check=True, capture_output=True, text=True, env=bare_environment())
    assert found.stdout == "None\n"
    return python


def bare_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def test_a_submitted_script_runs_on_executors_that_lack_midstream(bare_python: Path, tmp_path: Path) -> None:
    """With functions of the script and of a module beside it, two exchanges, and a relative checkpoint."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "sibling.py").write_text(textwrap.dedent(SIBLING))
    (scripts / "main.py").write_text(textwrap.dedent(SCRIPT))
    spark_home = Path(pyspark.__file__).parent
    submitted = subprocess.run(
        [spark_home / "bin" / "spark-submit", "--master", "local-cluster[2,1,1024]", scripts / "main.py", tmp_path],
        env={
            **bare_environment(),
            "SPARK_HOME": str(spark_home),
            "PYSPARK_PYTHON": str(bare_python),
            "PYSPARK_DRIVER_PYTHON": str(driver_python(tmp_path)),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
        },
        cwd=scripts,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    found = submitted.stdout.splitlines()
    assert found == ["memory True", "files True", "shipped True", "executors 2"], submitted.stderr[-5000:]


def driver_python(folder: Path) -> Path:
    """The driver's Python, which does have midstream, from this tree. Not by PYTHONPATH, which executors inherit."""
    home = folder / "driver"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
    return home / "bin" / "python"
