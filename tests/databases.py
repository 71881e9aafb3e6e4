"""Databases for tests: an SQLite file, and a separate PostgreSQL server.

The server is Debian's ``postgresql``, in a temporary folder, on a free port. It refuses to run as root, so root starts
it as another user. If it or its driver is missing, tests that need it are skipped with that reason.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from examples.kafka.ports import free_ports
from midstream import DatabaseSink

USERS = ("postgres", "nobody")
"""Users as whom root may start a server."""


class Database(Protocol):
    """The interface of a database in tests."""

    def connect(self) -> Any:
        """A new connection, created as users would."""

    def connect_with_autocommit(self) -> Any:
        """One that a DatabaseSink must refuse."""

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements and commit; return the rows of the last one."""

    def sink(self, table: Any = "out", **options: Any) -> DatabaseSink:
        """A sink that writes here."""


class _Base:
    def connect(self) -> Any:
        raise NotImplementedError

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            rows = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
        return rows

    def sink(self, table: Any = "out", **options: Any) -> DatabaseSink:
        return DatabaseSink(self.connect, table, **options)


@dataclass(frozen=True)
class Sqlite(_Base):
    """A file. It does not sync, because machines do not crash in these tests."""

    path: Path

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def connect_with_autocommit(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, isolation_level=None)


@dataclass(frozen=True)
class Postgres(_Base):
    """A database on a server."""

    port: int
    name: str

    def connect(self, **options: Any) -> Any:
        import psycopg

        return psycopg.connect(host="127.0.0.1", port=self.port, user="midstream", dbname=self.name, **options)

    def connect_with_autocommit(self) -> Any:
        return self.connect(autocommit=True)


@contextlib.contextmanager
def postgres_server() -> Iterator[int]:
    """Start a server and return its port. Skips the test if there is none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed, which DatabaseSink reaches PostgreSQL with")
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL server on this machine; on Debian: apt-get install postgresql")
    who = _whom()
    folder = Path(tempfile.mkdtemp(prefix="midstream-postgres-"))  # pytest's own folders are closed to other users
    try:
        if who:
            shutil.chown(folder, who["user"])
        data = str(folder / "data")
        _run([programs / "initdb", "-D", data, "-U", "midstream", "-A", "trust", "-E", "UTF8", "--no-sync"], who)
        [port] = free_ports(1)
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        control = [programs / "pg_ctl", "-D", data, "-w", "-t", "180", "-l", str(folder / "log")]
        _run([*control, "-o", options, "start"], who)
        try:
            yield port
        finally:
            _run([*control, "-m", "immediate", "stop"], who)
    finally:
        shutil.rmtree(folder)


def _programs() -> Path | None:
    """The folder with pg_ctl: from the path, or where Debian puts the newest version."""
    if (found := shutil.which("pg_ctl")) and shutil.which("initdb"):
        return Path(found).parent
    versions = Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")
    return max((path.parent for path in versions), key=lambda path: float(path.parent.name), default=None)


def _whom() -> dict[str, Any]:
    """The user to run a server as, for :func:`subprocess.run`."""
    if os.geteuid() != 0:
        return {}
    for name in USERS:
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip(f"PostgreSQL refuses to run as root, and there is no user {' or '.join(USERS)} to run it as")


def _run(command: list[Any], who: dict[str, Any]) -> None:
    # The server inherits its output; with a pipe we would wait for it to end.
    done = subprocess.run(
        list(map(str, command)), cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, **who
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}"
