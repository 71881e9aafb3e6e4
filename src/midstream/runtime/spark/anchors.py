"""Anchors: what makes partitions stick to executors, so that an executor's base holds what its partitions own.

Spark runs reduce tasks wherever a core is free. But a task that also reads a partition of a kept DataFrame goes where
that partition is. So each exchange is joined with an *anchor*, a kept DataFrame with one row a partition, that is
partitioned in the same way: Spark then needs no second exchange, and reads both in one task. Which executor has which
partition is Spark's choice: it depends on how the tasks that compute an anchor happen to end. So a few are computed, by
small jobs, until one has about as many partitions on every executor. Partitions of a lost executor are computed again
on others, and stick there.

All stages with the same number of partitions share an anchor. A single partition has none: where both sides have one
partition, and one of them may be large, Spark spreads both anew by hashes, and frames would come to partitions that do
not own their rows.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from midstream.control.placement import unevenness
from midstream.ids import ExecutorId, PartitionId
from midstream.runtime.spark.doctor import REDUCE_LOCALITY
from midstream.runtime.spark.live_executors import live_executors
from midstream.runtime.spark.stage_columns import exchange_count
from midstream.runtime.spark.worker import tell_executor

__all__ = ["Anchors", "pins_partitions"]

TRIES = 6
"""Most anchors that are computed until one spreads its partitions evenly."""

_log = logging.getLogger("midstream")


def pins_partitions(spark: SparkSession) -> bool:
    """Whether partitions can stick to executors in this application. Nothing can change that while it runs."""
    return str(spark.sparkContext.getConf().get(REDUCE_LOCALITY, "true")).lower() == "false"


@dataclass(frozen=True)
class _ProposedPlaces:
    anchor: DataFrame
    places: dict[PartitionId, ExecutorId]


class Anchors:
    """The anchors of one job. Any thread may call :meth:`propose`; only the one that runs epochs may call the rest."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._pins = pins_partitions(spark)
        self._warned = False
        self._is_checked = False
        self._in_use: dict[int, DataFrame] = {}
        self._read: set[int] = set()
        """Numbers of partitions whose anchor is in use; anchors for other numbers may be adopted for what comes
        next."""
        self._proposed: dict[int, _ProposedPlaces] = {}
        self._lock = threading.Lock()

    def are_useful(self, executors: Collection[ExecutorId]) -> bool:
        """Whether to use them, if these executors are known to run the job's tasks."""
        if len(executors) < 2:
            return bool(self._in_use)
        if not self._pins and not self._warned:
            self._warned = True
            _log.warning(
                "partitions do not stick to the %s executors of this application, so each of them will read and keep "
                "all state. Make the session with %s=false; midstream.local_session does",
                len(executors),
                REDUCE_LOCALITY,
            )
        return self._pins

    def of(self, session: SparkSession, partitions: int) -> DataFrame | None:
        """The anchor for exchanges with this number of partitions, made if there is none; None if it would not work."""
        if partitions == 1:
            return None
        with self._lock:
            if partitions not in self._in_use and self._pins:
                has_choice = len(live_executors(self._spark)) > 1
                anchor = self._spread(session, partitions).anchor if has_choice else _anchor(session, partitions)
                self._in_use[partitions] = anchor
                if not self._is_checked:  # Spark plans every number of partitions in the same way
                    self._is_checked = True
                    self._pins = self._is_read_in_place(session, partitions)
            self._read.add(partitions)
            return self._in_use[partitions] if self._pins else None

    def _is_read_in_place(self, session: SparkSession, partitions: int) -> bool:
        anchor = self._in_use[partitions]
        found: int | str
        try:
            found = exchange_count(_joined(session, partitions, anchor)) - exchange_count(anchor)
        except Exception as error:  # whatever a version says that does not show its plans
            found = f"({type(error).__name__})"
        if found != 1:
            _log.warning(
                "partitions do not stick to executors: this version of Spark plans %s exchanges where 1 was expected",
                found,
            )
        return found == 1

    def propose(self, session: SparkSession, partitions: int) -> dict[PartitionId, ExecutorId]:
        """Have Spark spread partitions anew over its current executors; nothing uses the result yet.

        Returns where each partition would be, after a few small jobs; empty if partitions do not stick.
        """
        if not self._pins or partitions == 1:
            return {}
        found = self._spread(session, partitions)
        with self._lock:
            before = self._proposed.get(partitions)
            self._proposed[partitions] = found
        if before is not None:
            before.anchor.unpersist()
        return found.places

    def _spread(self, session: SparkSession, partitions: int) -> _ProposedPlaces:
        """The most even of a few anchors, or the first that is even enough: executors differ by one partition at most,
        or by a quarter of what each has."""
        executors = live_executors(self._spark)
        enough = max(1, partitions // (4 * max(1, len(executors))))
        best = _computed(session, partitions)
        for _ in range(TRIES - 1):
            if unevenness(best.places, executors) <= enough:
                break
            other = _computed(session, partitions)
            worse = max(best, other, key=lambda each: unevenness(each.places, executors))
            best = other if worse is best else best
            worse.anchor.unpersist()
        return best

    def adopt(self, partitions: int) -> None:
        """From the next run on, use the newest proposal. Without one, nothing changes."""
        with self._lock:
            proposal = self._proposed.pop(partitions, None)
            if proposal is None:
                return
            before = self._in_use.get(partitions)
            self._in_use[partitions] = proposal.anchor
            self._read.discard(partitions)
        if before is not None:
            before.unpersist()

    def keep(self, numbers: Collection[int]) -> None:
        """Stages have these numbers of partitions now; other anchors that were read are not needed any more."""
        with self._lock:
            unused = [self._in_use.pop(number) for number in self._read - set(numbers)]
            self._read &= set(numbers)
        for anchor in unused:
            anchor.unpersist()

    def close(self) -> None:
        """The job is over."""
        with self._lock:
            anchors = [*self._in_use.values(), *(each.anchor for each in self._proposed.values())]
            self._in_use.clear()
            self._proposed.clear()
            self._read.clear()
            self._pins = False
        for anchor in anchors:
            anchor.unpersist()


def _anchor(session: SparkSession, partitions: int) -> DataFrame:
    # Spark takes DataFrames with equal plans for one and the same, and would forget both with either.
    name = uuid.uuid4().hex
    rows = session.range(0, partitions, 1, 1).select(F.col("id").cast("int").alias("dest"))
    own = rows.filter(F.lit(name) == F.lit(name))
    return own.repartitionById(partitions, F.col("dest")).persist().hint("shuffle_hash")


def _computed(session: SparkSession, partitions: int) -> _ProposedPlaces:
    anchor = _anchor(session, partitions)
    told = _joined(session, partitions, anchor).mapInArrow(tell_executor, "partition int, executor string")
    return _ProposedPlaces(anchor, {PartitionId(row.partition): ExecutorId(row.executor) for row in told.collect()})


def _joined(session: SparkSession, partitions: int, anchor: DataFrame) -> DataFrame:
    rows = session.range(0, partitions, 1, 1).select(F.col("id").cast("int").alias("dest"))
    return rows.repartitionById(partitions, F.col("dest")).join(anchor, "dest", "left")
