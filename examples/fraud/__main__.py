"""The show: ``python -m examples.fraud`` judges payments through a surge, and changes its models meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from midstream import FileSink, MemorySink, NoopSink, Step, local_session
from midstream.cli.live import watch
from midstream.drawing.render import render

from .changes import Show
from .flow import build
from .models import Models, train
from .payments import Bank
from .summary import Summary

if TYPE_CHECKING:
    from midstream import Job

PATIENCE_S = 20.0
# Java's second compiler pays off after minutes; until then it takes half of a small machine's time.
SHORT_LIFE = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def main(arguments: Sequence[str] | None = None, spark: Any = None, console: Console | None = None) -> Summary:
    """Run the demo, on ``spark`` if given, else on a session of its own. Ctrl-C goes straight to the summary."""
    options = _options(arguments)
    console = console or Console(highlight=False)
    folder = options.out or Path(tempfile.mkdtemp(prefix="midstream-fraud-"))

    console.print("Training two models on past payments", style="dim")
    # A bounded epoch keeps the display moving when the job has to catch up.
    load = surge(options.rate, options.seconds)
    source = Bank().payments(load, max_rows_per_epoch=max(int(options.rate * options.seconds / 15), 1))
    models, mixtures = train(by_likeness=True), MemorySink()
    flow = build(source, FileSink(folder / "alerts"), models, mixtures)
    console.print(render(flow.graph), markup=False)

    console.print("\nStarting Spark and warming it up", style="dim")
    session = spark or local_session("local[2]", SHORT_LIFE)
    try:
        warm_up(session, models, folder)
        console.print(f"{source.total:,} payments in {options.seconds:g} s; the middle third is a surge\n", style="dim")
        began = time.monotonic()
        with flow.start(session, checkpoint=str(folder / "checkpoint")) as job:
            show = Show(job, models, source.total or 0)
            acting = show.begin()
            with contextlib.suppress(KeyboardInterrupt):
                shown = watch(job, seconds=options.seconds, plain=options.plain, console=console)
                catch_up(job, source.total, console, shown)
            seconds = time.monotonic() - began
        acting.join()
    finally:
        if spark is None:
            session.stop()

    if not job.metrics.epochs:
        raise SystemExit("No epoch was finished, so there is nothing to tell; give it more --seconds.")
    summary = Summary.of(job, source, folder / "alerts", seconds, show, len(mixtures.rows))
    console.print(f"\n{summary}", soft_wrap=True, markup=False)
    return summary


def warm_up(spark: Any, models: Models, folder: Path) -> None:
    """Have Spark start its Python workers, on payments that do not count: the load waits for nobody once it is on."""
    flow = build(Bank().payments(rate=1, limit=1000), NoopSink(), models)
    with flow.start(spark, checkpoint=str(folder / "warm-up"), trigger="available-now") as job:
        job.await_termination()


def surge(rate: float, seconds: float) -> Step:
    """Half the rate, the full rate in the middle third, half the rate again, and the end."""
    return Step(((0, rate / 2), (seconds / 3, rate), (2 * seconds / 3, rate / 2), (seconds, 0)))


def catch_up(job: Job, payments: int | None, console: Console, shown: int) -> None:
    """Let the job take what was due but still waits, so that every payment is accounted for; within reason."""
    deadline = time.monotonic() + PATIENCE_S
    while job.metrics.rows_in != payments and (left := deadline - time.monotonic()) > 0:
        shown = watch(job, epochs=job.metrics.epochs + 1, seconds=left, plain=True, console=console, after=shown)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.fraud", description="Live payment fraud detection.")
    parser.add_argument("--seconds", type=float, default=30, help="how long payments come in (default: %(default)g)")
    parser.add_argument("--rate", type=float, default=20_000, help="payments/s in the surge (default: %(default)g)")
    parser.add_argument("--plain", action="store_true", help="one line per epoch instead of a live table")
    parser.add_argument("--out", type=Path, help="new or empty folder for alerts and checkpoint (default: temporary)")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.rate <= 0:
        parser.error("--seconds and --rate must be above 0")
    if options.out and options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty; each run needs a folder of its own")
    return options


if __name__ == "__main__":
    main()
