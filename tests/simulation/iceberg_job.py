"""A job that writes a table of Apache Iceberg and is killed: ``python -m tests.simulation.iceberg_job FOLDER STEP``.

It ends itself with SIGKILL at the given step of its sink: before a table is read, and around each commit, whose files
are written before the catalog learns of them. At no step if that is 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Transaction

from tests.lakes import Warehouse
from tests.simulation import lake_job
from tests.simulation.lake_job import Steps, stepping

STEPS = ((SqlCatalog, "load_table"), (Transaction, "append"), (SqlCatalog, "commit_table"))
TABLE = "sales.lake"


def run(place: Path) -> None:
    """Run what is left of the epochs."""
    place.mkdir(exist_ok=True)
    with Warehouse.make(place / "lake") as house:
        house.catalog.create_namespace_if_not_exists("sales")
        lake_job.run(place, house.sink(TABLE))


def main(folder: str, step: str) -> None:
    """Run until it is over, or until the step."""
    with stepping(Steps(int(step)), STEPS):
        run(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
