"""A job that writes to PostgreSQL and is killed: ``python -m tests.simulation.upserting_job FOLDER PORT STEP MODE``.

It ends itself with SIGKILL at the given statement or commit of its sink; at no step if that is 0.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psycopg

from midstream import DatabaseSink, Flow, ListSource, State
from midstream.checkpoint.location import Checkpoint
from midstream.testing import run_local

Row = dict[str, Any]
EPOCHS: list[list[Row]] = [[{"k": "abcdef"[(7 * i + e) % 6], "n": i + e} for i in range(8)] for e in range(6)]
EPOCHS[0].append({"k": "once", "n": 5})


class Steps:
    """Counts down, and kills this process at zero."""

    left = 0

    @classmethod
    def take(cls) -> None:
        """One more step."""
        cls.left -= 1
        if cls.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Cursor(psycopg.Cursor[Any]):
    """With a step before each statement."""

    def execute(self, *args: Any, **more: Any) -> Any:
        Steps.take()
        return super().execute(*args, **more)


class Connection(psycopg.Connection[Any]):
    """With a step before and after each commit."""

    def commit(self) -> None:
        Steps.take()
        super().commit()
        Steps.take()


def add(key: str, row: Row, state: State) -> Row:
    """Keep a running total, and emit it."""
    state.set(state.get(0) + row["n"])
    return {"k": key, "n": state.get()}


def done(checkpoint: Path) -> int:
    """How many epochs are committed."""
    if not (checkpoint / "midstream.json").exists():
        return 0
    newest = Checkpoint.of_any_flow(str(checkpoint)).newest_manifest()
    return 0 if newest is None else newest.epoch + 1


def flow_to(sink: Any, epochs: list[list[Row]], *others: Any) -> Flow:
    """Totals by key go to the sinks."""
    flow = Flow("totals")
    rows = flow.source("in", ListSource(epochs, "k string, n bigint", partitions=2))
    added = rows.key_by("by k", "k").process("add", add)
    for number, target in enumerate((sink, *others)):
        added.sink(f"out {number}", target)
    return flow


def main(folder: str, port: str, step: str, mode: str) -> None:
    """Run what is left."""
    checkpoint = Path(folder, "c")

    def connect() -> Any:
        address = {"host": "127.0.0.1", "port": int(port), "user": "midstream", "dbname": "postgres"}
        return Connection.connect(**address, cursor_factory=Cursor)  # type: ignore[arg-type]

    sink = DatabaseSink(connect, "out", mode=mode, key="k" if mode == "upsert" else ())
    flow = flow_to(sink, EPOCHS[done(checkpoint) :])
    Steps.left = int(step)
    run_local(flow, checkpoint=str(checkpoint))


if __name__ == "__main__":
    main(*sys.argv[1:])
