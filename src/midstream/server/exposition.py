"""A job's observation as metrics for Prometheus: the text format 0.0.4, or OpenMetrics 1.0.

Names and units follow Prometheus: seconds and bytes, ratios from 0 to 1 and above, counters that end in ``_total`` and
begin at zero with each start of the job. Labels are names from the flow, never keys or values of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from midstream.metrics import Histogram
from midstream.observation import Observation
from midstream.version import __version__

__all__ = ["FAMILIES", "OPENMETRICS", "TEXT", "Family", "exposition", "format_wanted"]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

BUCKETS_S = tuple(2.0**power / 1000 for power in range(21))
"""Upper bounds of the latency buckets: from 1 ms, doubling, to 17 minutes. Our own histograms have these bounds,
too."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Family:
    """Metrics of one name. Counters are named without their ``_total`` here."""

    name: str
    kind: str
    help: str

    @property
    def unit(self) -> str:
        """The unit that its name ends with, if any."""
        last = self.name.rpartition("_")[2]
        return last if last in ("seconds", "bytes", "ratio") else ""


def _family(name: str, kind: str, help: str) -> Family:
    return Family(f"midstream_{name}", kind, help)


JOB = _family("job", "info", "Which job this is; always 1.")
EPOCHS = _family("epochs", "counter", "Epochs committed since the job was started.")
ROWS_IN = _family("rows_in", "counter", "Rows of all sources.")
ROWS_OUT = _family("rows_out", "counter", "Rows for all sinks.")
EPOCH_TIME = _family("epoch_time_seconds", "counter", "Time in which epochs were running.")
EPOCH = _family("epoch", "gauge", "Number of the last committed epoch.")
REVISION = _family("revision", "gauge", "Revision of the job's configuration.")
ON_TRIAL = _family("change_on_trial", "gauge", "1 if a change can still be rolled back, else 0.")
DURATION = _family("epoch_duration_seconds", "gauge", "Duration of the last epoch.")
ELAPSED = _family("epoch_elapsed_seconds", "gauge", "Time from the commit before the last one to the last one.")
COMMITTED = _family("epoch_committed_timestamp_seconds", "gauge", "When the last epoch was committed, since 1970.")
TASKS = _family("epoch_tasks", "gauge", "Tasks of the last epoch.")
WORKER = _family("worker_memory_bytes", "gauge", "Resident memory of the largest Python worker in the last epoch.")
DRIVER = _family("driver_memory_bytes", "gauge", "Resident memory of the driver's Python process.")
OPERATOR_IN = _family("operator_rows_in", "counter", "Rows that an operator took.")
OPERATOR_OUT = _family("operator_rows_out", "counter", "Rows that an operator emitted, without late and bad ones.")
LATE = _family("operator_rows_late", "counter", "Rows that came too late for an operator.")
BAD = _family("operator_rows_bad", "counter", "Bad rows of an operator.")
BUSY = _family("operator_busy_seconds", "counter", "Time in an operator's own code, summed over its tasks.")
BUSY_SHARE = _family("operator_busy_ratio", "gauge", "How many cores an operator kept busy in the last epoch.")
LATENCY = _family("operator_latency_seconds", "histogram", "Age of rows when they left an operator.")
STATE = _family("operator_state_bytes", "gauge", "Size of the files that make an operator's state.")
KEYS = _family("operator_keys_limit", "gauge", "Upper bound on the number of keys an operator stores.")
HEAVIEST = _family("operator_heaviest_key_ratio", "gauge", "Share of rows of a key_by's heaviest key, by a sample.")
SOURCE_ROWS = _family("source_rows", "gauge", "Rows that a source emitted in the last epoch.")
AHEAD = _family("source_rows_ahead", "counter", "Rows of a source that were too far in the future.")
BEHIND = _family("source_behind_seconds", "gauge", "From a source's latest event time to the clock of the last epoch.")
BACKLOG = _family("source_backlog", "gauge", "What a source says is left to read, by Spark's name for it.")

FAMILIES = tuple(each for each in list(globals().values()) if isinstance(each, Family))
"""All of them, in the order in which they are written."""


@dataclass(frozen=True)
class _Sample:
    """A value, with labels and an ending of its name."""

    labels: Mapping[str, str]
    value: float
    ending: str = ""


