"""Checks that everything midstream needs is installed, for ``midstream doctor`` and for a job before it starts.

Looking (`diagnose` and the functions that begin with ``_find``) is separate from judging (those that begin with
``judge``), so that every verdict can be tested on a machine that has everything, or nothing. pyspark is imported only
when it is checked: its absence is a finding, not a crash.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.errors import SetupError

__all__ = ["Finding", "diagnose", "require_installed_pyspark", "require_java", "require_pyspark"]

PYTHON = (3, 11)
JAVA = 17
PYSPARK = ((4, 2), (5,))
FREE_DISK_GB = 1.0
MEMORY_GB = 2.0
REDUCE_LOCALITY = "spark.shuffle.reduceLocality.enabled"
"""If it is on, as it is by default, Spark runs a task on a host that has much of its input, and not where the state of
its keys is."""

_INSTALL_JAVA = (
    f"Install Java {JAVA} or newer: on Debian or Ubuntu `sudo apt-get install openjdk-17-jre-headless` (Debian 13 and "
    f"later: openjdk-21-jre-headless), on Fedora `sudo dnf install java-21-openjdk-headless`, on macOS `brew install "
    f"openjdk@17`. If it is installed already, set JAVA_HOME to its folder, the one that holds bin/java."
)
INSTALL_PYSPARK = "Install it with `pip install 'midstream[spark]'`, or use a cluster with Spark 4.2 or later."
# Why not 4.1: it passes its Python sources no start and no limit, and does not tell them the trigger.
_SPARK_4_1 = "Spark 4.1 would end an available-now run after its first epoch, as if it had read everything. "


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``advice`` is what to do; it is empty if all is well."""

    what: str
    ok: bool
    found: str
    advice: str = ""


@dataclass(frozen=True)
class JavaProbe:
    """The answer of ``java -version``. ``path`` is ``None`` if there is no java."""

    home: str | None
    path: str | None
    answer: str = ""


def diagnose() -> list[Finding]:
    """Run all checks, in the order in which problems are best solved."""
    return [
        judge_python(sys.version_info[:3]),
        judge_java(_find_java()),
        _judge_import("pyspark", *PYSPARK, INSTALL_PYSPARK),
        _judge_import("pandas", (2, 2), (3,), "Spark needs it: `pip install 'pandas>=2.2,<3'`."),
        _judge_import("pyarrow", (18,), None, "Install it with `pip install 'pyarrow>=18'`."),
        _judge_import("msgspec", (0, 19), None, "Install it with `pip install 'msgspec>=0.19'`."),
        _judge_import("cloudpickle", (3, 1), None, "Install it with `pip install 'cloudpickle>=3.1'`."),
        _judge_import("zmq", (26,), None, "Install it with `pip install 'pyzmq>=26'`."),
        judge_curve(_find_curve()),
        _judge_temporary_folder(),
        judge_disk(_find_free_disk()),
        Finding("cores", True, str(_find_cores())),
        judge_memory(_find_memory()),
        judge_reduce_locality(_find_default(REDUCE_LOCALITY)),
    ]


def require_java() -> None:
    """Raise :class:`SetupError` unless Spark will find a Java it can use. A running JVM is proof enough."""
    if _jvm_runs():
        return
    finding = judge_java(_find_java())
    if not finding.ok:
        raise SetupError(f"Spark cannot start: found {finding.found}. {finding.advice}")


def require_installed_pyspark() -> None:
    """Raise :class:`SetupError` unless there is a pyspark that midstream works with.

    To be called before anything else of pyspark is imported: other versions lack some of the names.
    """
    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError as error:
        raise SetupError(f"pyspark cannot be imported ({error}). {INSTALL_PYSPARK}") from error
    require_pyspark(str(pyspark.__version__))


def require_pyspark(version: str) -> None:
    """Raise :class:`SetupError` unless midstream works with this version of pyspark.

    >>> require_pyspark("4.3.0")
    """
    finding = judge_package("pyspark", version, *PYSPARK, INSTALL_PYSPARK)
    if not finding.ok:
        why = _SPARK_4_1 if numbers_of(version)[:2] == (4, 1) else ""
        raise SetupError(f"pyspark {version} cannot run a flow. {why}{finding.advice}", version=version)


# Judging: pure.


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> numbers_of("4.2.0.dev3"), numbers_of("27.3rc1"), numbers_of("unknown")
    ((4, 2, 0), (27, 3), ())
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def java_version(answer: str) -> int | None:
    """The major version in the output of ``java -version``; ``None`` if it has none.

    >>> java_version('openjdk version "21.0.2" 2024-01-16'), java_version('java version "1.8.0_391"')
    (21, 8)
    """
    found = re.search(r'version "(?:1\.(?=\d))?(\d+)', answer)
    return int(found[1]) if found else None


def judge_python(version: Sequence[int]) -> Finding:
    """The version of Python."""
    ok = tuple(version) >= PYTHON
    wanted = _dotted(PYTHON)
    advice = "" if ok else f"midstream needs Python {wanted} or newer: make a virtual environment with a newer one."
    return Finding("Python", ok, _dotted(version), advice)


