"""Which executor a Python process belongs to, found in the processes above it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.runtime.spark.executor_name import executor_of_this_process

ROOT = Path(__file__).parents[2]
ASK = "from midstream.runtime.spark.executor_name import executor_of_this_process as e; print(e())"
# A process with its own arguments, that starts another one, which starts a third that asks.
DAEMON = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}], check=True)"
JAVA = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {DAEMON!r}], check=True)"


def asked_below(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", JAVA, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="the system does not show command lines")
def test_the_java_process_above_names_the_executor():
    assert asked_below("--driver-url", "spark://x", "--executor-id", "17", "--hostname", "a") == "17"
    assert asked_below("org.apache.spark.deploy.SparkSubmit", "pyspark-shell") == "driver"


def test_the_environment_of_kubernetes_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARK_EXECUTOR_ID", "4")
    assert executor_of_this_process() == "4"


def test_elsewhere_processes_of_one_parent_share_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("midstream.runtime.spark.executor_name._arguments", lambda process: [])
    assert executor_of_this_process() == executor_of_this_process()
    assert str(os.getppid()) in executor_of_this_process()
