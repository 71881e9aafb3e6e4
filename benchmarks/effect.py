"""What a user waits for: from the call of `update` until the new function is in effect in every task, on Spark.

A flow of one stage under full load, whose tasks are at work nearly all the time. A small function is changed, and one
that holds a model of many megabytes. Times are from the call of `update`: checks, storing, preflight, and the switch of
the running tasks make the time to effect. `update` itself returns when the change is on disk, which may be earlier or
later. Changes that met no running task are counted apart: they had nobody to wait for.

The change itself says when it was in effect. Rows say which version made them, and when. So the run ends with a check:
no row of an old version may be younger than the moment at which its successor was said to be in effect.

    python -m benchmarks.effect [--quick] [--model-mb 64]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import SparkSession
from rich.progress import Progress

from benchmarks.changing import GOLDEN, PATIENCE_S, median, running
from benchmarks.report import arguments, closing_line, table
from benchmarks.sessions import CORES, session
from midstream import FileSink, Flow, GeneratorSource, Update
from midstream.checkpoint.change_records import Outcome
from midstream.runtime.spark.job import Job

COST_US = 100.0
"""What a row costs: slices of 50 rows, and tasks that run nearly all of the time."""
SCORED = "version bigint, at double"


@dataclass(frozen=True)
class Size:
    """Rows of an epoch, and how many changes of each function; one more goes before and is not counted."""

    rows: int
    changes: int


FULL, QUICK = Size(20_000, 15), Size(6_000, 3)


def amounts(indexes: Any, rng: np.random.Generator) -> dict[str, Any]:
    """The rows of the source."""
    return {"amount": rng.exponential(40.0, len(indexes))}


@dataclass(frozen=True)
class Score:
    """A function of some cost, with or without a model in it. Rows are stamped before the work begins."""

    version: int
    model: Any = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Score a batch."""
        at, until = time.time(), time.thread_time_ns() + batch.num_rows * COST_US * 1000
        batch = batch.append_column("version", pa.array(np.full(batch.num_rows, self.version)))
        batch = batch.append_column("at", pa.array(np.full(batch.num_rows, at)))
        while time.thread_time_ns() < until:
            pass
        return batch


def scores(rows: int, folder: Path) -> Flow:
    """One stage: a source, the function, files."""
    flow = Flow("scores")
    source = GeneratorSource(amounts, "amount double", rate=1_000_000, max_rows_per_epoch=rows)
    flow.source("in", source).map_batches("score", Score(0), adds=SCORED).sink("out", FileSink(folder, merge=False))
    return flow


@dataclass(frozen=True)
class Waited:
    """One change: milliseconds until `update` returned, until it was in effect, and until a thread knew of that."""

    version: int
    called_at: float
    in_effect_at: float
    returned_ms: float
    effect_ms: float
    known_ms: float
    preparation_ms: float
    met_tasks: bool


def change(job: Job, function: Score) -> Waited:
    """Change the function, and wait."""
    called_at, began = time.time(), time.perf_counter()
    made = job.update(Update("score", function))
    returned = time.perf_counter()
    made.wait_effect(PATIENCE_S)
    known = time.perf_counter()
    if made.wait(PATIENCE_S) is not Outcome.APPLIED:
        raise RuntimeError(f"{made!r}: {made.error or made.events}")
    preparation_ms, delay_ms = made.record.preparation_ms, made.delay_ms
    assert delay_ms is not None
    return Waited(
        function.version,
        called_at,
        called_at + (preparation_ms + delay_ms) / 1000,
        1000 * (returned - began),
        preparation_ms + delay_ms,
        1000 * (known - began),
        preparation_ms,
        met_tasks=any(event.what == "switched" for event in made.events),
    )


def measure(spark: SparkSession, size: Size, models: Sequence[Any], progress: Progress) -> list[list[Waited]]:
    """Changes of each kind of function in turn, at moments that are spread over the epochs."""
    steps = progress.add_task("changes", total=len(models) * (1 + size.changes))
    found: list[list[Waited]] = [[] for _ in models]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, version, moment = Path(name), 0, 0.0
        with running(spark, scores(size.rows, folder)) as job:
            for _ in range(1 + size.changes):
                for kind, model in enumerate(models):
                    version, moment = version + 1, (moment + GOLDEN) % 1.0
                    epoch_s = statistics.median(each.duration_ms for each in job.progress[-3:]) / 1000
                    time.sleep(moment * epoch_s)
                    found[kind].append(change(job, Score(version, model)))
                    progress.advance(steps)
        check(folder, [each for made in found for each in made])
    return [made[1:] for made in found]


def check(folder: Path, made: Sequence[Waited]) -> None:
    """Raise if a row met an old version after its successor was said to be in effect."""
    rows = ds.dataset(folder, exclude_invalid_files=True).to_table(columns=["version", "at"])
    last = {row["version"]: row["at_max"] for row in rows.group_by("version").aggregate([("at", "max")]).to_pylist()}
    for each in made:
        late = [at for version, at in last.items() if version < each.version and at > each.in_effect_at]
        if late:
            raise RuntimeError(
                f"version {each.version} was said to be in effect at {each.in_effect_at:.3f}, but an older one took a "
                f"row at {max(late):.3f}"
            )


def figures_of(made: Sequence[Waited], prefix: str) -> dict[str, Any]:
    """Medians of changes that met running tasks, the worst of them, and how many met none."""
    met = [each for each in made if each.met_tasks]
    return {
        f"{prefix}call_to_effect_p50_ms": median([each.effect_ms for each in met]),
        f"{prefix}call_to_effect_max_ms": round(max((each.effect_ms for each in met), default=0.0), 1),
        f"{prefix}preparation_p50_ms": median([each.preparation_ms for each in met]),
        f"{prefix}returned_p50_ms": median([each.returned_ms for each in met]),
        f"{prefix}switch_p50_ms": median([each.effect_ms - each.preparation_ms for each in met]),
        f"{prefix}known_p50_ms": median([each.known_ms for each in met]),
        f"{prefix}met_running_tasks": len(met),
        f"{prefix}met_none": len(made) - len(met),
    }


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--model-mb", type=int, default=64, help="megabytes of the big function's model")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    model = np.random.default_rng(0).random(options.model_mb << 17)
    with session() as spark, Progress() as progress:
        small, big = measure(spark, size, (None, model), progress)
    figures = figures_of(small, "") | {"model_mb": options.model_mb} | figures_of(big, "big_")
    rows = [
        (what, *(str(figures[prefix + name]) for prefix in ("", "big_")), wanted)
        for what, name, wanted in (
            ("from the call to effect, ms (median)", "call_to_effect_p50_ms", "≤ 15"),
            ("the worst", "call_to_effect_max_ms", ""),
            ("of which checks, storing and preflight, ms", "preparation_p50_ms", ""),
            ("from telling the tasks to effect, ms", "switch_p50_ms", ""),
            ("from the call to its return, on disk, ms", "returned_p50_ms", ""),
            ("changes that met running tasks", "met_running_tasks", ""),
            ("changes that met none", "met_none", ""),
        )
    ]
    table(f"a change under full load, {CORES} cores", ("", "small", f"{options.model_mb} MB", "wanted (small)"), rows)
    closing_line("effect", figures, quick=options.quick)


if __name__ == "__main__":
    main()
