"""The driver of the tests on several hosts: ``python -m tests.hosts.counting MASTER [KEY=VALUE …]``.

It takes calls from standard input, one line of JSON each, and answers with one line each. So a test keeps the order of
what it does to hosts and to the job, and one session serves several jobs.

The job counts the rows of keys. Two operators with an exchange between them put their version on rows, and are only
ever changed together; so a row with two versions has met a part of a change.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from pyarrow import dataset

from midstream import DatabaseSink, FileSink, Flow, MidstreamError, State, Update, committed_files

Row = dict[str, Any]

ROWS = 200
KEYS = 24
PARTITIONS = 3
OUTCOME_S = 180.0
COLUMNS = "n bigint, k bigint, made int, counted int, seen bigint, host string, process bigint, shipped boolean"


class Make:
    """Puts its version on rows."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, row: Row) -> Row:
        """Mark a row."""
        return {**row, "made": self.version}


class Count:
    """Numbers the rows of a key, and says where. The first task to meet the row ``hold`` waits for a file;
    another one says in a file that it came, and goes on."""

    def __init__(self, version: int, folder: str = "", hold: int | None = None) -> None:
        self.version = version
        self.folder = folder
        self.hold = hold

    def __call__(self, key: int, row: Row, state: State) -> Row:
        """Count a row."""
        import socket

        import midstream

        if row["n"] == self.hold:
            self._wait(socket.gethostname())
        state.set(state.get(0) + 1)
        here = {"host": socket.gethostname(), "process": os.getpid(), "shipped": ".zip" in midstream.__file__}
        return {**row, "counted": self.version, "seen": state.get(), **here}

    def _wait(self, host: str) -> None:
        try:
            with open(f"{self.folder}/held", "x") as file:
                file.write(host)
        except FileExistsError:
            with open(f"{self.folder}/overtaken", "w") as file:
                file.write(host)
            return
        while not os.path.exists(f"{self.folder}/go"):
            time.sleep(0.05)


def connect(folder: str, port: str) -> Any:
    """A connection through the socket in a folder: the server listens on no network of these hosts."""
    import psycopg

    return psycopg.connect(host=folder, port=int(port), user="midstream", dbname="postgres")


class Driver:
    """What a test calls, by name. Everything it takes and returns is JSON."""

    def __init__(self, master: str, *settings: str) -> None:
        from pyspark.sql import SparkSession

        java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        conf = {
            "spark.driver.extraJavaOptions": java,
            "spark.executor.extraJavaOptions": java,
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.shuffle.reduceLocality.enabled": "false",
            **dict(setting.split("=", 1) for setting in settings),
        }
        builder: Any = SparkSession.builder
        self.spark = builder.master(master).config(map=conf).getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")
        self.python = self.spark.sparkContext.pythonExec
        self.job: Any = None

    def wait_for_executors(self, count: int) -> None:
        """Wait until there are this many."""
        deadline = time.monotonic() + OUTCOME_S
        while len(self.executors()) < count:
            assert time.monotonic() < deadline, f"{self.executors()}, not {count}"
            time.sleep(0.1)

    def executors(self) -> list[str]:
        """The executors that live, by the addresses of their hosts."""
        status = self.spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keys().mkString(" ").split()
        own = self.spark.conf.get("spark.driver.host")
        return sorted(each.rpartition(":")[0] for each in status if each.rpartition(":")[0] != own)

    def start(
        self,
        folder: str,
        server: list[str] | None = None,
        hold: int | None = None,
        *,
        checkpoint: str | None = None,
        out: str | None = None,
        python: str | None = None,
    ) -> None:
        """Start the job. ``server``: the socket's folder and the port of PostgreSQL, for the transactional sink."""
        if self.job is not None:
            self.job.stop()  # one that a failed test left
        self.spark.sparkContext.pythonExec = python or self.python
        self.folder = Path(folder)
        self.version = 1
        self.changes: list[Any] = []
        source = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)
        numbers = source.option("numPartitions", PARTITIONS).load().selectExpr("value AS n", f"value % {KEYS} AS k")
        flow = Flow("counting")
        made = flow.source("numbers", numbers).map("make", Make(1), adds="made int")
        counted = made.key_by("by k", "k").process("count", Count(1, folder, hold), returns=COLUMNS, one_to_one=True)
        counted.sink("files", FileSink(out or self.folder / "out"))
        if server:
            counted.sink("table", DatabaseSink(functools.partial(connect, *server), "out"))
        self.job = flow.start(self.spark, checkpoint=checkpoint or f"{folder}/checkpoint", partitions=PARTITIONS)

    def await_epochs(self, more: int, patience_s: float = OUTCOME_S) -> int:
        """Wait until the job has committed this many epochs more."""
        wanted = self.job.metrics.epochs + more
        assert self.job.await_epoch(wanted, patience_s), f"{self.job.metrics.epochs} epochs, not {wanted}"
        return self.epochs()

    def epochs(self) -> int:
        """How many epochs are committed."""
        return int(self.job.metrics.epochs)

    def change(self) -> None:
        """Ask for the next version of both operators."""
        self.version += 1
        updates = (Update("make", Make(self.version)), Update("count", Count(self.version)))
        self.changes.append(self.job.update(*updates))

    def outcomes(self) -> list[str]:
        """What became of all changes."""
        for change in self.changes:
            change.wait(OUTCOME_S)
        return [str(change.outcome.value) for change in self.changes]

    def placed(self) -> list[dict[str, Any]]:
        """The executors' parts of the job."""
        return [{"name": e.name, "partitions": e.partitions, "bins": e.bins} for e in self.job.executors]

    def stop(self) -> dict[str, Any]:
        """Stop the job; returns what it was."""
        self.job.stop()
        last = self.job.progress[-1].epoch
        rows = dataset.dataset(committed_files(str(self.folder / "out"))).to_table().to_pylist()
        return {
            "last": last,
            "commits": [(each.epoch, each.committed_at, each.duration_ms) for each in self.job.progress],
            "rows": [row for row in rows if row["epoch"] <= last],
            "state": [(row["k"], row["value"]) for row in self.job.state("count").collect()],
        }


def main(master: str, *settings: str) -> None:
    """Answer calls until there are no more."""
    driver = Driver(master, *settings)
    print(json.dumps({"found": "ready"}), flush=True)
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        try:
            answer = {"found": getattr(driver, name)(*arguments, **options)}
        except MidstreamError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        except Exception:
            answer = {"failure": traceback.format_exc()}
        print(json.dumps(answer, default=str), flush=True)
    driver.spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
