"""SMQ on PyFlink, changed by a savepoint: stop with one, start the other plan from it, or with another parallelism.

Run by PyFlink's own Python, in its own process; knows nothing of this project:
``PYTHON smq_pyflink.py '{"folder": …, "rate": …, "cost_us": …, "cycles": …, "steady_s": …,
"is_rescaled": …}'``. Each cycle is one line
of JSON on its standard output. Rows go to files: number, stamp, count.

What can be spared Flink is spared: one cluster within the client's warm JVM for all cycles, no upload, no new client.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyflink.common import Configuration, Encoder, Types
from pyflink.datastream import KeyedProcessFunction, StreamExecutionEnvironment
from pyflink.datastream.connectors.file_system import FileSink, RollingPolicy
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.java_gateway import get_gateway
from pyflink.table import DataTypes, Schema, StreamTableEnvironment, TableDescriptor

PARALLELISM = 2
PATIENCE_S = 120.0
NTH, INSTANCES, RUN = 5, 80, 10
"""As in ``benchmarks.workloads.smq``."""


class Count(KeyedProcessFunction):  # type: ignore[misc]
    """Numbers the rows of an instance."""

    def open(self, runtime_context: Any) -> None:
        """Find the state."""
        self.seen = runtime_context.get_state(ValueStateDescriptor("seen", Types.LONG()))

    def process_element(self, value: Any, ctx: Any) -> Any:
        """Count a row."""
        seen = (self.seen.value() or 0) + 1
        self.seen.update(seen)
        yield f"{value[0]},{value[1]!r},{seen}"


def stamping(cost_us: float) -> Any:
    """What notes when a number is worked on, and costs some CPU time."""

    def stamp(row: Any) -> tuple[int, float]:
        at, until = time.time(), time.thread_time_ns() + round(1000 * cost_us)
        while time.thread_time_ns() < until:
            pass
        return row[0], at

    return stamp


def start_cluster(folder: str) -> Any:
    """A cluster within the JVM of this client; gives its address."""
    jvm = get_gateway().jvm
    settings = Configuration()
    for key, value in {"rest.port": "0", "rest.address": "localhost", "io.tmp.dirs": folder}.items():
        settings.set_string(key, value)
    mini = jvm.org.apache.flink.runtime.minicluster
    builder = mini.MiniClusterConfiguration.Builder().setConfiguration(settings._j_configuration)
    cluster = mini.MiniCluster(builder.setNumTaskManagers(1).setNumSlotsPerTaskManager(PARALLELISM).build())
    cluster.start()
    return cluster.getRestAddress().get()


def start(address: Any, given: dict[str, Any], is_other: bool, savepoint: str | None) -> Any:
    """Submit the job, with or without the filter, or with one task fewer; gives its client."""
    folder, rate = given["folder"], given["rate"]
    settings = Configuration()
    settings.set_string("execution.checkpointing.interval", "1 s")
    settings.set_string("execution.checkpointing.dir", f"file://{folder}/checkpoints")
    settings.set_string("python.executable", sys.executable)
    settings.set_string("python.client.executable", sys.executable)
    if savepoint is not None:
        settings.set_string("execution.state-recovery.path", savepoint)
    gateway = get_gateway()
    environments = gateway.jvm.org.apache.flink.streaming.api.environment.StreamExecutionEnvironment
    no_jars = gateway.new_array(gateway.jvm.String, 0)
    j_env = environments.createRemoteEnvironment(
        address.getHost(), address.getPort(), settings._j_configuration, no_jars
    )
    env = StreamExecutionEnvironment(j_env)
    is_rescaled = given.get("is_rescaled", False)
    env.set_parallelism(PARALLELISM - 1 if is_rescaled and not is_other else PARALLELISM)
    tables = StreamTableEnvironment.create(env)
    # A sequence keeps the numbers that are to come in its state: no more of them than this run can need.
    last = round(rate * (PATIENCE_S + (given["cycles"] + 1) * (given["steady_s"] + 20)))
    numbers = (
        TableDescriptor.for_connector("datagen")
        .schema(Schema.new_builder().column("n", DataTypes.BIGINT()).build())
        .option("fields.n.kind", "sequence")
        .option("fields.n.start", "0")
        .option("fields.n.end", str(last))
        .option("rows-per-second", str(rate))
    )
    tables.create_temporary_table("numbers", numbers.build())
    stamped = Types.TUPLE([Types.LONG(), Types.DOUBLE()])
    rows = tables.to_data_stream(tables.from_path("numbers")).map(stamping(given["cost_us"]), stamped).uid("stamp")
    if is_other and not is_rescaled:
        rows = rows.filter(lambda row: row[0] % NTH == 0).uid("every")
    counted = rows.key_by(lambda row: row[0] // RUN % INSTANCES, Types.LONG()).process(Count(), Types.STRING())
    files = FileSink.for_row_format(f"{folder}/out", Encoder.simple_string_encoder())
    files = files.with_rolling_policy(RollingPolicy.on_checkpoint_rolling_policy())
    counted.uid("count").sink_to(files.build()).uid("out")
    return env.execute_async("smq")


def stop(client: Any, folder: str) -> str:
    """Stop with a savepoint; gives where it is."""
    formats = get_gateway().jvm.org.apache.flink.core.execution.SavepointFormatType
    path: str = client._j_job_client.stopWithSavepoint(False, f"file://{folder}/savepoints", formats.CANONICAL).get()
    return path


def await_rows(folder: str, since: float) -> None:
    """Wait until rows of a job that was submitted at this moment are committed."""
    deadline = time.time() + PATIENCE_S
    while not any(
        each.stat().st_mtime > since for each in Path(folder, "out").rglob("part-*") if "inprogress" not in each.name
    ):
        if time.time() > deadline:
            raise TimeoutError(f"no rows for {PATIENCE_S:g} s")
        time.sleep(0.05)


def main() -> None:
    """Run all cycles."""
    given = json.loads(sys.argv[1])
    folder, is_other = given["folder"], False
    address = start_cluster(folder)
    submitted = time.time()
    client = start(address, given, is_other, None)
    await_rows(folder, submitted)
    time.sleep(given["steady_s"])
    for _ in range(given["cycles"]):
        called_at, is_other = time.time(), not is_other
        savepoint = stop(client, folder)
        stopped = time.time()
        client = start(address, given, is_other, savepoint)
        submitted = time.time()
        await_rows(folder, stopped)
        cycle = {"called_at": called_at, "stopped_at": stopped, "submitted_at": submitted, "is_other": is_other}
        print(json.dumps(cycle), flush=True)
        time.sleep(given["steady_s"])
    stop(client, folder)


if __name__ == "__main__":
    main()
