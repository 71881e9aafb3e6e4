"""A SparkSession for the command line, examples and first steps. Production code brings its own session."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from midstream.errors import SetupError
from midstream.runtime.spark.doctor import REDUCE_LOCALITY, require_installed_pyspark, require_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["local_session"]

PACKAGES = "spark.jars.packages"

_LOGGING = Path(__file__).resolve().with_name("log4j2.properties")


def local_session(
    master: str = "local[*]", conf: Mapping[str, str] | None = None, packages: Sequence[str] = ()
) -> SparkSession:
    """Start Spark, or use the running session, with settings that suit one machine; ``conf`` overrides them.

    ``packages`` are Maven coordinates, such as ``"org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"``; Spark fetches
    them with what they need, once, into a cache of its own. A session that runs already cannot get any: then it raises.

    Raises :class:`SetupError` if Java or pyspark are missing or too old::

        spark = local_session("local[2]", {"spark.driver.memory": "2g"})
    """
    # Before the import, so that a missing or old pyspark leads to advice instead of a traceback.
    require_installed_pyspark()
    require_java()
    from pyspark.sql import SparkSession

    # Workers with another Python lack the packages, or cannot read this one's pickles.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if master.startswith("local"):
        # A laptop's own name often resolves to an address that it does not have at the moment.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Annotated because the class attribute is a descriptor that mypy does not see through.
    builder: SparkSession.Builder = SparkSession.builder
    builder = builder.master(master).appName("midstream")
    settings = default_conf(master) | dict(conf or {})
    if packages:
        settings[PACKAGES] = packages_conf(packages, settings.get(PACKAGES, ""))
        running = SparkSession.getActiveSession()
        if running is not None:
            require_loaded(packages, str(running.sparkContext.getConf().get(PACKAGES, "")))
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if "spark.log.level" not in (conf or {}):
        # Failures reach the user as errors of midstream; Spark would print them as well, a stack trace for each task.
        spark.sparkContext.setLogLevel("FATAL")
    _leave_jobs_alone_on_interrupt()
    return spark


def packages_conf(packages: Sequence[str], others: str = "") -> str:
    """Spark's setting for Maven coordinates, with those that it has already.

    >>> packages_conf(["org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"], "a:b:1")
    'a:b:1,org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0'
    """
    if isinstance(packages, str) or not all(re.fullmatch(r"[^\s:,]+:[^\s:,]+:[^\s:,]+", each) for each in packages):
        raise SetupError(
            f"packages={packages!r} must be a list of Maven coordinates, 'group:artifact:version', such as "
            f"['org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0']"
        )
    return ",".join([*filter(None, others.split(",")), *packages])


def require_loaded(packages: Sequence[str], loaded: str) -> None:
    """Refuse packages that a running session lacks: Spark cannot add any to it."""
    missing = [each for each in packages if each not in loaded.split(",")]
    if missing:
        raise SetupError(
            f"Spark runs already, without {', '.join(missing)}; packages are loaded when it starts. Stop the running "
            f"session first (spark.stop()), or start it with them"
        )


def default_conf(master: str) -> dict[str, str]:
    """Settings for this master: quiet, and no bigger than the machine.

    >>> default_conf("local[3]")["spark.sql.shuffle.partitions"]
    '3'
    """
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        REDUCE_LOCALITY: "false",  # so that partitions stick to executors
    }
    if master.startswith("local"):
        conf["spark.driver.host"] = "127.0.0.1"
        conf["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        conf["spark.sql.shuffle.partitions"] = str(_cores(master))
        if hasattr(socket, "AF_UNIX"):
            # Over TCP, the end of a task often waits 40 ms for an acknowledgement that the kernel holds back.
            conf["spark.python.unix.domain.socket.enabled"] = "true"
    return conf


def _cores(master: str) -> int:
    cluster = re.match(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)", master)
    if cluster:
        return int(cluster[1]) * int(cluster[2])
    threads = re.match(r"local\[\s*(\d+)", master)
    if threads:
        return int(threads[1])
    return 1 if master == "local" else os.cpu_count() or 1


def _leave_jobs_alone_on_interrupt() -> None:
    """pyspark's handler for Ctrl-C cancels all Spark jobs before it raises, which fails the running epoch.

    Python's own only raises KeyboardInterrupt, and leaves it to the program to stop its jobs in order.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
