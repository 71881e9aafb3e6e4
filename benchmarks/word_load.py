"""Words that are counted under a constant load: what the benchmarks that move state share.

Keys are preloaded; then rows are due at a constant rate, whether or not the job is ready. A row's latency is the commit
of its epoch minus the time it was due. At the end every key's count is compared with what the rows that were committed
make by arithmetic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks.due_times import Latencies, Timeline
from midstream import Flow, GeneratorSource, NoopSink, State, Step
from midstream.change.migration import Migration
from midstream.checkpoint.inspection import read_state
from midstream.flow.schedules import Schedule
from midstream.runtime.spark.job import Job

__all__ = [
    "FILLED_S",
    "LEAD_S",
    "PATIENCE_S",
    "STAGE",
    "STRIDE",
    "Load",
    "Patience",
    "Words",
    "checked_keys",
    "fill",
    "filling",
    "flow",
    "loading",
    "miscounted",
    "source",
    "state_errors",
    "work",
]

STRIDE = 7_919
"""A prime that divides no number of keys used here, so any run of as many rows as there are keys has every key."""
LEAD_S = 6.0
"""The load begins so long after a job is started."""
FILLED_S = 1.0
"""All rows that preload keys are due within this time."""
PATIENCE_S = 120.0
STAGE = "by word"


def checked_keys(parser: argparse.ArgumentParser, keys: int, bins: int) -> int:
    """The keys of ``--keys``; a number that does not fit ends the program."""
    if keys < bins or keys % STRIDE == 0:
        parser.error(f"--keys {keys}: give at least {bins}, and no multiple of {STRIDE}")
    return keys


@dataclass(frozen=True)
class Words:
    """Every key once, then every key again, in an order that visits bins at random."""

    keys: int

    def __call__(self, indexes: Any, rng: Any) -> pa.RecordBatch:
        """The words of these events."""
        numbers = pa.array(indexes.astype(np.int64) * STRIDE % self.keys)
        return pa.RecordBatch.from_arrays([numbers.cast(pa.string())], names=["word"])


def count(word: str, row: dict[str, Any], state: State) -> dict[str, Any]:
    """A word more."""
    n = state.get(0) + 1
    state.set(n)
    return {"word": word, "n": n}


def work(value: int, rounds: int) -> int:
    """Some arithmetic, so that a row costs something."""
    for number in range(rounds):
        value = (value * 31 + number) % 1_000_003
    return value


def source(keys: int, load: Step, *, limit: int | None = None, chunk: int | None = None) -> GeneratorSource:
    """Words as they are due."""
    return GeneratorSource(Words(keys), "word string", load, limit=limit, max_rows_per_epoch=chunk)


def flow(words: GeneratorSource, name: str, counting: Callable[..., Any] = count) -> Flow:
    """Words, counted."""
    made = Flow(name)
    keyed = made.source("words", words).key_by(STAGE, "word")
    keyed.process("count", counting, returns="word string, n bigint").sink("out", NoopSink())
    return made


def filling(rows: int) -> Step:
    """Rows that are due at once, and no others."""
    return Step(((0.0, rows / FILLED_S), (FILLED_S, 0.0)))


def loading(rows: int, start_us: int, rate: float) -> Step:
    """The same, and a constant rate that begins in a few seconds."""
    return Step((*filling(rows).steps, (time.time() + LEAD_S - start_us / 1e6, rate)))


@dataclass(frozen=True)
class Patience:
    """Epochs that count as steady; for how many seconds and epochs rows must be served as before, and for how long that
    is awaited."""

    steady: int
    calm_s: float
    calm_epochs: int
    patience_s: float

    def is_calm(self, timeline: Timeline, rows: Latencies, requested: float, p99: float) -> float | None:
        """The moment since which rows are served as before, once that has lasted."""
        since = rows.calm_since(p99) if len(rows.due) else None
        if since is None or rows.due[-1] - since < self.calm_s:
            return None
        epochs = sum(1 for _, committed in timeline.ends.values() if committed > max(since, requested))
        return since if epochs >= self.calm_epochs else None


@dataclass
class Load:
    """A job, and what is due."""

    job: Job
    timeline: Timeline
    schedule: Schedule
    start_us: int

    def follow(self, is_done: Callable[[], bool]) -> None:
        """Go on until this holds, looking once an epoch."""
        while not is_done():
            if not self.job.await_epoch(self.job.metrics.epochs + 1, PATIENCE_S):
                raise RuntimeError(f"the job is {self.job.status}: it has committed no epoch in {PATIENCE_S:.0f} s")
            self.timeline.add(self.job.progress)

    def epochs(self, count: int) -> None:
        """Go on for some epochs."""
        end = self.job.metrics.epochs + count
        self.follow(lambda: self.job.metrics.epochs >= end)
        self.timeline.add(self.job.progress)

    def since(self, epoch: int) -> Latencies:
        """The rows of the epochs from this one on."""
        return self.timeline.latencies(self.schedule, self.start_us, epoch)

    def steady(self, patience: Patience) -> Latencies:
        """Wait for steady epochs, and return their rows."""
        self.epochs(patience.steady)
        return self.since(len(self.timeline.ends) - patience.steady)

    def steady_read(self, patience: Patience) -> float:
        """Bytes that the newest epochs read: what the epoch before each has changed."""
        return statistics.median(self.timeline.state_read[-patience.steady :])

    def settle(
        self, patience: Patience, first: int, requested: float, steady: Latencies
    ) -> tuple[Latencies, float | None]:
        """Wait until rows are served as before; return the rows from the event until then, and when that was."""
        p99, deadline = steady.quantile(0.99), time.time() + patience.patience_s

        def calm() -> float | None:
            return patience.is_calm(self.timeline, self.since(first), requested, p99)

        self.follow(lambda: calm() is not None or time.time() > deadline)
        rows, since = self.since(first), calm()
        return rows, None if since is None else max(0.0, since - requested)

    def end_of(self, migration: Migration) -> float:
        """Go on until it has ended; return when."""
        self.follow(lambda: migration.is_over)
        migration.require(0)
        return next(reversed(self.timeline.ends.values()))[1]


def fill(spark: SparkSession, folder: str, words: Flow, timeline: Timeline, *, partitions: int, bins: int) -> None:
    """Run until a limit of rows."""
    job = words.start(spark, checkpoint=folder, trigger="available-now", partitions=partitions, bins=bins)
    while not job.await_termination(0.5):
        timeline.add(job.progress)
    timeline.add(job.progress)


def state_errors(folder: str, keys: int, rows: int) -> tuple[int, int]:
    """How often a row was not counted, and how often one was counted again, by the state that is left."""
    found = read_state(folder, "count")
    return miscounted(found.column("word"), found.column(found.num_columns - 1), keys, rows)


def miscounted(words: pa.ChunkedArray, counts: pa.ChunkedArray, keys: int, rows: int) -> tuple[int, int]:
    """How often one of these rows is not among the counts, and by how much counts are too high."""
    numbers = words.cast(pa.int64()).to_numpy()
    found = np.zeros(keys, np.int64)
    np.add.at(found, numbers, counts.cast(pa.int64()).to_numpy())
    wanted = np.full(keys, rows // keys)
    wanted[np.arange(rows // keys * keys, rows) * STRIDE % keys] += 1
    return int(np.maximum(wanted - found, 0).sum()), int(np.maximum(found - wanted, 0).sum())
