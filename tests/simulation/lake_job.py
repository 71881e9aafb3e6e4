"""A job that writes a table of Delta Lake and is killed: ``python -m tests.simulation.lake_job FOLDER STEP``.

It ends itself with SIGKILL at the given step of its sink: before a table is opened, before and after a commit, and when
the writer asks for rows. At no step if that is 0.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deltalake
import pyarrow as pa

from midstream import DeltaSink, Flow, IcebergSink, ListSource, State
from midstream.checkpoint.location import Checkpoint
from midstream.testing import run_local

Row = dict[str, Any]
EPOCHS: list[list[Row]] = [[{"k": "abcdef"[(7 * i + e) % 6], "n": i + e} for i in range(8)] for e in range(4)]


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts the steps of a sink, and ends the job at one of them."""

    def __init__(self, last: int, end: Callable[[], None] = kill) -> None:
        self.taken = 0
        self._last = last
        self._end = end
        self._write, self._open = deltalake.write_deltalake, deltalake.DeltaTable

    def take(self) -> None:
        """One more step."""
        self.taken += 1
        if self.taken == self._last:
            self._end()

    def open(self, *args: Any, **options: Any) -> Any:
        """Open a table."""
        self.take()
        return self._open(*args, **options)

    def write(self, table: Any, rows: pa.RecordBatchReader, **options: Any) -> None:
        """Commit rows."""
        self.take()
        self._write(table, rows, **options)
        self.take()

    def write_reading(self, table: Any, rows: pa.RecordBatchReader, **options: Any) -> None:
        """Commit rows, with a step whenever the writer asks for some."""

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in rows:
                self.take()
                yield batch

        self.write(table, pa.RecordBatchReader.from_batches(rows.schema, batches()), **options)


@contextmanager
def stepping(steps: Steps, calls: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Take a step before and after each of these calls of a package."""

    def with_steps(call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **options: Any) -> Any:
            steps.take()
            found = call(*args, **options)
            steps.take()
            return found

        return stepped

    with ExitStack() as patched:
        for holder, name in calls:
            patched.enter_context(patch.object(holder, name, with_steps(getattr(holder, name))))
        yield


def add(key: str, row: Row, state: State) -> Row:
    """Keep a running total; emit what a row adds to it."""
    state.set(state.get(0) + row["n"])
    return row


def done(checkpoint: Path) -> int:
    """The number of committed epochs."""
    if not (checkpoint / "midstream.json").exists():
        return 0
    newest = Checkpoint.of_any_flow(str(checkpoint)).newest_manifest()
    return 0 if newest is None else newest.epoch + 1


def run(place: Path, sink: DeltaSink | IcebergSink | None = None) -> None:
    """Run what is left of the epochs. Writes a table of Delta Lake unless a sink is given."""
    flow = Flow("lake")
    rows = flow.source("in", ListSource(EPOCHS[done(place / "c") :], "k string, n bigint", partitions=2))
    rows.key_by("by k", "k").process("add", add).sink("lake", sink or DeltaSink(place / "lake"))
    run_local(flow, partitions=2, checkpoint=str(place / "c"))


def main(folder: str, step: str) -> None:
    """Run until it is over, or until the step."""
    steps = Steps(int(step))
    vars(deltalake)["write_deltalake"] = steps.write_reading
    run(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
