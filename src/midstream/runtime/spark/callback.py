"""What Spark calls for every micro-batch, with the query's session wrapped once.

PySpark's own wrapper makes a new ``SparkSession`` around the query's copy of the session in every epoch, which takes
many calls to the JVM. Like :mod:`.stage_columns` this uses names outside of PySpark's public API, and does without them
if a version lacks them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["on_each_batch"]

_log = logging.getLogger("midstream")


def on_each_batch(writer: DataStreamWriter, function: Callable[[DataFrame, int], None]) -> DataStreamWriter:
    """Have a query call ``function(rows, epoch)``, as ``writer.foreachBatch(function)`` would."""
    try:
        return _with_one_session(writer, function)
    except Exception as error:  # whatever a version without these names says
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _log.warning("this PySpark wraps a query's session again in each epoch (%s)", reason)
        return writer.foreachBatch(function)


def _with_one_session(writer: Any, function: Callable[[DataFrame, int], None]) -> DataStreamWriter:
    from pyspark.java_gateway import ensure_callback_server_started
    from pyspark.sql.utils import ForeachBatchFunction

    class Batches(ForeachBatchFunction):
        """Called by the JVM. A query has one copy of its session as long as it runs."""

        copy: SparkSession | None = None

        def call(self, frame: Any, epoch: int) -> None:
            try:
                if self.copy is None:
                    self.copy = SparkSession(self.session.sparkContext, frame.sparkSession())
                self.func(DataFrame(frame, self.copy), epoch)
            except Exception as error:
                self.error = error  # as PySpark's own does
                raise

    gateway = writer._spark.sparkContext._gateway
    helper = gateway.jvm.org.apache.spark.sql.execution.streaming.sources.PythonForeachBatchHelper
    helper.callForeachBatch(writer._jwrite, Batches(writer._spark, function))
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]  # PySpark does not type it
    made: DataStreamWriter = writer
    return made
