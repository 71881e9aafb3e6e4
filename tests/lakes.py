"""Catalogs of Apache Iceberg for tests, in a database of SQLite. Needs PyIceberg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream import IcebergSink


@dataclass(frozen=True)
class Warehouse:
    """A catalog, and the folder of its tables."""

    folder: Path
    catalog: Any

    @classmethod
    @contextmanager
    def make(cls, folder: Path) -> Iterator[Warehouse]:
        """A catalog in this folder, which is made if it is missing."""
        from pyiceberg.catalog import load_catalog

        folder.mkdir(exist_ok=True)
        catalog = load_catalog("lake", **options_of(folder))
        try:
            yield cls(folder, catalog)
        finally:
            catalog.close()

    def sink(self, table: str, **options: Any) -> IcebergSink:
        """A sink for a table."""
        return IcebergSink(table, catalog="lake", catalog_options=options_of(self.folder), **options)

    def table(self, name: str) -> Any:
        """A table as it is now."""
        return self.catalog.load_table(name)


def options_of(folder: Path) -> dict[str, str]:
    """The properties of the catalog in a folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
