"""A standalone cluster of Spark: a master, workers and a host for drivers, each on a host of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyspark

from tests.hosts.network import TEMPORARY, Host, Network, network

__all__ = ["UNLIKE", "WORKERS", "Cluster", "Refusal", "RemoteDriver", "remote_driver", "standalone_cluster"]

WORKERS = ("red", "green", "blue")
UNLIKE = "blue"
"""The host that has no packages in one of its Pythons."""
SPARK = Path(pyspark.__file__).parent
_PACKAGES = sysconfig.get_paths()["purelib"]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
ANSWER_S = 600.0
"""Calls have patience of their own, and say what they waited for."""
MASTER_PORT = 7077
WORKER_TIMEOUT_S = 10
"""Seconds after which the master gives up a worker that it does not hear of."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster. ``shared`` is the one folder that all hosts share."""

    network: Network
    folder: Path
    shared: Path

    @property
    def master(self) -> str:
        """The URL for a session."""
        return f"spark://{self.host('master').address}:{MASTER_PORT}"

    @property
    def workers(self) -> tuple[Host, ...]:
        """The hosts that run executors."""
        return tuple(self.host(name) for name in WORKERS)

    def host(self, name: str) -> Host:
        """A host: ``driver``, ``master``, or one of the workers."""
        return self.network.hosts[name]

    def log(self, name: str) -> str:
        """What the master or a worker has logged."""
        return (self.folder / f"{name}.log").read_text()


@contextlib.contextmanager
def standalone_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster. Its workers' Python lacks midstream.

    It has two traps: each worker has a folder of its own at ``private`` in the shared one; and at ``uneven`` there is a
    Python like that of the others, but on one host it has no packages.
    """
    shared, software = folder / "shared", folder / "software"
    private = shared / "private"
    private.mkdir(parents=True)
    software.mkdir()
    python = python_with(software / "python", _PACKAGES)
    uneven, bare = software / "uneven", software / "bare"
    python_with(uneven, _PACKAGES)
    python_with(bare, "")
    with contextlib.ExitStack() as stack:
        joined = stack.enter_context(network(folder / "hosts", shared, software))
        joined.add("driver")
        master = joined.add("master")
        cluster = Cluster(joined, folder, shared)
        run = ["org.apache.spark.deploy.master.Master", "--host", master.address, "--port", str(MASTER_PORT)]
        stack.enter_context(_daemon(cluster, master, run, python))
        for name in WORKERS:
            host = joined.add(name, [private], {uneven: bare} if name == UNLIKE else {})
            run = ["org.apache.spark.deploy.worker.Worker", "--host", host.address, "--cores", "2", "--memory", "2g"]
            stack.enter_context(
                _daemon(cluster, host, [*run, "--work-dir", f"{TEMPORARY}/work", cluster.master], python)
            )
        _wait_for(cluster, "master", "Registering worker", len(WORKERS))
        yield cluster


@contextlib.contextmanager
def _daemon(cluster: Cluster, host: Host, run: list[str], python: Path) -> Iterator[None]:
    options = f"-Dspark.worker.timeout={WORKER_TIMEOUT_S} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")},
        "SPARK_HOME": str(SPARK),
        "SPARK_LOCAL_IP": host.address,
        "SPARK_DAEMON_MEMORY": "200m",
        "SPARK_DAEMON_JAVA_OPTS": options,
        "PYSPARK_PYTHON": str(python),
    }
    with open(cluster.folder / f"{host.name}.log", "wb") as log:
        process = subprocess.Popen(
            host.command(str(SPARK / "bin" / "spark-class"), *run, "--webui-port", "0"),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/",
        )  # fmt: skip
    try:
        yield
    finally:
        family = [process_of for process_of in [psutil.Process(process.pid)] if process_of.is_running()]
        for each in family:
            for child in each.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait(PATIENCE_S)


class Refusal(Exception):
    """midstream has refused a call in a driver."""


class RemoteDriver:
    """A driver on the cluster's host for drivers, which takes calls. See :mod:`tests.hosts.counting`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._answer(PATIENCE_S)

    @property
    def log(self) -> str:
        """What it and its Spark have logged."""
        return self._log.read_text()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Have it call something, and return the result. Raises :class:`Refusal` for an error of midstream."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments, options]) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def _answer(self, patience_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], patience_s)
        assert ready, f"no answer within {patience_s:g} s:\n{self.log[-5000:]}"
        line = self._process.stdout.readline()
        assert line, f"the driver has ended:\n{self.log[-5000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise Refusal(answer["error"])
        assert "failure" not in answer, answer["failure"]
        return answer["found"]


@contextlib.contextmanager
def remote_driver(cluster: Cluster, module: str, **settings: str) -> Iterator[RemoteDriver]:
    """Start a driver: a module that takes calls, with a session on the cluster."""
    host = cluster.host("driver")
    # One executor on each host, so that there is room for another driver's.
    size = {"spark.cores.max": str(len(WORKERS)), "spark.executor.cores": "1"}
    conf = {"spark.driver.host": host.address, **size, **settings}
    command = [sys.executable, "-m", module, cluster.master, *(f"{key}={value}" for key, value in conf.items())]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "PYSPARK_PYTHON": str(cluster.folder / "software" / "python" / "bin" / "python"),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": host.address,
    }
    path = cluster.folder / f"driver-{len(list(cluster.folder.glob('driver-*.log')))}.log"
    with open(path, "w") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *host.beside(*command)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT, text=True,
        )  # fmt: skip
    family = psutil.Process(process.pid)
    try:
        yield RemoteDriver(process, path)
    finally:
        for child in family.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.communicate()


def _wait_for(cluster: Cluster, name: str, words: str, times: int) -> None:
    """Wait until a daemon has logged something often enough."""
    deadline = time.monotonic() + PATIENCE_S
    while cluster.log(name).count(words) < times:
        assert time.monotonic() < deadline, f"{name} does not say {words!r} {times} times:\n{cluster.log(name)}"
        time.sleep(0.1)


def python_with(home: Path, packages: str) -> Path:
    """A Python with the packages in a folder, but without midstream."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [own] = home.glob("lib/python*/site-packages")
    # .pth files in a folder that is added like this are ignored, so an editable midstream is not found.
    (own / "dependencies.pth").write_text(f"{packages}\n")
    return home / "bin" / "python"
