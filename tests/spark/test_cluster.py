"""Executors whose Python has the dependencies but not midstream get the driver's midstream."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pyspark
import pytest

from tests.spark.conftest import PATIENCE_S, ROOT, bare_environment

SIBLING = """
ROWS = [{"n": n, "user": f"u{n % 5}"} for n in range(60)]

def double(row):
    return {**row, "n": 2 * row["n"]}
"""

SCRIPT = """
import json
import os
import sys

from pyspark.sql import SparkSession

import sibling
from midstream import FileSink, Flow, MemorySink
from midstream.testing import run_spark


class Place:
    # Says on which executor a row was seen, and where that has midstream from.
    def __call__(self, row):
        import midstream

        return {**row, "zip": ".zip" in midstream.__file__, "executor": os.getcwd()}


def increment(row):
    return {**row, "n": row["n"] + OFFSET}


OFFSET = 1
os.chdir(sys.argv[1])
folder = os.getcwd()
spark = SparkSession.builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
os.mkdir("in")
for i in range(3):
    with open(f"in/{i}.json", "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in sibling.ROWS[i::3])
rows = spark.readStream.schema("n bigint, user string").option("maxFilesPerTrigger", 1).json(f"{folder}/in")

flow, places = Flow("cluster"), MemorySink()
stream = flow.source("rows", rows).map("double", sibling.double)
stream = stream.key_by("by_user", "user").map("increment", increment).key_by("by_n", "n")
stream.sink("files", FileSink("out"))
stream.map("place", Place(), returns="n bigint, user string, zip boolean, executor string").sink("places", places)
job = run_spark(flow, spark, checkpoint="checkpoint", partitions=4)

expected = sorted((2 * row["n"] + 1, row["user"]) for row in sibling.ROWS)
print("epochs", job.metrics.epochs)
print("memory", sorted((row["n"], row["user"]) for row in places.rows) == expected)
print("files", sorted((row.n, row.user) for row in spark.read.parquet(f"{folder}/out").collect()) == expected)
print("shipped", all(row["zip"] for row in places.rows))
print("executors", len({row["executor"] for row in places.rows}))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE_S)  # four JVMs have to start first
def test_a_submitted_script_runs_on_executors_that_lack_midstream(bare_python: Path, tmp_path: Path) -> None:
    """With functions of the script and of a module beside it, two exchanges, and a relative checkpoint."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "sibling.py").write_text(textwrap.dedent(SIBLING))
    (scripts / "main.py").write_text(textwrap.dedent(SCRIPT))
    home = spark_home(tmp_path)
    submitted = subprocess.run(
        [
            str(home / "bin" / "spark-submit"),
            *("--master", "local-cluster[2,1,1024]", "--conf", "spark.shuffle.reduceLocality.enabled=false"),
            str(scripts / "main.py"),
            str(tmp_path),
        ],
        env={
            **bare_environment(),
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": str(bare_python),
            "PYSPARK_DRIVER_PYTHON": str(driver_python(tmp_path)),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        cwd=scripts,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    found = submitted.stdout.splitlines()
    told = submitted.stdout + submitted.stderr[-2000:]
    assert found == ["epochs 3", "memory True", "files True", "shipped True", "executors 2"], told


def spark_home(folder: Path) -> Path:
    """A copy of Spark as installed by pip: a cluster of this kind writes into this folder."""
    home = folder / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def driver_python(folder: Path) -> Path:
    """The driver's Python, which does have midstream, from this tree. Not by PYTHONPATH, which executors inherit."""
    home = folder / "driver"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
    return home / "bin" / "python"
