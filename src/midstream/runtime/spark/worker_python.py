"""Whether Spark's Python workers can run midstream: one of them is asked before a job starts.

Without this, a wrong ``PYSPARK_PYTHON`` is told by the first task, as an import error deep inside of Spark. The
question is one small Spark job, asked once for each application and Python; the worker process that answers serves the
first tasks as well.

Workers need not have midstream. On a cluster it is always shipped, so that they run what the driver runs; on one
machine it is shipped if the worker has none, or one that lies elsewhere than the driver's.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import InheritableThread, SparkContext

from midstream.errors import SetupError
from midstream.flow.model import Graph
from midstream.runtime.spark.shipping import is_on_one_machine, ship
from midstream.version import __version__

__all__ = ["require_workers"]

_log = logging.getLogger("midstream")

PATIENCE_S = 60.0
"""How long a start waits for an answer. A cluster may have no executor yet; then the first task must tell."""

NEEDED = {
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "pandas": "pandas",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "cloudpickle": "cloudpickle",
    "lmdb": "lmdb",
}
"""What workers import, and what it is called where it is installed."""

# Runs in a worker that may lack midstream, so it travels as text. It imports nothing of what it looks for: the process
# runs tasks later, perhaps with another midstream.
_PROBE = """
def look(names):
    import importlib.util, os, sys

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
    return sys.executable, tuple(sys.version_info[:3]), missing, place, version
"""


@dataclass(frozen=True)
class WorkerPython:
    """What a Python worker has."""

    executable: str
    version: tuple[int, int, int]
    missing: tuple[str, ...]
    """Modules that are needed and cannot be imported."""
    midstream: str | None
    """The folder or archive of its midstream."""
    midstream_version: str | None


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
            "starts all the same",
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
    """Why a worker could not run what the driver sends, if so.

    >>> problem_of(WorkerPython("python3", sys.version_info[:3], ("lmdb", "zmq"), "/m", __version__))
    'Spark starts its Python workers with python3 (Python ...), which lacks lmdb, zmq (pip install lmdb pyzmq).'
    """
    python = ".".join(map(str, found.version))
    workers = f"Spark starts its Python workers with {found.executable} (Python {python}), which"
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
    """What a worker has; None if none answers in time. Raises :class:`SetupError` if none can be started."""
    answers: list[Any] = []
    failures: list[Exception] = []
    tag = f"midstream-probe-{uuid.uuid4().hex}"

    def run() -> None:
        context.addJobTag(tag)
        try:
            answers.extend(context.parallelize([list(names)], 1).map(_probe()).collect())
        except Exception as error:  # Spark's, in whichever of its many clothes
            failures.append(error)

    thread = InheritableThread(target=run, name="midstream-probe", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if answers:
        executable, version, missing, place, number = answers[0]
        return WorkerPython(executable, version, tuple(missing), place, number)
    if failures:
        raise SetupError(
            f"Spark cannot start a Python worker with {context.pythonExec}: {reason_of(str(failures[0]))} "
            f"{_advice(context)}"
        ) from failures[0]
    context.cancelJobsWithTag(tag)
    return None


def reason_of(story: str) -> str:
    """The line of Spark's story that tells why a worker failed.

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


def _probe() -> Any:
    """The question as a function that is pickled by value, as those of ``__main__`` are."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(_PROBE, space)  # our own text
    return space["look"]


def _advice(context: SparkContext) -> str:
    return (
        f"Let PYSPARK_PYTHON (or spark.pyspark.python) name, before the session is made, a Python that has what the "
        f"driver's has: {sys.executable}"
        + ("" if is_on_one_machine(context) else ", or its like on every executor")
        + ". Now it is "
        f"{context.pythonExec}"
    )


def _own_folder() -> str:
    return str(Path(__file__).resolve().parents[2])
