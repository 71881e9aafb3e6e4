"""Fixtures of the tests on Spark: a check for leaks, a gate in functions, other drivers and Pythons."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check that a test leaves no query, no thread and no kept data of its jobs."""
    yield
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        return
    assert [query.name for query in session.streams.active] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("midstream")] == []
    assert kept_data(session) == 0


def kept_data(session: Any) -> int:
    """The number of RDDs or DataFrames that are kept in this application."""
    return int(session.sparkContext._jsc.getPersistentRDDs().size())


class Gate:
    """A place inside a function where it waits for the test, in whatever process it runs.

    The function calls ``gate.pass_through()``; the test waits for it with ``arrive()``, then opens the gate or kills.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self.port = self._listener.getsockname()[1]
        self._inside: list[socket.socket] = []

    @property
    def pass_through(self) -> Callable[[], None]:
        """The callable for the function. Picklable; returns when the gate is opened or closed."""
        return Passage(self.port)

    def arrive(self) -> None:
        """Wait until a function has reached the gate."""
        self._inside.append(self._listener.accept()[0])

    def open(self) -> None:
        """Let all functions pass, also those that arrive later."""
        self._listener.close()
        while self._inside:
            self._inside.pop().close()


class Passage:
    """The function's side of a gate."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.recv(1)
        except OSError:
            pass  # the gate is open


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


class Driver:
    """Another driver process that runs a function of a test module."""

    def __init__(self, function: Callable[..., None], *args: Any, **env: str) -> None:
        call = f"import sys; from {function.__module__} import {function.__name__} as f; f(*sys.argv[1:])"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", call, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, patience_s: float = PATIENCE_S) -> str:
        """Wait for its end; it must have succeeded. Returns its output."""
        out, err = self.process.communicate(timeout=patience_s)
        assert self.process.returncode == 0, f"{out}\n{err[-5000:]}"
        return out

    def kill(self) -> None:
        """End it as a power failure would, with its JVM and its workers, and wait until all of them are gone."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        self.process.kill()
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, timeout=PATIENCE_S)
        self.process.communicate()


@pytest.fixture
def driver() -> Iterator[Callable[..., Driver]]:
    """Starts other driver processes, and ends those that a failed test leaves behind."""
    with ExitStack() as stack:

        def start(function: Callable[..., None], *args: Any, **env: str) -> Driver:
            started = Driver(function, *args, **env)
            stack.callback(lambda: started.kill() if started.process.poll() is None else None)
            return started

        yield start


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python with all packages of this one except midstream."""
    home = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    # .pth files in a folder that is added like this are ignored, so an editable midstream is not found.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = home / "bin" / "python"
    probe = "import pyarrow, zmq, msgspec, importlib.util as u; print(u.find_spec('midstream'))"
    found = subprocess.run([python, "-c", probe], check=True, capture_output=True, text=True, env=bare_environment())
    assert found.stdout == "None\n"
    return python


def bare_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
