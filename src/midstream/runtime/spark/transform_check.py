"""Whether transforms can work: Spark's analyser is asked before a job starts, and before a change is made.

Transforms run on the driver, so they are called here, on empty DataFrames of their inputs' columns. The analyser finds
columns that are missing or of another type; what the rows themselves bring about, only an epoch shows.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import SparkSession

from midstream.data.schema import to_ddl
from midstream.errors import FlowError, MidstreamError
from midstream.flow.model import Graph
from midstream.runtime.spark.epoch import apply_transform

__all__ = ["check_transforms"]


def check_transforms(graph: Graph, names: Iterable[str], spark: SparkSession) -> None:
    """Call these transforms on empty DataFrames. Raises :class:`FlowError` if one cannot work."""
    for name in names:
        op = graph[name]
        columns = to_ddl(graph.schema_of(op.inputs[0]))
        empty = spark.createDataFrame([], columns)
        try:
            apply_transform(op.name, graph.payloads[op.name][0], empty, op.schema)
        except MidstreamError:
            raise
        except Exception as error:
            raise FlowError(
                f"transform {op.name!r} fails on an empty DataFrame of its input's schema ({columns}): "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
