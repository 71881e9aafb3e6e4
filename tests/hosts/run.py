"""Measures how long a job waits after a fault of a host or of the network: ``python -m tests.hosts.run [--quick]``.

Each line is a fault of a cluster of three hosts on this machine; see :mod:`tests.hosts.network`. The wait is the
longest time between two commits around the fault. Spark has its usual settings; with ``--given-up`` it gives up an
executor that it does not hear of after other than 120 seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.databases import Postgres, postgres_server
from tests.hosts.cluster import WORKERS, Cluster, RemoteDriver, remote_driver, standalone_cluster
from tests.hosts.network import Host
from tests.hosts.running import RunningJob

CUTS_S = (1.0, 5.0, 15.0, 30.0, 60.0)
QUICK_S = (1.0, 5.0)
LONGEST_S = 400.0


@dataclass(frozen=True)
class Wait:
    """What was measured of a fault."""

    fault: str
    usual_s: float
    longest_s: float | None
    """None if the job failed."""
    after_it_s: float | None
    """From the end of the fault to the next commit, if the fault has an end."""


class Measurement:
    """A cluster and a driver, whose jobs meet one fault each."""

    def __init__(self, cluster: Cluster, driver: RemoteDriver, server: list[str]) -> None:
        self._cluster = cluster
        self._driver = driver
        self._server = server

    def wait(self, fault: str, cause: Callable[[], float | None]) -> Wait:
        """Run a job; ``cause`` does what is to be done to it, and returns when it was over, if it has an end."""
        self._driver.call("wait_for_executors", len(WORKERS))
        job = RunningJob(self._driver, self._cluster.shared / "job", self._server)
        job.call("await_epochs", 10)
        began = time.time()
        ended = cause()
        try:
            job.call("await_epochs", 5, LONGEST_S)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return Wait(fault, 0.0, None, None)
        commits = [at for _, at, _ in job.finish()["commits"]]
        gaps = [(after - before, after) for before, after in pairwise(commits)]
        usual = sorted(gap for gap, after in gaps if after < began)[5]
        after = None if ended is None else next(at for at in commits if at > ended) - ended
        return Wait(fault, usual, max(gap for gap, at in gaps if at > began), after)

    def cut(self, seconds: float, other: str) -> Wait:
        """A cut between the host of an executor and another host."""

        def cause() -> float:
            with self._cluster.network.cut(self._workers()[0], self._end(other)):
                time.sleep(seconds)  # that is how long the cut is
            return time.time()

        return self.wait(f"cut for {seconds:g} s between an executor and {other}", cause)

    def killed_workers(self) -> Wait:
        """All Python workers of an executor are killed."""
        return self.wait("Python workers of an executor are killed", lambda: self._kill("pyspark.daemon"))

    def killed_executor(self) -> Wait:
        """The Java process of an executor is killed."""
        return self.wait("an executor is killed", lambda: self._kill("CoarseGrainedExecutorBackend", "--executor-id"))

    def stopped_host(self) -> Wait:
        """A host is stopped for good, as by a lost cable: nobody closes its connections."""

        def cause() -> None:
            self._cluster.network.unplug(self._workers()[0])

        return self.wait("a host loses its network for good", cause)

    def _kill(self, *words: str) -> None:
        for process in self._workers()[0].processes(*words):
            process.kill()

    def _workers(self) -> list[Host]:
        addresses = self._driver.call("executors")
        return [host for host in self._cluster.workers if host.address in addresses]

    def _end(self, other: str) -> Host:
        return self._cluster.host("driver") if other == "the driver" else self._workers()[1]


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short cuts only")
    parser.add_argument("--cuts", type=float, nargs="+", default=CUTS_S, help="seconds that cuts last")
    parser.add_argument("--given-up", type=int, default=120, help="seconds: spark.network.timeout")
    options = parser.parse_args()
    interval = max(1, min(10, options.given_up // 8))
    settings = {
        "spark.network.timeout": f"{options.given_up}s",
        "spark.network.timeoutInterval": f"{max(1, min(60, options.given_up // 8))}s",
        "spark.executor.heartbeatInterval": f"{interval}s",
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midstream-hosts-")))
        port = stack.enter_context(postgres_server())
        [[socket]] = Postgres(port, "postgres").run("SHOW unix_socket_directories")
        cluster = stack.enter_context(standalone_cluster(folder))
        driver = stack.enter_context(remote_driver(cluster, "tests.hosts.counting", **settings))
        driver.call("wait_for_executors", len(WORKERS))
        of = Measurement(cluster, driver, [socket, str(port)])
        cuts = QUICK_S if options.quick else options.cuts
        faults: list[Callable[[], Wait]] = [of.killed_workers, of.killed_executor]
        for other in ("the driver", "another one"):
            faults += [partial(of.cut, seconds, other) for seconds in cuts]
        if not options.quick:
            faults.append(of.stopped_host)
        waits = []
        for fault in track(faults, "Faults", console=Console(stderr=True)):
            waits.append(fault())
            print(waits[-1], file=sys.stderr)
    shown = Table("fault", "an epoch takes", "longest wait", "of it after the fault", title="Waits for a commit")
    for wait in waits:
        after = "" if wait.after_it_s is None else f"{wait.after_it_s:.1f} s"
        longest = "the job fails" if wait.longest_s is None else f"{wait.longest_s:.1f} s"
        shown.add_row(wait.fault, f"{wait.usual_s:.2f} s", longest, after)
    Console(width=120).print(shown)
    print(json.dumps({"hosts": {wait.fault: wait.longest_s for wait in waits}, "settings": settings}))


if __name__ == "__main__":
    main()
