"""A job that writes a table of Apache Iceberg and is killed: ``python -m tests.simulation.iceberg_job FOLDER STEP``.

It ends itself with SIGKILL at the given step of its sink: before a table is read, and around each commit, whose files
are written before the catalog learns of them. At no step if that is 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Transaction

from tests.lakes import Warehouse
from tests.simulation import lake_job
from tests.simulation.lake_job import Steps

STEPS = ((SqlCatalog, "load_table"), (Transaction, "append"), (SqlCatalog, "commit_table"))
TABLE = "sales.lake"


@contextmanager
def stepping(steps: Steps) -> Iterator[None]:
    """Take a step before and after each of PyIceberg's calls that reads or changes a table."""

    def with_steps(call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **options: Any) -> Any:
            steps.take()
            found = call(*args, **options)
            steps.take()
            return found

        return stepped

    with ExitStack() as patched:
        for kind, name in STEPS:
            patched.enter_context(patch.object(kind, name, with_steps(getattr(kind, name))))
        yield


def run(place: Path) -> None:
    """Run what is left of the epochs."""
    place.mkdir(exist_ok=True)
    with Warehouse.make(place / "lake") as house:
        house.catalog.create_namespace_if_not_exists("sales")
        lake_job.run(place, house.sink(TABLE))


def main(folder: str, step: str) -> None:
    """Run until it is over, or until the step."""
    with stepping(Steps(int(step))):
        run(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
