"""Words counted by Spark's own stateful operator, and its own way to another number of partitions.

The operator is `groupBy().count()`, compiled code of the JVM, on RocksDB with a changelog: the fastest that Spark has.
Its number of partitions is fixed in the checkpoint. Spark 4.3 can rewrite the state for another number while the query
is stopped (SPARK-54345); PySpark has that as ``spark._streamingCheckpointManager``, which is not public yet. A query
under load is stopped in the middle of an epoch, so the check that the last one is committed has to be skipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.due_times import Latencies, Timeline
from benchmarks.keyed import STATE_STORE
from benchmarks.word_load import PATIENCE_S, miscounted, source
from midstream import Step
from midstream.runtime.spark.generator_source import stream_of

__all__ = ["Offline", "SparkWords"]

LOOK_S = 0.05


@dataclass(frozen=True)
class Offline:
    """Seconds that the steps took: until the query had stopped, its state was rewritten, and the first epoch with rows
    was committed after it had been started again."""

    stop_s: float
    repartition_s: float
    start_s: float


@dataclass
class SparkWords:
    """A query on a checkpoint, and the epochs that it has committed with rows."""

    spark: SparkSession
    folder: str
    keys: int
    chunk: int
    partitions: int
    """When the checkpoint is made."""
    timeline: Timeline = field(default_factory=Timeline)
    _query: StreamingQuery | None = None
    _seen: int = -1
    """The newest committed epoch that was looked at."""
    _rows: int = 0

    def fill(self, load: Step, limit: int) -> None:
        """Run until a limit of rows."""
        for name, value in (*STATE_STORE.items(), ("spark.sql.shuffle.partitions", str(self.partitions))):
            self.spark.conf.set(name, value)
        query = self._start(load, limit)
        while not query.awaitTermination(1):
            self.look()
        self.look()

    def start(self, load: Step) -> None:
        """Start it, or start it again."""
        self._query = self._start(load)

    def stop(self) -> None:
        """Stop it, as a user would: in the middle of an epoch."""
        assert self._query is not None
        self._query.stop()
        self.look()

    def follow(self, is_done: Callable[[], bool]) -> None:
        """Look until this holds."""
        assert self._query is not None
        deadline, known = time.time() + PATIENCE_S, len(self.timeline.ends)
        while not is_done():
            if (error := self._query.exception()) is not None:
                raise RuntimeError(str(error))
            if len(self.timeline.ends) > known:
                deadline, known = time.time() + PATIENCE_S, len(self.timeline.ends)
            if time.time() > deadline:
                raise RuntimeError(f"Spark's query has committed no epoch in {PATIENCE_S:.0f} s")
            time.sleep(LOOK_S)
            self.look()

    def epochs(self, count: int) -> None:
        """Go on for some epochs."""
        end = len(self.timeline.ends) + count
        self.follow(lambda: len(self.timeline.ends) >= end)

    def repartition(self, partitions: int, load: Step) -> Offline:
        """Stop, rewrite the state for another number of partitions, start."""
        moments = [time.time()]
        self.stop()
        moments.append(time.time())
        manager = self.spark._streamingCheckpointManager
        manager.repartition(self.folder, partitions, enforce_exactly_once_sink=False)
        moments.append(time.time())
        self.look()  # the epoch of the rewriting has no rows
        self.start(load)
        self.epochs(1)
        moments.append(next(reversed(self.timeline.ends.values()))[1])
        stop, rewrite, start = np.diff(moments).tolist()
        return Offline(round(stop, 3), round(rewrite, 3), round(start, 3))

    def since(self, load: Step, start_us: int, epoch: int) -> Latencies:
        """The rows of the epochs from this one on."""
        return self.timeline.latencies(load, start_us, epoch)

    def look(self) -> None:
        """Take the epochs that were committed since, by Spark's own logs. They are there for a hundred epochs."""
        commits = Path(self.folder, "commits")
        found = sorted(int(path.name) for path in commits.glob("*") if path.name.isdigit())
        for number in (each for each in found if each > self._seen):
            index = int(json.loads(Path(self.folder, "offsets", str(number)).read_text().splitlines()[-1])["index"])
            if index > self._rows:
                self.timeline.append(index - self._rows, Path(commits, str(number)).stat().st_mtime)
            self._seen, self._rows = number, index

    def errors(self) -> tuple[int, int]:
        """How often a row was not counted, and how often one was counted again, by the state that is left."""
        found = self.spark.read.format("statestore").load(self.folder).selectExpr("key.word", "value.count").toArrow()
        return miscounted(found.column(0), found.column(1), self.keys, self.timeline.rows)

    def _start(self, load: Step, limit: int | None = None) -> StreamingQuery:
        words = source(self.keys, load, limit=limit, chunk=None if limit is None else self.chunk)
        counted = stream_of(self.spark, words).groupBy("word").count()
        writer = counted.writeStream.format("noop").outputMode("update").option("checkpointLocation", self.folder)
        return (writer if limit is None else writer.trigger(availableNow=True)).start()