def judge_java(probe: JavaProbe) -> Finding:
    """The Java that Spark would start: the one in JAVA_HOME if that is set, else the first on PATH."""
    if probe.path is None:
        where = f"no bin/java in JAVA_HOME ({probe.home})" if probe.home else "no java on PATH, and no JAVA_HOME"
        return Finding("Java", False, where, _INSTALL_JAVA)
    version = java_version(probe.answer)
    if version is None:
        said = probe.answer.strip().splitlines()[:1] or ["nothing"]
        return Finding("Java", False, f"{probe.path}, which says: {said[0]}", _INSTALL_JAVA)
    ok = version >= JAVA
    return Finding("Java", ok, f"{version} ({probe.path})", "" if ok else _INSTALL_JAVA)


def judge_package(
    name: str, version: str, minimum: tuple[int, ...], below: tuple[int, ...] | None, advice: str
) -> Finding:
    """The version of a package that could be imported."""
    numbers = numbers_of(version)
    ok = numbers >= minimum and (below is None or numbers < below)
    allowed = f"{_dotted(minimum)} or later" + (f", before {_dotted(below)}" if below else "")
    return Finding(name, ok, version, "" if ok else f"midstream needs {name} {allowed}. {advice}")


def judge_curve(available: bool) -> Finding:
    """Whether ZeroMQ can encrypt, which the channel between coordinator and tasks needs."""
    advice = (
        "" if available else "This libzmq lacks CURVE; `pip install --force-reinstall pyzmq` installs one that has it."
    )
    return Finding("zmq CURVE", available, "available" if available else "missing", advice)


def judge_disk(free_gb: float | None) -> Finding:
    """Disk space for shuffles and temporary checkpoints."""
    if free_gb is None:
        return Finding("free disk", True, "unknown")
    ok = free_gb >= FREE_DISK_GB
    advice = "" if ok else f"Spark shuffles through the temporary folder; free at least {FREE_DISK_GB:g} GB there."
    return Finding("free disk", ok, f"{free_gb:.1f} GB", advice)


def judge_memory(total_gb: float | None) -> Finding:
    """Memory for a JVM and the Python workers."""
    if total_gb is None:
        return Finding("memory", True, "unknown")
    ok = total_gb >= MEMORY_GB
    advice = "" if ok else f"A JVM and its Python workers need {MEMORY_GB:g} GB; set spark.driver.memory low."
    return Finding("memory", ok, f"{total_gb:.1f} GB", advice)


def judge_reduce_locality(default: str | None) -> Finding:
    """Whether partitions stick to executors in sessions that users make. Everything works without, so it is no error.

    >>> judge_reduce_locality("false").found
    'in every session, by spark-defaults.conf'
    """
    where = "in every session, by spark-defaults.conf"
    if (default or "true").lower() != "false":
        where = f"in sessions of local_session; on a cluster make yours with {REDUCE_LOCALITY}=false"
    return Finding("sticky partitions", True, where)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


# Looking.


def _find_java() -> JavaProbe:
    home = os.environ.get("JAVA_HOME") or None
    # Spark's own scripts never fall back to PATH once JAVA_HOME is set.
    path = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if path is None:
        return JavaProbe(home, None)
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return JavaProbe(home, path, str(error))
    return JavaProbe(home, path, done.stderr + done.stdout)


def _jvm_runs() -> bool:
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    # spark-submit starts the JVM first and passes its port to Python.
    return getattr(context, "_gateway", None) is not None or "PYSPARK_GATEWAY_PORT" in os.environ


def _judge_import(name: str, minimum: tuple[int, ...], below: tuple[int, ...] | None, advice: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        # A broken package may raise anything at import, and that is the finding.
        return Finding(name, False, f"cannot be imported ({type(error).__name__}: {error})", advice)
    return judge_package(name, str(getattr(module, "__version__", "unknown")), minimum, below, advice)


def _find_curve() -> bool:
    try:
        zmq = importlib.import_module("zmq")
    except Exception:
        return False
    return bool(zmq.has("curve"))


def _judge_temporary_folder() -> Finding:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"midstream")
    except OSError as error:
        return Finding("temporary folder", False, str(error), "Set TMPDIR to a folder that can be written to.")
    return Finding("temporary folder", True, tempfile.gettempdir())


def _find_free_disk() -> float | None:
    try:
        return shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    except OSError:
        return None


def _find_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find_default(key: str) -> str | None:
    """The value of a setting in Spark's file of defaults, if there is one."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (str(Path(home, "conf")) if home else None)
    if folder is None:
        return None
    try:
        lines = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = [words for line in lines if (words := re.split(r"[\s=]+", line.strip(), maxsplit=1))[0] == key]
    return found[-1][1].strip() if found and len(found[-1]) > 1 else None


def _find_memory() -> float | None:
    """Memory of the machine, or of the container if that has less."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits) / 2**30
