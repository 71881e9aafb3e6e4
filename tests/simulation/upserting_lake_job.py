"""A job that upserts into a lake and is killed: ``python -m tests.simulation.upserting_lake_job FOLDER STEP LAKE``.

It ends itself with SIGKILL at the given step of its sink: before and after a table is opened, read or changed. At no
step if that is 0. ``LAKE`` is ``delta`` or ``iceberg``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deltalake
from deltalake.table import TableMerger

from midstream import DeltaSink
from midstream.testing import run_local
from tests.lakes import Warehouse
from tests.simulation import iceberg_job
from tests.simulation.lake_job import Steps, stepping
from tests.simulation.upserting_job import EPOCHS, done, flow_to

STEPS = {
    "delta": (
        (deltalake.DeltaTable, "__init__"),
        (deltalake.DeltaTable, "to_pyarrow_dataset"),
        (TableMerger, "execute"),
        (deltalake, "write_deltalake"),
    ),
    "iceberg": iceberg_job.STEPS,
}


@contextmanager
def sink_of(lake: str, folder: Path) -> Iterator[tuple[Any, Any]]:
    """A sink, and what reads the rows of its table."""
    folder.mkdir(exist_ok=True, parents=True)
    if lake == "delta":
        path = folder / "lake"
        yield DeltaSink(path, mode="upsert", key="k"), lambda: deltalake.DeltaTable(path).to_pyarrow_table()
        return
    with Warehouse.make(folder / "lake") as house:
        house.catalog.create_namespace_if_not_exists("sales")
        sink = house.sink(iceberg_job.TABLE, mode="upsert", key="k")
        yield sink, lambda: house.table(iceberg_job.TABLE).scan().to_arrow()


def run(folder: Path, lake: str, *others: Any, epochs: int = len(EPOCHS), **options: Any) -> Any:
    """Run what is left of the first epochs."""
    with sink_of(lake, folder) as (sink, _):
        flow = flow_to(sink, EPOCHS[done(folder / "c") : epochs], *others)
        return run_local(flow, checkpoint=str(folder / "c"), **options)


def main(folder: str, step: str, lake: str) -> None:
    """Run until it is over, or until the step."""
    with stepping(Steps(int(step)), STEPS[lake]):
        run(Path(folder), lake)


if __name__ == "__main__":
    main(*sys.argv[1:])
