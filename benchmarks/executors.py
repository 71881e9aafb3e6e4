"""The executors of a cluster on one machine: how many there are, and the memory and disk that each needs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

from midstream.runtime.spark.live_executors import live_executors

__all__ = ["ExecutorFigures", "figures_of", "resize"]

PATIENCE_S = 120.0
LOOK_S = 0.05
MB = 1e6


@dataclass(frozen=True)
class ExecutorFigures:
    """What an executor has of a job, and what it needs: megabytes of files, and of memory of its Python workers."""

    bins: int
    disk_mb: float
    memory_mb: float


def resize(spark: SparkSession, count: int, keep: Collection[str] = ()) -> float:
    """Have Spark start executors, or end some that are not to be kept; returns the seconds until that is so."""
    began, context = time.time(), spark.sparkContext._jsc.sc()
    nothing = spark._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})  # type: ignore[union-attr]
    context.requestTotalExecutors(count, 0, nothing)
    ending = set[str]()
    while len(now := live_executors(spark)) != count:
        staying = now - ending  # more may have started meanwhile
        for name in sorted(staying - set(keep), reverse=True)[: max(0, len(staying) - count)]:
            ending.add(name)
            context.killExecutor(name)
        if time.time() > began + PATIENCE_S:
            raise RuntimeError(f"there are {len(now)} executors; {count} were asked for")
        time.sleep(LOOK_S)
    return time.time() - began


def figures_of(job: str, bins: dict[str, int]) -> dict[str, ExecutorFigures]:
    """The figures of each executor; ``bins`` has how many it owns."""
    memory = _memory()
    return {
        name: ExecutorFigures(owned, round(_disk(job, name) / MB, 1), round(memory.get(name, 0) / MB, 1))
        for name, owned in sorted(bins.items())
    }


def _disk(job: str, executor: str) -> int:
    """Bytes of disk that an executor's copies of state take, which is less than the size of files with holes."""
    found = 0
    for folder in Path(os.environ["SPARK_HOME"], "work").glob(f"app-*/{executor}/midstream-state/{job}*"):
        for path in folder.rglob("*"):
            try:
                found += path.stat().st_blocks * 512
            except OSError:  # removed while we looked
                continue
    return found


def _memory() -> dict[str, int]:
    """By executor: resident bytes of its Python workers; what they share counts once."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if any("pyspark.daemon" in word for word in process.cmdline()):
                name = Path(process.cwd()).name
                found[name] = found.get(name, 0) + process.memory_full_info().pss
        except psutil.Error:  # it ended while we looked
            continue
    return found
