"""A standalone cluster of Spark: a master, workers and a host for drivers, each on a host of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark

from tests.hosts.network import Host, Network, network

__all__ = ["WORKERS", "Cluster", "standalone_cluster"]

WORKERS = ("red", "green", "blue")
SPARK = Path(pyspark.__file__).parent
PATIENCE_S = 60.0
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
def standalone_cluster(folder: Path, *, private: Sequence[Path] = ()) -> Iterator[Cluster]:
    """Start a cluster. Its workers' Python lacks midstream, and they have folders of their own at ``private``."""
    shared, software = folder / "shared", folder / "software"
    shared.mkdir(exist_ok=True)
    software.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        joined = stack.enter_context(network(folder / "hosts", shared, software))
        joined.add("driver")
        master = joined.add("master")
        python = python_without_midstream(software / "python")
        cluster = Cluster(joined, folder, shared)
        run = ["org.apache.spark.deploy.master.Master", "--host", master.address, "--port", str(MASTER_PORT)]
        stack.enter_context(_daemon(cluster, master, run, python))
        for name in WORKERS:
            host = joined.add(name, private)
            run = ["org.apache.spark.deploy.worker.Worker", "--host", host.address, "--cores", "1", "--memory", "1g"]
            stack.enter_context(_daemon(cluster, host, [*run, "--work-dir", "/tmp/work", cluster.master], python))
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


def _wait_for(cluster: Cluster, name: str, words: str, times: int) -> None:
    """Wait until a daemon has logged something often enough."""
    deadline = time.monotonic() + PATIENCE_S
    while cluster.log(name).count(words) < times:
        assert time.monotonic() < deadline, f"{name} does not say {words!r} {times} times:\n{cluster.log(name)}"
        time.sleep(0.1)


def python_without_midstream(home: Path) -> Path:
    """A Python with all packages of this one except midstream."""
    if not home.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        [packages] = home.glob("lib/python*/site-packages")
        # .pth files in a folder that is added like this are ignored, so an editable midstream is not found.
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin" / "python"
