"""``midstream top``: what a served job is doing, on one screen, epoch by epoch."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from midstream.cli.change import JobArgument
from midstream.cli.messages import reporting_errors
from midstream.cli.served import client_of
from midstream.cli.tables import table_of
from midstream.drawing.figures import FIGURES, figures_of, short_text, size_text
from midstream.errors import MidstreamError
from midstream.observation import Observation, SourceObservation
from midstream.server.client import JobClient

__all__ = ["screen", "top"]

_FIXED_LINES = 6
"""Lines of the screen that are neither operators nor sources."""
_NAME = 20
"""Most characters of a name, so that a line fits 80 columns."""


def top(
    job: JobArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the last epoch once, for scripts.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
) -> None:
    """Show what a job is doing: rows, time, latency, state, heavy keys and backlog of its operators, live."""
    with reporting_errors():
        client = client_of(job)
        console = Console()
        seen = client.observation()
        if once or not console.is_terminal:
            console.print(screen(seen, None))
            return
        try:
            _follow(client, seen, console, every)
        except KeyboardInterrupt:
            return


def _follow(client: JobClient, seen: Observation | None, console: Console, every: float) -> None:
    with Live(screen(seen, console.height), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every)
            try:
                seen = client.observation()
            except MidstreamError:
                break
            live.update(screen(seen, console.height), refresh=True)
    console.print(screen(seen, None))  # the last state stays on the screen
    console.print("the job has ended", style="dim")


def screen(seen: Observation | None, height: int | None) -> RenderableType:
    """One screen; with a height, only the busiest operators that fit."""
    if seen is None:
        return Text("no epoch has been committed since the job was started", style="dim")
    room = None if height is None else max(3, height - _FIXED_LINES - len(seen.sources))
    return Group(_header(seen), Text(), _operators(seen, room), Text(), *map(_source, seen.sources))


def _header(seen: Observation) -> Text:
    text = Text.assemble((seen.flow, "bold"), f"  epoch {seen.epoch}  revision {seen.revision}")
    if seen.is_on_trial:
        text.append("  change on trial", style="yellow")
    text.append(f"\n{seen.rows_per_s:,.0f} rows/s", style="bold cyan")
    text.append(
        f"  {seen.duration_ms:,.0f} ms of {seen.elapsed_ms:,.0f} ({100 * seen.utilisation:.0f}%)  {seen.tasks} tasks  "
        f"workers {size_text(seen.worker_memory_bytes)}  driver {size_text(seen.driver_memory_bytes)}"
    )
    return text


def _operators(seen: Observation, room: int | None) -> RenderableType:
    shown = list(seen.operators)
    if room is not None and len(shown) > room:
        busiest = {each.operator for each in sorted(shown, key=lambda each: -each.busy_share)[:room]}
        shown = [each for each in shown if each.operator in busiest]
    table = table_of("operator", *FIGURES, justify="right")
    table.columns[0].justify = "left"
    for column in table.columns:
        column.no_wrap = True
    for each in shown:
        table.add_row(Text(short_text(each.operator, _NAME)), *map(Text, figures_of(each, seen.elapsed_ms)))
    if len(shown) < len(seen.operators):
        table.caption = f"the busiest {len(shown)} of {len(seen.operators)} operators"
        table.caption_justify = "left"
    return table


def _source(seen: SourceObservation) -> Text:
    parts = [f"source {short_text(seen.source, _NAME)}: {seen.rows:,} rows"]
    if seen.behind_ms is not None:
        parts.append(f"{seen.behind_ms / 1000:,.1f} s behind")
    parts += [f"{name} {value:,.0f}" for name, value in seen.backlog.items()]
    return Text(", ".join(parts), style="dim")
