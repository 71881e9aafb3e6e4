"""The show: ``python -m examples.fraud`` trains the models, starts Spark and judges payments through a surge."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.workloads.payments import Bank
from examples.fraud.flow import build
from examples.fraud.models import train
from examples.fraud.summary import Summary
from midstream import FileSink, Step
from midstream.cli.live import watch
from midstream.flow.render import render
from midstream.runtime.job import Job
from midstream.runtime.session import local_session

PATIENCE_S = 30.0


def main(arguments: Sequence[str] | None = None, spark: Any = None, console: Console | None = None) -> Summary:
    """Run the demo; on ``spark`` if given, else on a session of its own."""
    options = _options(arguments)
    console = console or Console()
    folder = options.out or Path(tempfile.mkdtemp(prefix="midstream-fraud-"))

    console.print("Training the two models on 100,000 past payments …", style="dim")
    source = Bank().payments(surge(options.rate, options.seconds))
    flow = build(source, FileSink(folder / "alerts"), train())
    console.print(render(flow.graph), highlight=False, markup=False)

    console.print("\nStarting Spark …", style="dim")
    session = spark or local_session("local[2]")
    try:
        console.print(f"{source.total:,} payments in {options.seconds:g} s; the middle third is a surge.\n", style="dim")
        began = time.monotonic()
        with flow.start(session, checkpoint=str(folder / "checkpoint")) as job:
            watch(job, seconds=options.seconds, plain=options.plain, console=console)
            finish(job, source.total)
        seconds = time.monotonic() - began
    finally:
        if spark is None:
            session.stop()

    summary = Summary.of(job.metrics, source, folder / "alerts", seconds)
    console.print()
    summary.print(console)
    return summary


def surge(rate: float, seconds: float) -> Step:
    """The usual rate, twice as much in the middle third, the usual rate again, and the end."""
    return Step(((0, rate), (seconds / 3, 2 * rate), (2 * seconds / 3, rate), (seconds, 0)))


def finish(job: Job, payments: int | None) -> None:
    """Let the job take what was due but still waits, so that every payment is accounted for."""
    while job.metrics.rows_in != payments and job.await_epoch(job.metrics.epochs + 1, timeout=PATIENCE_S):
        pass


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.fraud", description="Payment fraud detection on a live stream.")
    parser.add_argument("--seconds", type=float, default=45, help="how long payments come in (default: %(default)g)")
    parser.add_argument("--rate", type=float, default=20_000, help="payments per second (default: %(default)g)")
    parser.add_argument("--plain", action="store_true", help="one line per epoch instead of a live table")
    parser.add_argument("--out", type=Path, help="an empty or new folder for alerts and checkpoint (default: temporary)")
    options = parser.parse_args(arguments)
    if options.out and options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty; each run needs a folder of its own")
    return options


if __name__ == "__main__":
    main()
