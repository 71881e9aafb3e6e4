"""Reports to users about committed and failed epochs, for both runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from midstream.control.messages import Commit, TaskFailed, TaskFailure
from midstream.engine.failure import MAX_ROW_TEXT
from midstream.errors import JobFailed, OperatorFailed
from midstream.flow.model import Sink, Source
from midstream.ids import Epoch, PartitionId
from midstream.metrics import EpochProgress, Phase
from midstream.planner.stages import Plan


def failure_of(error: OperatorFailed) -> TaskFailure:
    """The error as a message. The row is text, because the driver may lack the classes of its values."""
    row = None if error.row is None else f"{error.row!r:.{MAX_ROW_TEXT}}"
    return TaskFailure(error.operator, error.error, row, error.user_traceback)


def epoch_progress(
    plan: Plan,
    commit: Commit,
    committed_at: float,
    duration_ms: float,
    phases: tuple[Phase, ...],
    read: tuple[str, ...] = (),
) -> EpochProgress:
    """An epoch's measurements for users. Rows that go from a transform straight to a sink are not counted.

    ``read`` says how far sources are read; streams that Spark treats as one source are left out.
    """
    inlets = plan.stages[0].inlets
    stats = {each.operator: each for each in commit.operators}
    sinks = {op.name for op in plan.graph.of(Sink)}
    written = {wire.id: len(sinks & set(wire.consumers)) for wire in plan.wires if wire.target is None}
    return EpochProgress(
        epoch=commit.epoch,
        revision=commit.revision,
        committed_at=committed_at,
        duration_ms=duration_ms,
        operators=tuple(stats[op.name] for op in plan.graph if op.name in stats),
        rows_in=sum(stats[op.name].rows_in for op in plan.graph.of(Source) if op.name in stats),
        rows_out=sum(rows * written.get(wire, 0) for wire, rows in commit.emitted.items()),
        phases=phases,
        state_read=commit.state_read,
        offsets=dict(zip(inlets, read, strict=True)) if len(read) == len(inlets) else {},
    )


def explain(name: str, epoch: Epoch, error: BaseException, failures: tuple[TaskFailed, ...]) -> JobFailed:
    """The failure of the user's code, if a task or a sink on the driver reported one; else Spark's, shortened."""
    if failures:
        last = failures[-1]
        return _users_failure(name, epoch, last.task.partition, last.failure)
    if isinstance(error, OperatorFailed):
        return _users_failure(name, epoch, None, failure_of(error))
    return error if isinstance(error, JobFailed) else unexpected(name, epoch, error)


def cause_of(failed: JobFailed) -> str:
    """Why a run failed, for the record of a change that is rolled back: the job itself continues."""
    fields = failed.fields
    if "operator" not in fields:
        return f"epoch {fields['epoch']} failed: {fields['cause']}" if "cause" in fields else str(failed)
    row = "" if fields["row"] is None else f"\n  row: {fields['row']}"
    return (
        f"operator {fields['operator']!r} failed in {_place(fields['epoch'], fields['partition'])}: {fields['error']}"
        f"{row}\n\n{fields['user_traceback']}"
    )


def _place(epoch: Epoch, partition: PartitionId | None) -> str:
    return f"epoch {epoch}" if partition is None else f"epoch {epoch}, partition {partition}"


def _users_failure(name: str, epoch: Epoch, partition: PartitionId | None, failure: TaskFailure) -> JobFailed:
    row = f"\n  row: {failure.row}" if failure.row is not None else ""
    return JobFailed(
        f"job {name!r} failed in operator {failure.operator!r}, {_place(epoch, partition)}: {failure.error}"
        f"{row}\n\n{failure.traceback}\n\nThe epoch was not committed. After a fix, start the flow again with the same "
        f"checkpoint: the epoch runs again, and nothing is missing or doubled.",
        operator=failure.operator,
        epoch=epoch,
        partition=partition,
        row=failure.row,
        error=failure.error,
        user_traceback=failure.traceback,
    )


def unexpected(
    name: str, epoch: Epoch | None, error: BaseException, offsets: Mapping[str, str] = MappingProxyType({})
) -> JobFailed:
    """Any other failure, shortened. ``offsets`` says how far sources were read."""
    where = "" if epoch is None else f" in epoch {epoch}"
    cause = summary(error)
    hint = _topic_hint(offsets) if UNKNOWN_TOPIC in cause else ""
    return JobFailed(f"job {name!r} failed{where}: {cause}{hint}", epoch=epoch, cause=cause)


UNKNOWN_TOPIC = "UnknownTopicOrPartitionException"


def _topic_hint(offsets: Mapping[str, str]) -> str:
    read = "; ".join(f"source {name!r} up to {text}" for name, text in offsets.items())
    return (
        f"\n\nKafka has no such topic, or no longer: it was deleted, or its name is wrong. Read so far: "
        f"{read or 'nothing'}. A job cannot go on without a topic that it has begun to read; start with a new "
        f"checkpoint, or bring the topic back with its records."
    )


def summary(error: BaseException, limit: int = 2_000) -> str:
    """An error in a few lines.

    Spark's errors have whole stack traces: the JVM's, where the first lines matter, or Python's, where the last do.
    """
    text = str(error)
    java: Any = getattr(error, "java_exception", None)
    if java is not None:
        text = str(java.getMessage() or text)
    text = text.partition("=== Streaming Query ===")[0]  # what Spark adds to every failure: its plan and its state
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
    if len(lines) > 12:
        lines = [*lines[:4], "…", *lines[-8:]]
    return f"{type(error).__name__}: " + "\n".join(lines)[:limit]
