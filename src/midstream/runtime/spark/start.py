"""Starts a flow on Spark: all checks come first, and nothing is written before they have passed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from midstream.change.configuration import FIRST_REVISION, configuration_left, first_configuration
from midstream.change.knob_records import after_tuning
from midstream.change.migration_restart import migrations_that_go_on, stop_migrations
from midstream.change.trial import Changes
from midstream.checkpoint.audit_files import check_audit
from midstream.checkpoint.location import Checkpoint
from midstream.controllers.controller import Controller
from midstream.data.durations import microseconds
from midstream.data.key_space import MAX_BINS, check_bins
from midstream.errors import CheckpointError, FlowError, SetupError
from midstream.flow.knobs import require_takers, values_of
from midstream.flow.model import Graph, Transform
from midstream.flow.table_refresh import TableRefresh
from midstream.ids import StageIndex
from midstream.planner.assignment import Assignment, Assignments, check_partitions
from midstream.planner.programs import pack_blobs
from midstream.runtime import job_start
from midstream.runtime.controller_desk import require_controllers
from midstream.runtime.spark.control_plane import ControlPlane
from midstream.runtime.spark.doctor import require_pyspark
from midstream.runtime.spark.executor_check import PORT, require_executors
from midstream.runtime.spark.job import HttpInterface, Job
from midstream.runtime.spark.kafka import EpochNotes, check_topics
from midstream.runtime.spark.pace import RowLimit, require_pace
from midstream.runtime.spark.queries import Queries, source_stream
from midstream.runtime.spark.storage_check import hadoop_knows, require_reachable
from midstream.runtime.spark.transform_check import check_transforms
from midstream.runtime.spark.worker_python import require_workers
from midstream.runtime.table_refresher import TableRefresher
from midstream.state.local_folder import check_local_state

AVAILABLE_NOW = "available-now"
KEEP, DROP = "keep", "drop"
RELAYS = "spark.midstream.relays"
"""The setting of a session that says whether workers are told of changes through relays: auto, true or false."""
AUTO = "auto"
MANY_WORKERS = 256
"""With so many, relays are used unless the session says otherwise."""

_log = logging.getLogger("midstream")


def start(
    graph: Graph,
    spark: SparkSession,
    *,
    checkpoint: str,
    trigger: str | None = None,
    partitions: int | None = None,
    bins: int | None = None,
    local_state: str | None = None,
    changes: str = "keep",
    audit: str | None = None,
    server: Callable[[Job, str], HttpInterface] | None = None,
    revert_to: int | None = None,
    durable: bool = True,
    close_windows: bool = False,
    refreshes: Mapping[str, TableRefresh] | None = None,
    knobs: Mapping[str, str | int] | None = None,
    controllers: Sequence[Controller] = (),
) -> Job:
    """Start a validated graph on a session. See :meth:`midstream.Flow.start`."""
    # 1. Check: nothing is written, nothing runs yet.
    require_classic_session(spark)
    trigger_options = parse_trigger(trigger)
    if close_windows and trigger != AVAILABLE_NOW:
        raise FlowError(
            f"close_windows=True is for a run that ends by itself, with trigger={AVAILABLE_NOW!r}; found "
            f"trigger={trigger!r}"
        )
    if changes not in (KEEP, DROP):
        raise FlowError(f"changes={changes!r} is not known; allowed: {KEEP!r}, {DROP!r}")
    check_revert_to(revert_to, changes)
    require_controllers(controllers)
    set_knobs = values_of(knobs or {})
    require_takers(graph, set_knobs)
    trigger_us = microseconds(trigger)
    require_pace(set_knobs.get("pace"), trigger_us)
    check_audit(graph, audit)
    if local_state is not None and str(spark.sparkContext.master).startswith("local"):
        check_local_state(local_state)  # on a cluster, each worker checks its own
    if bins is not None:
        check_bins(bins)
    if partitions is not None:
        check_partitions(partitions, MAX_BINS)  # how many bins there are is known below
    require_workers(spark.sparkContext, graph)
    row_limit = RowLimit()
    for source in graph.sources:
        source_stream(spark, source, graph.payloads[source], row_limit)
    blobs = pack_blobs(graph)
    check_transforms(graph, [op.name for op in graph.of(Transform)], spark)
    check_topics(spark, graph)
    location = Checkpoint.look(str(checkpoint), graph, bins=bins, durable=durable)
    if partitions is not None:
        check_partitions(partitions, location.identity.bins)
    query_name = f"{graph.name} {location.identity.job}"
    require_not_running(spark, query_name, location)
    require_reachable(graph, location, hadoop_knows(spark))
    free_folders = job_start.check(graph, location, drops=changes == DROP)
    with contextlib.ExitStack() as undo:
        control = open_control_plane(spark)
        undo.callback(control.close)
        require_executors(spark.sparkContext, control.address, graph, location)
        # 2. Claim the checkpoint, and the sinks' folders and tables.
        location.claim()
        undo.callback(location.release)
        graph = job_start.claim(graph, location, free_folders)
        # 3. Store the blobs that workers will fetch.
        newest = location.newest_manifest()
        parallelism = min(int(spark.sparkContext.defaultParallelism), location.identity.bins)
        before = None if newest is None else configuration_left(newest, location.blobs)
        first = first_configuration(
            graph,
            location.blobs,
            partitions or parallelism,
            blobs,
            recorded={} if before is None else _kept_assignments(before.assignments, partitions, parallelism),
            before=before,
            bins=location.identity.bins,
            knobs=after_tuning({}, set_knobs),
        )
        restart = job_start.restart(first, location, drops=changes == DROP, revert_to=revert_to)
        if changes == DROP:
            stop_migrations(location.changes, "the job was started with changes='drop'; its bins stay where they were")
        elif partitions is not None:
            stop_migrations(location.changes, f"the job was started with partitions={partitions}")
        for message in migrations_that_go_on(location.changes):
            _log.warning("%s", message)
        for message in restart.messages:
            _log.warning("%s", message)
        # 4. Run.
        state = Changes(restart.configuration, location.blobs, location.changes)
        if restart.pending is not None:
            state.resume(restart.pending)
        # Changes may have added or removed sources, and the driver may have died before Spark's log was theirs.
        reading = state.configuration.graph
        job_start.settle_sources(location, reading)
        notes = EpochNotes(spark, location.identity.job)
        undo.callback(notes.close)
        if newest is not None:  # a crash may have come before readers were told
            notes.start(restart.configuration.graph, newest.epoch)
        queries = Queries(spark, location, query_name, trigger_options, row_limit, close_windows)
        row_limit.set(restart.configuration.knobs.get("rows_per_epoch"))
        undo.callback(row_limit.close)
        job = Job(
            spark,
            state,
            location,
            control,
            notes,
            local_state=local_state,
            audit=audit,
            queries=queries,
            trigger_us=trigger_us,
            row_limit=row_limit,
            controllers=controllers,
        )
        # Served before its query starts, because that may end at any moment.
        serving = None if server is None else server(job, location.location)
        if serving is not None:
            undo.callback(serving.close)
        digests = {name: blobs[name].digest for name in refreshes or ()}
        refresher = TableRefresher(job, state.newest, dict(refreshes), digests) if refreshes else None
        job.started(queries.start(reading, job.on_epoch), serving, refresher)
        undo.pop_all()  # from now on the job itself releases all this
    return job


def check_revert_to(revert_to: int | None, changes: str) -> None:
    """Refuse a value that is not a revision, and a contradiction with ``changes``."""
    if revert_to is None:
        return
    if type(revert_to) is not int or revert_to < FIRST_REVISION:
        raise FlowError(f"revert_to={revert_to!r} must be the number of a revision; 'midstream history' lists them")
    if changes == DROP:
        raise FlowError(
            f"revert_to={revert_to} and changes={DROP!r} contradict each other: one goes back to what the job ran at a "
            f"revision, the other to the script. Pass only one of them"
        )


def require_not_running(spark: SparkSession, name: str, location: Checkpoint) -> None:
    """Refuse a second job on a checkpoint that this application is using already."""
    if any(query.name == name or query.name.startswith(f"{name} ") for query in spark.streams.active if query.name):
        raise CheckpointError(
            f"a job is running on the checkpoint {location.location!r} already; stop it first, or use another one"
        )


def require_classic_session(spark: Any) -> None:
    """Refuse what is not a SparkSession, Spark Connect, and versions that are not supported."""
    if not isinstance(spark, SparkSession):
        if type(spark).__module__.startswith("pyspark.sql.connect"):
            raise SetupError(
                "this is a Spark Connect session; midstream runs in the driver and needs a classic session, e.g. "
                "SparkSession.builder.master('local[*]').getOrCreate() or spark-submit"
            )
        raise FlowError(f"the first argument of start() must be a SparkSession, found {type(spark).__name__}")
    require_pyspark(pyspark.__version__)


def parse_trigger(trigger: str | None) -> dict[str, Any]:
    """A trigger as arguments for Spark.

    >>> parse_trigger("500 ms")
    {'processingTime': '500 milliseconds'}
    """
    if trigger is None:
        return {}
    if trigger == AVAILABLE_NOW:
        return {"availableNow": True}
    if (interval := microseconds(trigger)) is not None:
        # Spark takes neither "ms" nor "s", and no fractions of most units: milliseconds cover them all.
        return {"processingTime": f"{round(interval / 1000)} milliseconds"}
    raise FlowError(
        f"trigger {trigger!r} is not known; allowed: None (as fast as possible), '500 ms', '10 seconds', "
        f"{AVAILABLE_NOW!r}"
    )


def _kept_assignments(recorded: Assignments, partitions: int | None, parallelism: int) -> dict[StageIndex, Assignment]:
    """The assignments of the last committed epoch that this start keeps; logs it where that may surprise.

    Without ``partitions`` it keeps all. A number applies to every stage: stages that have it keep their assignment, and
    the others spread their keys again. Either way state is found, because it is stored by bin.
    """
    if partitions is None:
        counts = sorted({each.partitions for each in recorded.values()})
        if counts and counts != [parallelism]:
            _log.warning(
                "the job continues with %s partitions in the stages behind an exchange, as in its last epoch; this "
                "session runs %d tasks at a time. Start with partitions=%d to use them",
                " and ".join(map(str, counts)),
                parallelism,
                parallelism,
            )
        return dict(recorded)
    for stage, before in recorded.items():
        if before.partitions != partitions:
            _log.info("stage %d has %d partitions from now on; it had %d", stage, partitions, before.partitions)
    return {stage: before for stage, before in recorded.items() if before.partitions == partitions}


def open_control_plane(spark: SparkSession) -> ControlPlane:
    """The coordinator of a job, at an address that tasks reach; in local mode nothing outside this machine needs it.

    On a cluster it listens where Spark's own driver does, and tasks are told what Spark tells its executors.
    """
    conf = spark.sparkContext.getConf()
    relays = wants_relays(str(spark.conf.get(RELAYS, AUTO)), int(spark.sparkContext.defaultParallelism))
    if str(spark.sparkContext.master).startswith("local"):
        return ControlPlane("127.0.0.1", relays=relays)
    port = str(conf.get(PORT, "0"))
    if not (port.isdigit() and int(port) < 65_536):
        raise SetupError(f"{PORT}={port!r} must be the number of a TCP port, or 0 for any that is free")
    return ControlPlane(
        str(conf.get("spark.driver.host", "127.0.0.1")),
        bind=conf.get("spark.driver.bindAddress"),
        port=int(port),
        relays=relays,
    )


def wants_relays(setting: str, cores: int) -> bool:
    """Whether a job's workers are to use relays, by the setting :data:`RELAYS` and the number of tasks at a time.

    >>> wants_relays("auto", 16), wants_relays("auto", 1_024), wants_relays("true", 2)
    (False, True, True)
    """
    if setting not in (AUTO, "true", "false"):
        raise SetupError(f"{RELAYS}={setting!r} must be '{AUTO}', 'true' or 'false'")
    return setting == "true" or (setting == AUTO and cores >= MANY_WORKERS)
