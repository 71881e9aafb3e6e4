"""A job of a driver on several hosts, as a test sees it, and what it must have given."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hosts.cluster import RemoteDriver
from tests.hosts.counting import KEYS, ROWS, connect

__all__ = ["RunningJob"]


class RunningJob:
    """A job of a driver, with an empty table and folder of its own."""

    def __init__(self, driver: RemoteDriver, folder: Path, server: list[str], hold: int | None = None) -> None:
        self._server = server
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with connect(*server) as connection:
            connection.execute("DROP TABLE IF EXISTS out, midstream_epochs")
            connection.execute(
                "CREATE TABLE out (n bigint, k bigint, made int, counted int, seen bigint, host text, process bigint,"
                " shipped boolean, epoch int)"
            )
        self.call = driver.call
        self.call("start", str(folder), server, hold)

    def finish(self) -> dict[str, Any]:
        """Stop the job; returns what it was, having checked it."""
        found: dict[str, Any] = self.call("stop")
        with connect(*self._server) as connection:
            committed = "SELECT * FROM out WHERE epoch <= %s"
            cursor = connection.execute(committed, [found["last"]])
            names = [column.name for column in cursor.description or ()]
            found["table"] = [dict(zip(names, row, strict=True)) for row in cursor]
        as_if_nothing_had_happened(found)
        return found


def as_if_nothing_had_happened(found: dict[str, Any]) -> None:
    """Check sinks and state of a job against what its numbers must give, and that no row met a part of a change."""
    epochs = found["last"] + 1
    seen: Counter[int] = Counter()
    expected = set()
    for n in range(epochs * ROWS):
        seen[n % KEYS] += 1
        expected.add((n, n % KEYS, seen[n % KEYS], n // ROWS))
    for kind in ("table", "rows"):
        rows = found[kind]
        assert len(rows) == epochs * ROWS, f"{kind}: neither lost nor doubled"
        assert {(row["n"], row["k"], row["seen"], row["epoch"]) for row in rows} == expected, kind
        assert [row for row in rows if row["made"] != row["counted"]] == [], f"{kind}: rows that met a part of a change"
    versions = [{(row["n"], row["made"]) for row in found[kind]} for kind in ("table", "rows")]
    assert versions[0] == versions[1], "both sinks have the rows of one run"
    assert {int(key): int(value) for key, value in found["state"]} == dict(seen)
