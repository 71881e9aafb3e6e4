"""Asks the cluster manager for executors, and ends them. PySpark cannot; the JVM can, under names that Spark does not
promise.

Tried on ``local-cluster`` and standalone clusters: another executor is there after about three seconds. One that is
ended stays away, because fewer are asked for first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from pyspark.sql import SparkSession

from midstream.controllers.proposal_records import ProposalOutcome
from midstream.errors import FlowError, SetupError
from midstream.runtime.controller_desk import Requested
from midstream.runtime.spark.live_executors import live_executors

__all__ = ["SparkExecutors"]

PATIENCE_S = 60.0
MASTERS = ("spark://", "local-cluster")


class SparkExecutors:
    """The executors of an application."""

    def __init__(self, spark: SparkSession, between_epochs: Callable[[Callable[[], None]], None]) -> None:
        self._spark = spark
        self._between_epochs = between_epochs

    @classmethod
    def of(cls, spark: SparkSession, between_epochs: Callable[[Callable[[], None]], None]) -> SparkExecutors | None:
        """The executors of an application whose cluster manager can be asked for more; None if it cannot.

        ``between_epochs`` calls a function when no task of the job runs.
        """
        return cls(spark, between_epochs) if str(spark.sparkContext.master).startswith(MASTERS) else None

    def ask(self, count: int) -> Requested:
        """Ask for this many in all. Existing ones stay."""
        now = len(live_executors(self._spark))
        if count < now:
            raise FlowError(f"there are {now} executors, and {count} are wanted: which ones are to end?")
        self._want(count)
        return self._when(
            lambda found: len(found) >= count, lambda found: f"there are {len(found)} of {count} executors"
        )

    def release(self, name: str) -> Requested:
        """End one executor, and have it not replaced. That is done between two epochs: an epoch whose output was there
        would wait until Spark has found out."""
        failed: list[str] = []

        def end() -> None:
            try:
                now = live_executors(self._spark)
                if name in now:
                    self._want(len(now) - 1)
                    self._call(lambda context: context.sc().killExecutor(name))
            except SetupError as error:
                failed.append(str(error))

        self._between_epochs(end)
        gone = self._when(lambda found: name not in found, lambda found: f"executor {name!r} is still there")
        return Requested(lambda: (ProposalOutcome.FAILED, failed[0]) if failed else gone.state())

    def _want(self, count: int) -> None:
        jvm: Any = self._spark._jvm
        taken = self._call(
            lambda context: context.sc().requestTotalExecutors(
                count, 0, jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})
            )
        )
        if not taken:
            raise SetupError(f"the cluster manager has refused to have {count} executors")

    def _call(self, function: Callable[[Any], Any]) -> bool:
        try:
            return bool(function(self._spark.sparkContext._jsc))
        except Exception as error:  # py4j's errors, of a Spark that has these names no more or is stopping
            raise SetupError(
                f"this Spark cannot be asked for executors: {type(error).__name__}; change the application's resources"
            ) from None

    def _when(self, is_so: Callable[[Collection[str]], bool], complaint: Callable[[Collection[str]], str]) -> Requested:
        """What becomes of a request: it has :data:`PATIENCE_S`."""
        until = time.monotonic() + PATIENCE_S

        def state() -> tuple[ProposalOutcome, str | None]:
            found = live_executors(self._spark)
            if is_so(found):
                return ProposalOutcome.APPLIED, None
            if time.monotonic() < until:
                return ProposalOutcome.PENDING, None
            return ProposalOutcome.FAILED, f"{complaint(found)} after {PATIENCE_S:g} s"

        return Requested(state)
