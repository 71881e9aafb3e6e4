"""For tests of flows: run a flow without a JVM, with a seed and a clock that the test controls.

>>> from midstream import Flow, ListSource, MemorySink
>>> flow, out = Flow("doubles"), MemorySink()
>>> numbers = flow.source("numbers", ListSource([[{"n": 1}, {"n": 2}]], "n bigint"))
>>> numbers.map("double", lambda row: {"n": 2 * row["n"]}).sink("out", out)
>>> run = run_local(flow, seed=7)
>>> out.rows, run.metrics.epochs
([{'n': 2}, {'n': 4}], 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.engine.clock import Clock, ManualClock
from midstream.flow.sinks import MemorySink
from midstream.flow.sources import ListSource
from midstream.operators.builder import Flow
from midstream.runtime.local.run import ChangeAt, ControlAt, Faults, LocalRun, MigrateAt
from midstream.runtime.local.runtime import run_graph

__all__ = [
    "ChangeAt",
    "ControlAt",
    "Faults",
    "ListSource",
    "LocalRun",
    "ManualClock",
    "MemorySink",
    "MigrateAt",
    "run_local",
    "run_spark",
]


def run_local(
    flow: Flow,
    *,
    partitions: int = 2,
    bins: int | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    clock: Clock | None = None,
    checkpoint: str | None = None,
    changes: Sequence[ChangeAt | MigrateAt | ControlAt] = (),
    audit: str | None = None,
    durable: bool = False,
    close_windows: bool = False,
    executors: int = 1,
) -> LocalRun:
    """Run a flow over all epochs of its sources in this process, and return when it is done.

    Compiler, stage runner, coordinator and state are the same as on Spark. ``seed`` decides how tasks are interleaved
    and slices cut; ``faults`` crash tasks and the driver, repeat messages and re-run epochs. The result must not depend
    on any of these, except for the order of rows of different keys. Raises what a job on Spark would raise.

    With a ``checkpoint`` (a folder), a run continues with the state of an earlier one: the first epoch of its sources
    follows the last epoch of that run. ``changes``, migrations (:class:`MigrateAt`) and control operations
    (:class:`ControlAt`) are made during the run, each at a moment of its epoch that the seed decides. With ``audit``,
    a column that identifies the source's rows, the run records which row met which operator under which revision, for
    :mod:`midstream.audit`. ``durable`` makes the checkpoint survive a power failure, as on Spark by default; tests
    rarely need that.

    ``bins`` is the number of bins of a new job; see :meth:`Flow.start`.

    With ``close_windows``, one more epoch without rows closes all windows at the end; see :meth:`Flow.start`.

    With several ``executors``, each has its own copy of the state of its partitions, as the executors of a cluster do.

    >>> from midstream import Update
    >>> flow, out = Flow("doubles"), MemorySink()
    >>> numbers = flow.source("numbers", ListSource([[{"n": 1}], [{"n": 1}], [{"n": 1}]], "n bigint"))
    >>> numbers.map("double", lambda row: {"n": 2 * row["n"]}).sink("out", out)
    >>> run = run_local(flow, changes=[ChangeAt.of(1, Update("double", lambda row: {"n": -2}))])
    >>> out.rows[0], out.rows[2], str(run.history[0].outcome)
    ({'n': 2}, {'n': -2}, 'applied')
    """
    return run_graph(
        flow.graph,
        partitions=partitions,
        bins=bins,
        seed=seed,
        faults=faults,
        clock=clock,
        checkpoint=checkpoint,
        changes=changes,
        audit=audit,
        durable=durable,
        close_windows=close_windows,
        executors=executors,
    )


def run_spark(
    flow: Flow,
    spark: Any,
    *,
    checkpoint: str,
    partitions: int | None = None,
    timeout: float = 120.0,
    close_windows: bool = False,
) -> Any:
    """Run a flow on Spark until its sources are exhausted, and return the finished job.

    Together with :func:`run_local` this lets one test body run on both runtimes: build the flow, run it on either, and
    compare the contents of its :class:`MemorySink`.
    """
    job = flow.start(
        spark, checkpoint=checkpoint, trigger="available-now", partitions=partitions, close_windows=close_windows
    )
    try:
        if not job.await_termination(timeout):
            raise TimeoutError(f"flow {flow.name!r} did not end within {timeout:g} s; is one of its sources endless?")
    finally:
        job.stop()
    return job
