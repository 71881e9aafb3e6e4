"""What people do without live changes: stop the job and start it again with another function.

Both ways go on from the checkpoint, so that nothing is lost or doubled. Measured is the time from the call of stop()
until the first payment is scored by the new model, and until the first epoch with it is committed.

Run as a module, this is the driver that is deployed anew: ``python -m benchmarks.restarting CHECKPOINT FILE ROWS``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.changing import costly
from benchmarks.sessions import CORES, session
from benchmarks.workloads import fries_w1
from examples.fraud.payments import Bank
from midstream import Flow, NoopSink

__all__ = ["Announcing", "Restarted", "redeploy", "restart"]

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Announcing:
    """A model that says when it was first used, in a file."""

    model: fries_w1.Model
    file: str

    def __call__(self, payments: Sequence[dict[str, Any]]) -> float:
        """Score the last payment."""
        if not os.path.exists(self.file):
            Path(self.file).write_text(str(time.time()))
        return self.model(payments)


@dataclass(frozen=True)
class Restarted:
    """Milliseconds since the job was told to stop, until the new model has scored a row, and committed an epoch."""

    first_row_ms: float
    first_epoch_ms: float


def flow(rows: int, file: str) -> Flow:
    """W1 under full load, with a model that announces itself."""
    source = Bank().payments(1_000_000, max_rows_per_epoch=rows)
    return fries_w1.flow(source, NoopSink(), Announcing(costly(1), file))


def restart(spark: SparkSession, rows: int, epoch_s: float) -> Restarted:
    """Stop and start the query in the same driver, in the middle of an epoch."""

    def again(checkpoint: str, file: str) -> None:
        with flow(rows, file).start(spark, checkpoint=checkpoint, partitions=CORES) as job:
            job.await_epoch(1)
            Path(f"{file}.committed").write_text(str(time.time()))

    return _measured(spark, rows, epoch_s, again)


def redeploy(spark: SparkSession, rows: int, epoch_s: float) -> Restarted:
    """Stop the query, and start a driver: another process, with a JVM, Spark and workers of its own."""

    def again(checkpoint: str, file: str) -> None:
        command = [sys.executable, "-m", "benchmarks.restarting", checkpoint, file, str(rows)]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True)

    return _measured(spark, rows, epoch_s, again)


def _measured(spark: SparkSession, rows: int, epoch_s: float, again: Callable[[str, str], None]) -> Restarted:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        checkpoint, file = f"{folder}/checkpoint", f"{folder}/first"
        job = flow(rows, f"{folder}/before").start(spark, checkpoint=checkpoint, partitions=CORES)
        job.await_epoch(2)
        time.sleep(epoch_s / 2)
        began = time.time()
        job.stop()
        again(checkpoint, file)
        first, committed = (float(Path(name).read_text()) for name in (file, f"{file}.committed"))
    return Restarted(1000 * (first - began), 1000 * (committed - began))


def main() -> None:
    """Be the new driver."""
    checkpoint, file, rows = sys.argv[1:]
    with (
        session() as spark,
        flow(int(rows), file).start(spark, checkpoint=checkpoint, partitions=CORES) as job,
    ):
        job.await_epoch(1)
        Path(f"{file}.committed").write_text(str(time.time()))


if __name__ == "__main__":
    main()
