"""Jobs on a standalone cluster of three hosts whose network is cut, and that stop or die.

The hosts share one folder, for checkpoints and files of sinks, and nothing else. Whatever happens to them, sinks and
state equal those of a run in which nothing happened: `RunningJob.finish` compares.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.databases import Postgres, postgres_server
from tests.hosts.cluster import UNLIKE, WORKERS, Cluster, Refusal, RemoteDriver, remote_driver, standalone_cluster
from tests.hosts.counting import KEYS, PARTITIONS, ROWS
from tests.hosts.network import TEMPORARY, why_not
from tests.hosts.running import RunningJob
from tests.spark.conftest import PATIENCE_S

# All of these share a cluster, so they are run by one process. The last tests leave it with fewer hosts.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE_S), pytest.mark.xdist_group("hosts")]

GIVEN_UP_S = 8
"""Seconds after which Spark gives up an executor that it does not hear of; its own default is 120."""
SPARK_PORTS, PORT = (7080, 7081), 7100
SETTINGS = {
    # As behind NAT: workers know the driver by a name that it does not know itself, and certain ports are open.
    "spark.driver.host": "driver",
    "spark.driver.bindAddress": "0.0.0.0",
    "spark.driver.port": str(SPARK_PORTS[0]),
    "spark.driver.blockManager.port": str(SPARK_PORTS[1]),
    "spark.midstream.port": str(PORT),
    "spark.network.timeout": f"{GIVEN_UP_S}s",
    "spark.network.timeoutInterval": "1s",
    "spark.executor.heartbeatInterval": "1s",
}

StartJob = Callable[..., RunningJob]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server() -> Iterator[list[str]]:
    """PostgreSQL: the folder of its socket, and its port."""
    with postgres_server() as port:
        [[folder]] = Postgres(port, "postgres").run("SHOW unix_socket_directories")
        yield [folder, str(port)]


@pytest.fixture(scope="module")
def driver(cluster: Cluster) -> Iterator[RemoteDriver]:
    with remote_driver(cluster, "tests.hosts.counting", **SETTINGS) as driver:
        driver.call("wait_for_executors", len(WORKERS))
        yield driver


@pytest.fixture
def start(driver: RemoteDriver, cluster: Cluster, server: list[str], request: pytest.FixtureRequest) -> StartJob:
    """Starts a job in the session that most tests share."""

    def start(hold: int | None = None) -> RunningJob:
        driver.call("wait_for_executors", len(WORKERS))
        return RunningJob(driver, cluster.shared / request.node.originalname, server, hold)

    return start


def test_code_is_shipped_and_partitions_stay_on_their_hosts(start: StartJob, cluster: Cluster) -> None:
    job = start()
    job.call("await_epochs", 3)  # what an epoch runs on is known when it is over
    began = job.call("epochs")
    job.call("await_epochs", 8)
    placed = job.call("placed")
    found = job.finish()
    assert all(row["shipped"] for row in found["rows"])
    where = Counter((row["k"], row["host"]) for row in found["rows"] if row["epoch"] > began)
    assert len(where) == KEYS, "each key has one host"
    used = {host for _, host in where}
    assert len(used) >= 2, "Spark spreads partitions over the hosts that are ready when the first epoch runs"
    assert sorted(number for each in placed for number in each["partitions"].get("1", ())) == list(range(PARTITIONS))
    for name in used:
        assert cluster.host(name).run("find", f"{TEMPORARY}/work", "-name", "midstream-state"), (
            "each has state of its own"
        )


def test_a_setup_that_cannot_work_is_refused_before_anything_is_written(
    driver: RemoteDriver, cluster: Cluster, tmp_path: Path
) -> None:
    driver.call("wait_for_executors", len(WORKERS))
    folder, private = cluster.shared / "bad", cluster.shared / "private"

    def refusal(**options: str) -> str:
        with pytest.raises(Refusal) as refused:
            driver.call("start", str(folder), **options)
        assert not folder.exists()
        assert list(private.iterdir()) == []
        return str(refused.value)

    found = refusal(checkpoint=f"{private}/checkpoint", out=f"{folder}/out")
    assert re.search(
        rf"^CheckpointError: the checkpoint '{private}/checkpoint' is not shared: executor \d+ on '\w+' cannot read "
        r"there what the driver wrote .* must be storage that the driver and all executors share",
        found,
    )
    found = refusal(out=f"{private}/out")
    assert f"CheckpointError: the folder '{private}/out' of sink 'files' is not shared: executor" in found
    found = refusal(python=f"{cluster.folder}/software/uneven/bin/python")
    assert re.search(rf"^SetupError: Spark starts its Python workers on '{UNLIKE}' with .* lacks .*pyarrow", found)
    with cluster.network.closed_ports(cluster.host("green"), cluster.host("driver"), f"{PORT}-{PORT + 100}"):
        found = refusal()
    assert re.search(
        rf"^SetupError: executor \d+ on 'green' cannot reach the coordinator .* connect to tcp://driver:{PORT}\. .*"
        r"spark\.midstream\.port",
        found,
    )


@pytest.mark.parametrize("seconds", [2, 7, 15], ids=["unnoticed", "noticed by the channel", "given up by Spark"])
def test_a_cut_between_an_executor_and_the_driver(start: StartJob, cluster: Cluster, seconds: int) -> None:
    """With a change during the cut: every row is processed wholly before or wholly after it."""
    job = start()
    job.call("await_epochs", 3)
    ends = cluster.host("driver"), next(host for host in cluster.workers if host.address in job.call("executors"))
    with cluster.network.cut(*ends):
        job.call("change")
        time.sleep(seconds)  # that is how long the cut is
    job.call("await_epochs", 3)
    assert job.call("outcomes") == ["applied"]
    found = job.finish()
    assert {row["counted"] for row in found["rows"]} == {1, 2}


def test_a_host_that_was_stopped_past_the_fence_cannot_commit_anything(start: StartJob, cluster: Cluster) -> None:
    """Its task writes state and a file of the sink, and reports, when its epoch was committed without it long ago."""
    epoch = 4
    job = start(hold=epoch * ROWS + 7)
    held = wait_for(job.folder / "held")
    host = cluster.host(held)
    thaw = host.freeze()
    job.call("await_epochs", epoch + 3)
    written = deltas(job.folder, epoch)
    (job.folder / "go").touch()
    # First the task alone. If its executor went on as well, Spark might kill the task before it has reported.
    for process in host.processes("pyspark.daemon"):
        process.resume()
    wait_until(lambda: deltas(job.folder, epoch) - written, "the task has written what it changed of the state")
    job.call("await_epochs", 3)
    thaw()
    job.call("await_epochs", 3)
    found = job.finish()
    assert held not in {row["host"] for row in found["rows"] if row["n"] == epoch * ROWS + 7}
    used = {row["host"] for row in found["rows"] if row["epoch"] == found["last"]}
    assert len(used) >= 2


def test_a_cut_between_two_executors(start: StartJob, cluster: Cluster) -> None:
    """Neither can fetch what the other one has for it; both still reach the driver."""
    job = start()
    job.call("await_epochs", 3)
    ends = [host for host in cluster.workers if host.address in job.call("executors")][:2]
    with cluster.network.cut(*ends):
        job.call("change")
        time.sleep(7)  # that is how long the cut is
    job.call("await_epochs", 3)
    assert job.call("outcomes") == ["applied"]
    job.finish()


@pytest.mark.cluster
@pytest.mark.parametrize("ends", ["killed by Spark", "together with the other one"])
def test_a_task_that_hangs_is_overtaken_by_a_speculative_one(cluster: Cluster, server: list[str], ends: str) -> None:
    """Both attempts are at work at a time, on two hosts, and write; whatever they wrote counts once."""
    epoch = 4
    hold = epoch * ROWS + 7
    with remote_driver(cluster, "tests.hosts.counting", **{"spark.speculation": "true"}) as driver:
        driver.call("wait_for_executors", len(WORKERS))
        job = RunningJob(driver, cluster.shared / "speculation", server, hold)
        held = wait_for(job.folder / "held")
        if ends == "together with the other one":
            wait_until((job.folder / "overtaken").exists, "another attempt has come to that row")
            (job.folder / "go").touch()
        job.call("await_epochs", epoch + 3)
        found = job.finish()
    other = (job.folder / "overtaken").read_text()
    assert other != held
    if ends == "killed by Spark":
        assert {row["host"] for row in found["rows"] if row["n"] == hold} == {other}


def test_hosts_that_are_lost_for_good(start: StartJob, cluster: Cluster) -> None:
    """One loses its power. Another one loses its network, but goes on, and still reaches the shared folder."""
    job = start()
    job.call("await_epochs", 3)
    one, other, *_ = [host for host in cluster.workers if host.address in job.call("executors")]
    one.kill()
    job.call("change")
    job.call("await_epochs", 3)
    cluster.network.unplug(other)
    job.call("change")
    job.call("await_epochs", 3)
    assert job.call("outcomes") == ["applied", "applied"]
    found = job.finish()
    last = {row["host"] for row in found["rows"] if row["epoch"] == found["last"]}
    assert last == {host.name for host in cluster.workers} - {one.name, other.name}


def wait_for(path: Path) -> str:
    """Wait for a file with something in it."""
    wait_until(lambda: path.exists() and path.read_text(), f"there is a file {path.name}")
    return path.read_text()


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not seen in {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


def deltas(folder: Path, epoch: int) -> set[str]:
    """The files of state that tasks have written in an epoch and that are still there."""
    return {path.name for path in (folder / "checkpoint" / "state" / "count").glob(f"{epoch:010d}-*")}
