"""PyFlink, found where ``make rivals`` has put it or where a user says, and run in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from benchmarks.workloads.smq.flow import INSTANCES, RUN

__all__ = ["ENVIRONMENT", "Cycle", "Missing", "find", "run_script", "savepoint_cycles"]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build" / "rivals" / "pyflink"
"""The environment that ``make rivals`` makes."""
PATIENCE_S = 1200.0


class Missing(Exception):
    """PyFlink is not there; the message says what to do."""


def find(python: str | None = None) -> str:
    """A Python that has PyFlink: the one that is named, or that of :data:`ENVIRONMENT`. Raises :class:`Missing`."""
    command = python or str(ENVIRONMENT / "bin" / "python")
    try:
        asked = subprocess.run(
            [command, "-c", "import pyflink.version as v; print(v.__version__)"], capture_output=True
        )
        found = asked.returncode == 0
    except OSError:
        found = False
    if found:
        return command
    if python:
        raise Missing(f"{python} has no PyFlink: 'import pyflink' fails there")
    raise Missing(
        f"PyFlink is not installed, so it is left out: 'make rivals' installs it into "
        f"{ENVIRONMENT.relative_to(ROOT)} (about 850 MB), and --pyflink PYTHON names a Python that has it"
    )


def run_script(python: str, script: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a script of this folder with PyFlink's Python; gives the JSON lines that it prints. None of its processes is
    left behind."""
    folder, place = Path(given["folder"]), os.path.dirname(os.path.abspath(python))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "FLINK"))
    }
    environment |= {"PATH": f"{place}{os.pathsep}{os.environ.get('PATH', '')}", "TMPDIR": str(folder)}
    with (folder / "log").open("w+b") as log:
        started = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), json.dumps(given)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            said, _ = started.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # Flink's JVM and workers are of the same group
                os.killpg(started.pid, signal.SIGKILL)
        if started.returncode:
            log.seek(0)
            raise RuntimeError(f"PyFlink ended with {started.returncode}:\n{log.read().decode()[-4000:]}")
    return [json.loads(line) for line in said.splitlines() if line.startswith(b"{")]


@dataclass(frozen=True)
class Cycle:
    """One change by a savepoint. Seconds since 1970, and since the call of ``stop_with_savepoint``."""

    called_at: float
    savepoint_s: float
    submitted_s: float
    first_row_s: float
    """Until a row was worked on after the change."""
    pause_s: float
    """For how long no row was."""


def savepoint_cycles(
    python: str, rate: int, cost_us: float, cycles: int, steady_s: float, *, is_rescaled: bool = False
) -> list[Cycle]:
    """Insert and remove SMQ's filter by turns, or add a task and take it away. Raises if PyFlink lost a row, or counted
    one twice."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        given = {"folder": folder, "rate": rate, "cost_us": cost_us, "cycles": cycles, "steady_s": steady_s}
        given["is_rescaled"] = is_rescaled
        told = run_script(python, "smq_pyflink.py", given)
        files = [path for path in Path(folder, "out").rglob("part-*") if "inprogress" not in path.name]
        names = pacsv.ReadOptions(column_names=["n", "at", "count"])
        rows = pa.concat_tables([pacsv.read_csv(path, names) for path in files if path.stat().st_size])
    _require_exact(rows)
    stamps = np.sort(rows["at"].to_numpy())
    made = []
    for each in told:
        place = int(np.searchsorted(stamps, each["stopped_at"]))
        called = each["called_at"]
        made.append(
            Cycle(
                called,
                each["stopped_at"] - called,
                each["submitted_at"] - called,
                float(stamps[place]) - called,
                float(stamps[place] - stamps[place - 1]),
            )
        )
    return made


def _require_exact(rows: pa.Table) -> None:
    """The counts of each instance are 1, 2, 3, …"""
    instances = rows["n"].to_numpy() // RUN % INSTANCES
    order = np.lexsort((rows["count"].to_numpy(), instances))
    begins = np.flatnonzero(np.diff(instances[order], prepend=-1))
    for begin, end in pairwise([*begins, len(order)]):
        if not np.array_equal(rows["count"].to_numpy()[order][begin:end], np.arange(1, end - begin + 1)):
            raise RuntimeError(f"PyFlink has not counted instance {instances[order][begin]} one by one")