def exposition(name: str, job: str, seen: Observation | None, *, openmetrics: bool = False) -> str:
    """The metrics of a job after its last epoch; before the first one, only which job it is."""
    found: dict[Family, list[_Sample]] = {}
    info = {"flow": name, "job": job, "version": __version__}
    found[JOB] = [_Sample(info, 1)]
    if seen is not None:
        for family, sample in _samples(seen):
            found.setdefault(family, []).append(sample)
    lines: list[str] = []
    for family in FAMILIES:
        if family in found:
            lines += _lines(family, found[family], openmetrics)
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def format_wanted(accept: str) -> bool:
    """Whether a client's ``Accept`` header prefers OpenMetrics.

    >>> format_wanted("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1")
    True
    >>> format_wanted("text/plain"), format_wanted(""), format_wanted("application/openmetrics-text;q=0")
    (False, False, False)
    """
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = 1.0
        for each in parameters:
            if each.startswith("q="):
                try:
                    weight = float(each[2:])
                except ValueError:
                    weight = 0.0
        if kind in weights:
            weights[kind] = max(weights[kind], weight)
    openmetrics, text = weights.values()
    return openmetrics > 0 and openmetrics >= text


def _samples(seen: Observation) -> Iterator[tuple[Family, _Sample]]:
    flow, totals = {"flow": seen.flow}, seen.totals
    for family, value in (
        (EPOCHS, totals.epochs),
        (ROWS_IN, totals.rows_in),
        (ROWS_OUT, totals.rows_out),
        (EPOCH_TIME, totals.busy_ms / 1000),
        (EPOCH, seen.epoch),
        (REVISION, seen.revision),
        (ON_TRIAL, int(seen.is_on_trial)),
        (DURATION, seen.duration_ms / 1000),
        (ELAPSED, seen.elapsed_ms / 1000),
        (COMMITTED, seen.observed_at),
        (TASKS, seen.tasks),
        (WORKER, seen.worker_memory_bytes),
        (DRIVER, seen.driver_memory_bytes),
    ):
        yield family, _Sample(flow, value)
    sources = {source.source for source in seen.sources}
    for stats in totals.operators:
        labels = {**flow, "operator": stats.operator}
        yield OPERATOR_IN, _Sample(labels, stats.rows_in)
        yield OPERATOR_OUT, _Sample(labels, stats.rows_out)
        yield LATE, _Sample(labels, stats.rows_late)
        yield BAD, _Sample(labels, stats.errors)
        yield BUSY, _Sample(labels, stats.busy_us / 1e6)
        if stats.latency_ms.buckets:
            yield from ((LATENCY, sample) for sample in _histogram(labels, stats.latency_ms))
        if stats.operator in sources:
            yield AHEAD, _Sample({**flow, "source": stats.operator}, stats.rows_ahead)
    for operator in seen.operators:
        labels = {**flow, "operator": operator.operator}
        yield BUSY_SHARE, _Sample(labels, operator.busy_share)
        if operator.state_files:
            yield STATE, _Sample(labels, operator.state_bytes)
            yield KEYS, _Sample(labels, operator.keys_at_most)
        if (heaviest := operator.heavy_keys.heaviest) is not None:
            yield HEAVIEST, _Sample(labels, heaviest[1])
    for source in seen.sources:
        labels = {**flow, "source": source.source}
        yield SOURCE_ROWS, _Sample(labels, source.rows)
        if source.behind_ms is not None:
            yield BEHIND, _Sample(labels, source.behind_ms / 1000)
        for measure, value in source.backlog.items():
            yield BACKLOG, _Sample({**labels, "measure": measure}, value)


def _histogram(labels: Mapping[str, str], ages: Histogram) -> Iterator[_Sample]:
    """Cumulative counts. Each row counts with the upper end of its bucket, so the sum is at most 19% too high."""
    for end in BUCKETS_S:
        yield _Sample({**labels, "le": _number(end)}, ages.at_most(1000 * end), "_bucket")
    yield _Sample({**labels, "le": "+Inf"}, ages.count, "_bucket")
    yield _Sample(labels, ages.count, "_count")
    yield _Sample(labels, ages.total / 1000, "_sum")


def _lines(family: Family, samples: list[_Sample], openmetrics: bool) -> Iterator[str]:
    """A family in one of the two formats, which differ in where ``_total`` and ``_info`` belong."""
    ending = {"counter": "_total", "info": "_info"}.get(family.kind, "")
    name = family.name if openmetrics else family.name + ending
    kind = family.kind if openmetrics or family.kind != "info" else "gauge"
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {kind}"
    if openmetrics and family.unit:
        yield f"# UNIT {name} {family.unit}"
    for sample in samples:
        labels = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in sample.labels.items())
        yield f"{family.name}{ending}{sample.ending}{{{labels}}} {_number(sample.value)}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
