"""Asks the cluster manager for executors. PySpark cannot; the JVM can, under names that Spark does not promise.

Tried on ``local-cluster`` and standalone clusters: another executor is there after about three seconds. Removing one is
left to people: it stays away, and Spark counts it as lost.
"""

from __future__ import annotations

import time
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

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @classmethod
    def of(cls, spark: SparkSession) -> SparkExecutors | None:
        """The executors of an application whose cluster manager can be asked for more; None if it cannot."""
        return cls(spark) if str(spark.sparkContext.master).startswith(MASTERS) else None

    def ask(self, count: int) -> Requested:
        """Ask for this many in all. Existing ones stay."""
        now = len(live_executors(self._spark))
        if count < now:
            raise FlowError(
                f"there are {now} executors, and {count} are wanted: controllers remove none; use job.drain, and "
                f"end it then"
            )
        try:
            jvm: Any = self._spark._jvm
            nothing = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})
            context: Any = self._spark.sparkContext._jsc
            taken = bool(context.sc().requestTotalExecutors(count, 0, nothing))
        except Exception as error:  # py4j's errors, of a Spark that has these names no more or is stopping
            raise SetupError(
                f"this Spark cannot be asked for executors: {type(error).__name__}; change the application's resources"
            ) from None
        if not taken:
            raise SetupError(f"the cluster manager has refused to give {count} executors")
        until = time.monotonic() + PATIENCE_S

        def state() -> tuple[ProposalOutcome, str | None]:
            found = len(live_executors(self._spark))
            if found >= count:
                return ProposalOutcome.APPLIED, None
            if time.monotonic() < until:
                return ProposalOutcome.PENDING, None
            return ProposalOutcome.FAILED, f"there are {found} of {count} executors after {PATIENCE_S:g} s"

        return Requested(state)
