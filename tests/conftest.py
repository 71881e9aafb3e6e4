"""Fixtures shared by all tests: one SparkSession for all, and ``run``, which repeats a test on both runtimes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream import Flow
from midstream.metrics import JobMetrics
from midstream.testing import run_local, run_spark
from tests.brokers import connector_conf, kafka_broker
from tests.databases import Database, Postgres, Sqlite, postgres_server
from tests.examples import register_profiles

register_profiles()

SPARK_TESTS = Path(__file__).parent / "spark"


@pytest.hookimpl(tryfirst=True)  # xdist looks at the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in tests/spark, or asks for Spark, is marked, so that ``make test-fast`` can leave it out.

    Of the two processes that run these tests, one has the session and all tests that share it. What starts drivers of
    its own needs no session here, and is done by the other one meanwhile.
    """
    for item in items:
        if SPARK_TESTS in item.path.parents:
            item.add_marker(pytest.mark.spark)
        if {"spark", "run"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("session"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one SparkSession of the whole run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        taken = tmp_path_factory.getbasetemp().parent / "spark-session"  # a folder of all processes of this run
        try:
            taken.touch(exist_ok=False)
        except FileExistsError:
            pytest.fail("another process has the session already; processes share tests by: --dist loadgroup")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("midstream-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        # Tests are over before the JVM's second compiler would pay for itself.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        .config(map=connector_conf())
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")  # many tests make jobs fail on purpose
    yield session
    session.stop()


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., JobMetrics]:
    """Runs a flow to its end, on the local runtime and on Spark in turn, and gives its metrics."""
    if request.param == "local":
        return lambda flow, **options: run_local(flow, **options).metrics
    session = request.getfixturevalue("spark")

    def on_spark(flow: Flow, **options: Any) -> JobMetrics:
        job = run_spark(flow, session, checkpoint=str(tmp_path / "checkpoint"), **options)
        metrics: JobMetrics = job.metrics
        return metrics

    return on_spark


@pytest.fixture(scope="session")
def kafka() -> Iterator[Any]:
    """A Kafka broker for the whole run; each test has topics of its own."""
    with kafka_broker() as started:
        yield started


@pytest.fixture(scope="session")
def postgres_port() -> Iterator[int]:
    """A PostgreSQL server for the whole run."""
    with postgres_server() as port:
        yield port


@pytest.fixture
def postgres(postgres_port: int) -> Postgres:
    """A database of that server, with nothing in it."""
    database = Postgres(postgres_port, "postgres")
    own = "nspname !~ '^pg_' AND nspname != 'information_schema'"
    schemas = database.run(f"SELECT nspname FROM pg_namespace WHERE {own}")
    database.run(*(f'DROP SCHEMA "{name}" CASCADE' for (name,) in schemas), "CREATE SCHEMA public")
    return database


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty database of each kind in turn."""
    if request.param == "sqlite":
        return Sqlite(tmp_path / "database.db")
    found: Database = request.getfixturevalue("postgres")
    return found
