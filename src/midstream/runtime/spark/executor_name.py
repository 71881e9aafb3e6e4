"""Finds out on which of Spark's executors this Python process runs, because Spark does not tell its Python workers.

An executor is a Java process that was started with its id on the command line, whatever the cluster's manager, and the
Python workers descend from it. In ``local[n]`` they descend from the driver, which runs the tasks itself; Spark
calls that executor ``driver``.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from midstream.ids import ExecutorId

__all__ = ["executor_of_this_process"]

ON_THE_DRIVER = ExecutorId("driver")
_OPTION = "--executor-id"
_IS_DRIVER = "org.apache.spark.deploy.SparkSubmit"
_GENERATIONS = 5


def executor_of_this_process() -> ExecutorId:
    """The id of the executor; if that cannot be found out, a name shared by its processes and no others."""
    if found := os.environ.get("SPARK_EXECUTOR_ID"):  # on Kubernetes
        return ExecutorId(found)
    process = os.getppid()
    for _ in range(_GENERATIONS):
        arguments = _arguments(process)
        if (found := executor_in(arguments)) is not None:
            return found
        process = _parent(process)
    return ExecutorId(f"{socket.gethostname()}-{os.getppid()}")  # the parent is the daemon that starts all its workers


def executor_in(arguments: list[str]) -> ExecutorId | None:
    """The executor's id on the command line of a Java process.

    >>> executor_in(["java", "CoarseGrainedExecutorBackend", "--executor-id", "12", "--cores", "4"])
    '12'
    >>> executor_in(["java", "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"])
    'driver'
    >>> executor_in(["python", "-m", "pyspark.daemon"])
    """
    if _OPTION in arguments[:-1]:
        return ExecutorId(arguments[arguments.index(_OPTION) + 1])
    return ON_THE_DRIVER if _IS_DRIVER in arguments else None


def _arguments(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _parent(process: int) -> int:
    try:
        # Behind the name of the program, which may hold anything, come its state and its parent.
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
