"""Checks that Spark's Python workers can run midstream, by asking one of them before a job starts.

Without this, a wrong ``PYSPARK_PYTHON`` would fail in the first task, with an import error deep inside Spark. The
check is one small Spark job, run once for each application and Python; the worker process that answers runs the first
tasks as well.

Workers need not have midstream. On a cluster it is always shipped, so that they run what the driver runs; on one
machine it is shipped if the worker has none, or one in another place than the driver's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from midstream.errors import SetupError
from midstream.flow.model import Graph
from midstream.runtime.spark.shipping import is_on_one_machine, ship
from midstream.runtime.spark.small_job import MOST_TASKS, ask_workers
from midstream.version import __version__

__all__ = ["require_workers"]

_log = logging.getLogger("midstream")

PATIENCE_S = 60.0
"""Seconds that a start waits for an answer. A cluster may have no executor yet; then the first task must show."""

NEEDED = {
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "pandas": "pandas",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "cloudpickle": "cloudpickle",
    "lmdb": "lmdb",
}
"""The modules that workers import, and the names of their packages for pip."""

# Runs in a worker that may lack midstream, so it travels as text. It does not import what it looks for: the process
# runs tasks later, perhaps with another midstream.
_PROBE = """
def look(_):
    import importlib.util, os, socket, sys

    missing = [name for name in names if importlib.util.find_spec(name) is None]
    found = importlib.util.find_spec("midstream")
    place = version = None
    if found is not None and found.origin is not None:
        place = os.path.dirname(os.path.realpath(found.origin))
        try:
            text = found.loader.get_data(os.path.join(os.path.dirname(found.origin), "version.py")).decode()
            version = text.partition("__version__ = ")[2].split("\\n")[0].strip("\\"' ")
        except OSError:
            pass
    yield sys.executable, tuple(sys.version_info[:3]), missing, place, version, socket.gethostname()
"""


@dataclass(frozen=True)
class WorkerPython:
    """The Python of a worker."""

    executable: str
    version: tuple[int, int, int]
    missing: tuple[str, ...]
    """Modules that are needed and cannot be imported."""
    midstream: str | None
    """The folder or archive of its midstream."""
    midstream_version: str | None
    host: str = ""


_asked: set[tuple[str, str, tuple[str, ...]]] = set()


def require_workers(context: SparkContext, graph: Graph) -> None:
    """Ship midstream where it is missing; raise :class:`SetupError` if workers could not run this graph."""
    names = tuple(dict.fromkeys([*NEEDED, *(package for op in graph for package in op.spec.requires)]))
    asked = (str(context.applicationId), str(context.pythonExec), names)
    shares_machine = is_on_one_machine(context)
    if not shares_machine:
        ship(context)
    if asked in _asked:
        return
    found = ask(context, names)
    if found is None:
        _log.warning(
            "no Python worker has answered within %g seconds, so it is not known whether %s can run midstream; the job "
            "starts nevertheless",
            PATIENCE_S,
            context.pythonExec,
        )
        return
    if shares_machine and found.midstream != _own_folder():
        ship(context)
        found = ask(context, names) or found
    if (problem := problem_of(found)) is not None:
        raise SetupError(f"{problem} {_advice(context)}", executable=found.executable)
    _asked.add(asked)


def problem_of(found: WorkerPython) -> str | None:
    """Why a worker cannot run what the driver sends, or None.

    >>> problem_of(WorkerPython("python3", sys.version_info[:3], ("lmdb", "zmq"), "/m", __version__))
    'Spark starts its Python workers with python3 (Python ...), which lacks lmdb, zmq (pip install lmdb pyzmq).'
    """
    python = ".".join(map(str, found.version))
    at = f" on {found.host!r}" if found.host else ""
    workers = f"Spark starts its Python workers{at} with {found.executable} (Python {python}), which"
    if found.version[:2] != sys.version_info[:2]:
        return f"{workers} is another version than the driver's Python {sys.version_info[0]}.{sys.version_info[1]}."
    if found.missing:
        install = " ".join(NEEDED.get(name, name) for name in found.missing)
        return f"{workers} lacks {', '.join(found.missing)} (pip install {install})."
    if found.midstream_version != __version__:
        has = "no midstream" if found.midstream is None else f"midstream {found.midstream_version}"
        return f"{workers} has {has} at {found.midstream}, while the driver has {__version__}, although it was shipped."
    return None


def ask(context: SparkContext, names: Sequence[str]) -> WorkerPython | None:
    """Ask workers: return the answer of the first one with a problem, if any has one; None if they do not all answer in
    time.

    Raises :class:`SetupError` if none can be started.
    """
    tasks = 1 if is_on_one_machine(context) else min(int(context.defaultParallelism), MOST_TASKS)
    try:
        answers = ask_workers(context, _probe(names), tasks, PATIENCE_S)
    except Exception as error:  # one of Spark's many classes of errors
        raise SetupError(
            f"Spark cannot start a Python worker with {context.pythonExec}: {reason_of(str(error))} {_advice(context)}"
        ) from error
    if answers is None:
        return None
    found = [WorkerPython(python, version, tuple(missing), *rest) for python, version, missing, *rest in answers]
    return next((each for each in found if problem_of(each) is not None), found[0])


def reason_of(story: str) -> str:
    """The line of Spark's error that shows why a worker failed.

    >>> reason_of("An error occurred\\n: org.apache.spark.SparkException: Job aborted due to stage failure\\n"
    ...           "Caused by: java.io.IOException: Cannot run program \\"python9\\": error=2\\n\\tat java.lang")
    'Cannot run program "python9": error=2.'
    """
    lines = [line.strip() for line in story.splitlines()]
    for mark in ("PYTHON_VERSION_MISMATCH", "Cannot run program", "ModuleNotFoundError", "ImportError"):
        for line in lines:
            if mark in line:
                told = line[line.index(mark) :] if mark == "Cannot run program" else line.rpartition("Exception: ")[2]
                return f"{told.rstrip('.')}."
    return f"{(lines or [''])[0][:300].rstrip('.')}."


def _probe(names: Sequence[str]) -> Any:
    """The probe as a function that is pickled by value, like those of ``__main__``."""
    space: dict[str, Any] = {"__name__": "__main__", "names": list(names)}
    exec(_PROBE, space)  # our own text
    return space["look"]


def _advice(context: SparkContext) -> str:
    return (
        f"Before the session is made, set PYSPARK_PYTHON (or spark.pyspark.python) to a Python with the same packages "
        f"as the driver's: {sys.executable}"
        + ("" if is_on_one_machine(context) else ", or its equivalent on every executor")
        + ". Now it is "
        f"{context.pythonExec}"
    )


def _own_folder() -> str:
    return str(Path(__file__).resolve().parents[2])
