"""Finds the executors of an application. PySpark does not tell; the JVM does, under names that Spark does not
promise."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from midstream.ids import ExecutorId

__all__ = ["live_executors"]

_DRIVER = "driver"


def live_executors(spark: SparkSession) -> frozenset[ExecutorId]:
    """The executors that Spark has now; without a cluster, that is the driver. Empty if this Spark does not tell."""
    jvm: Any = spark.sparkContext._jsc
    try:
        found = jvm.sc().statusStore().executorList(True)
        names = {str(found.apply(number).id()) for number in range(found.size())}
    except Exception:  # py4j's errors, of a Spark that has these names no more or is stopping
        return frozenset()
    return frozenset(map(ExecutorId, names - {_DRIVER} or names))
