"""The parts of a plan that are the same in every epoch: functions, columns and expressions, made once for a job.

Spark's Python API asks the JVM many times for each ``mapInArrow``: for each column, for the function, for its
schema. :class:`PreparedColumns` asks once, and again only if a change makes a stage read or leave other columns; each
step is then one call. Beside :mod:`.callback` and :mod:`.live_executors`, this is the only module that uses names
outside of PySpark's public API: ``DataFrame._jdf`` and ``Column._jc``, the kind of function that ``mapInArrow`` makes,
and the constructor of DataFrames. :func:`columns_for` tries them when a job starts; :class:`PublicColumns` does not
need them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import StructType
from pyspark.util import PythonEvalType

from midstream.engine.frames import FRAME_ORDER
from midstream.ids import WireId
from midstream.runtime.spark.worker import Body, rename_columns

__all__ = ["PreparedColumns", "PublicColumns", "columns_for", "exchange_count", "quoted", "struct"]

T = TypeVar("T")
_DESTINATION = "dest"

_log = logging.getLogger("midstream")


@cache
def struct(ddl: str) -> StructType:
    """The type of some DDL, cached, because Spark would ask the JVM in every epoch."""
    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


def quoted(name: str) -> str:
    """A column's name, quoted for methods of Spark that take paths.

    >>> quoted("a.b`c")
    '`a.b``c`'
    """
    return f"`{name.replace('`', '``')}`"


class PublicColumns:
    """Makes these parts again in every epoch, with nothing but PySpark's public API."""

    def begin(self) -> None:
        """A run begins. What the run before it did not use is forgotten."""

    def map(
        self, rows: DataFrame, names: Sequence[str], function: Callable[..., Any], given: tuple[Hashable, ...], ddl: str
    ) -> DataFrame:
        """``mapInArrow`` with the function ``function(*given, batches)``.

        ``names`` are those of the columns of ``rows``, and ``ddl`` describes the columns of the result.
        """
        body: Body = partial(function, *given)
        if any({".", "`"} & set(name) for name in names):
            # mapInArrow asks for columns by name, and takes names apart at dots and backticks.
            body = partial(rename_columns, tuple(names), body)
            rows = rows.toDF(*[f"c{i}" for i in range(len(names))])
        return rows.mapInArrow(body, struct(ddl))

    def exchange(self, frames: DataFrame, partitions: int, anchor: DataFrame | None = None) -> DataFrame:
        """Send each frame to its partition; partitions are sorted in the order of frames.

        With an ``anchor`` (:mod:`.anchors`), a partition is read where the anchor has it.
        """
        exchanged = frames.repartitionById(partitions, F.col(_DESTINATION))
        if anchor is not None:
            exchanged = exchanged.join(anchor, _DESTINATION, "left")
        return exchanged.sortWithinPartitions(*FRAME_ORDER)

    def select(self, rows: DataFrame, key: Hashable, make: Callable[[], Sequence[Column]]) -> DataFrame:
        """Select columns. ``key`` identifies them, so that columns made earlier can be used again."""
        return rows.select(*make())

    def of_wires(self, frames: DataFrame, wires: Sequence[WireId]) -> DataFrame:
        """The frames of some wires."""
        return frames.filter(f"wire in ({', '.join(str(int(wire)) for wire in wires)})")


class PreparedColumns(PublicColumns):
    """Makes each column once and uses it in every epoch. Used by one thread at a time."""

    def __init__(self) -> None:
        self._now: dict[Hashable, Any] = {}
        """The entries that this run has used."""
        self._before: dict[Hashable, Any] = {}

    def begin(self) -> None:
        """A run begins. What the run before it did not use is forgotten."""
        self._before, self._now = self._now, {}

    def map(
        self, rows: DataFrame, names: Sequence[str], function: Callable[..., Any], given: tuple[Hashable, ...], ddl: str
    ) -> DataFrame:
        """See :meth:`PublicColumns.map`. Names are quoted, so any name is allowed."""
        context = rows.sparkSession.sparkContext
        # A function knows the files that were added to the application when it was made, and no later ones.
        includes = tuple(context._python_includes or ())

        def make() -> Column:
            made = pandas_udf(  # type: ignore[call-overload]
                partial(function, *given),
                returnType=struct(ddl),
                functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
            )
            read = self._once(("columns", tuple(names)), lambda: [F.col(quoted(name)) for name in names])
            column: Column = made(*read)
            return column

        column = self._once(("map", tuple(names), function, given, ddl, includes), make)
        return _applied(rows, "mapInArrow", column._jc, False, None)

    def exchange(self, frames: DataFrame, partitions: int, anchor: DataFrame | None = None) -> DataFrame:
        """See :meth:`PublicColumns.exchange`."""
        to = self._once("dest", lambda: F.col(_DESTINATION))
        order = self._once("order", lambda: _seq(frames, [F.col(name) for name in FRAME_ORDER]))
        exchanged = _applied(frames, "repartitionById", partitions, to._jc)
        if anchor is not None:
            on = self._once("on", lambda: _jvm_seq(frames, [_DESTINATION]))
            exchanged = _applied(exchanged, "join", anchor._jdf, on, "left")
        return _applied(exchanged, "sortWithinPartitions", order)

    def select(self, rows: DataFrame, key: Hashable, make: Callable[[], Sequence[Column]]) -> DataFrame:
        """See :meth:`PublicColumns.select`."""
        return _applied(rows, "select", self._once(("select", key), lambda: _seq(rows, make())))

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._now:
            self._now[key] = self._before[key] if key in self._before else make()
        made: T = self._now[key]
        return made


def columns_for(spark: SparkSession) -> PublicColumns:
    """Prepared columns, if this version of PySpark has what they need. Nothing is computed."""
    prepared = PreparedColumns()
    names = (_DESTINATION, *FRAME_ORDER)
    try:
        rows = prepared.select(spark.range(0), "", lambda: [F.col("id").cast("int").alias(name) for name in names])
        tried = prepared.map(prepared.exchange(rows, 1), names, rename_columns, (), "n bigint")
        if tried.columns == ["n"]:
            return PreparedColumns()
        reason = f"the columns {tried.columns} where n was wanted"
    except Exception as error:  # whatever a version without these names says
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    _log.warning("this PySpark does not let columns be reused, so each epoch asks the JVM for them again (%s)", reason)
    return PublicColumns()


def exchange_count(rows: DataFrame) -> int:
    """How many exchanges Spark plans for it, those of kept DataFrames included. Nothing is computed."""
    jvm: Any = rows._jdf
    return len(re.findall(r"\bExchange\b", jvm.queryExecution().executedPlan().toString()))


def _seq(rows: Any, columns: Sequence[Any]) -> Any:
    """A sequence of the JVM."""
    return _jvm_seq(rows, [column._jc for column in columns])


def _jvm_seq(rows: Any, values: Sequence[Any]) -> Any:
    return rows._jseq(values)


def _applied(rows: DataFrame, method: str, *given: Any) -> DataFrame:
    """Call a method of the JVM's DataFrame directly."""
    return DataFrame(getattr(rows._jdf, method)(*given), rows.sparkSession)
