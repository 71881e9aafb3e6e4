"""Shows a running job: a live table in a terminal, one line per epoch elsewhere.

The display only reads a job; its owner starts and stops it. All rates are over the run time of epochs, as in
:class:`~midstream.metrics.EpochProgress`, so waiting for a trigger does not make a job look slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from midstream.flow.model import Graph, Sink
from midstream.metrics import EpochProgress, Histogram, JobMetrics, OperatorStats, merge

__all__ = ["Watchable", "print_summary", "watch"]

_RECENT = 10
_TICK_S = 0.5
_ENDED = frozenset({"stopped", "finished", "failed"})
_NONE = "–"
# Lines of the live display that are not operators: header, table head, rules, the note about hidden operators.
_OTHER_LINES = 8


class Watchable(Protocol):
    """The part of a job that the display reads."""

    @property
    def name(self) -> str:
        """Name of the flow."""

    @property
    def status(self) -> Any:
        """A string, or an enum of strings; ``stopped``, ``finished`` and ``failed`` are final."""

    @property
    def graph(self) -> Graph:
        """The flow that runs."""

    @property
    def progress(self) -> Sequence[EpochProgress]:
        """Recent epochs, newest last."""

    @property
    def metrics(self) -> JobMetrics:
        """Totals since the start."""

    def await_epoch(self, count: int, timeout: float | None = None) -> bool:
        """Wait until `count` epochs are committed in all, or the job ends."""

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the job ends; raise if it failed."""


def watch(
    job: Watchable,
    *,
    seconds: float | None = None,
    epochs: int | None = None,
    plain: bool = False,
    console: Console | None = None,
    after: int = -1,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Show a job until it ends, `seconds` have passed, or it has committed `epochs` epochs in all.

    Returns the number of the last epoch shown; pass it as ``after=`` to continue from there. The job keeps running. A
    failure of the job is raised as :class:`~midstream.errors.JobFailed`.
    """
    console = console or Console()
    live = None if plain or not console.is_terminal else Live(console=console, auto_refresh=False)
    deadline = None if seconds is None else clock() + seconds
    with live or nullcontext():
        try:
            while not _is_over(job, epochs, deadline, clock):
                after = _show(job, console, live, after)
                left = _TICK_S if deadline is None else min(_TICK_S, max(deadline - clock(), 0.0))
                # Wakes at the next commit, so the display is never late; a stalled job is refreshed at every tick.
                job.await_epoch(job.metrics.epochs + 1, timeout=left)
        finally:
            after = _show(job, console, live, after)  # the last state stays on the screen, also if the job failed
    if _has_ended(job):
        job.await_termination()  # raises the failure, if there was one
    return after


def _is_over(job: Watchable, epochs: int | None, deadline: float | None, clock: Callable[[], float]) -> bool:
    if _has_ended(job) or (epochs is not None and job.metrics.epochs >= epochs):
        return True
    return deadline is not None and clock() >= deadline


def _has_ended(job: Watchable) -> bool:
    return str(job.status) in _ENDED


def _show(job: Watchable, console: Console, live: Live | None, after: int) -> int:
    progress = tuple(job.progress)
    if live is not None:
        live.update(_screen(job, progress, console.height), refresh=True)
    else:
        for epoch in progress:
            if epoch.epoch > after:
                console.print(_line(job.graph, epoch), soft_wrap=True, highlight=False, markup=False)
    return max(after, progress[-1].epoch) if progress else after


def print_summary(job: Watchable, console: Console | None = None) -> None:
    """Print the totals of a job after it has ended."""
    console = console or Console()
    metrics = job.metrics
    speed = 1000.0 * metrics.rows_in / metrics.busy_ms if metrics.busy_ms else 0.0
    parts = [
        f"{job.name} {job.status}",
        _counted(metrics.epochs, "epoch"),
        f"{metrics.rows_in:,} rows in",
        f"{metrics.rows_out:,} out",
        _counted(metrics.errors, "error") if metrics.errors else "",
        f"{speed:,.0f} rows/s",
        _latency(_age_at_sinks(job.graph, metrics.operators)),
    ]
    console.print("  ".join(part for part in parts if part), soft_wrap=True, highlight=False, markup=False)


def _line(graph: Graph, epoch: EpochProgress) -> str:
    parts = [
        f"epoch {epoch.epoch}",
        f"revision {epoch.revision}",
        f"{epoch.duration_ms:,.0f} ms",
        f"{epoch.rows_in:,} rows in",
        f"{epoch.rows_out:,} out",
        _counted(epoch.errors, "error") if epoch.errors else "",
        f"{epoch.rows_per_s:,.0f} rows/s",
        _latency(_age_at_sinks(graph, epoch.operators)),
    ]
    return "  ".join(part for part in parts if part)


def _screen(job: Watchable, progress: tuple[EpochProgress, ...], height: int) -> RenderableType:
    recent = progress[-_RECENT:]
    return Group(_header(job, recent), _operators(job.graph, recent, max(height - _OTHER_LINES, 3)))


def _header(job: Watchable, recent: tuple[EpochProgress, ...]) -> Text:
    header = Text.assemble((job.name, "bold"), "  ", (str(job.status), "red" if job.status == "failed" else "green"))
    if not recent:
        return header.append("  waiting for the first epoch", style="dim")
    run_ms = sum(epoch.duration_ms for epoch in recent)
    speed = 1000.0 * sum(epoch.rows_in for epoch in recent) / run_ms if run_ms else 0.0
    last = recent[-1]
    header.append(f"  epoch {last.epoch}  revision {last.revision}  {last.duration_ms:,.0f} ms")
    header.append(f"  {speed:,.0f} rows/s", style="bold cyan")
    latency = _latency(_age_at_sinks(job.graph, merge(epoch.operators for epoch in recent)))
    return header.append(f"  {latency}" if latency else "")


def _operators(graph: Graph, recent: tuple[EpochProgress, ...], room: int) -> RenderableType:
    stats = {found.operator: found for found in merge(epoch.operators for epoch in recent)}
    run_us = 1000.0 * sum(epoch.duration_ms for epoch in recent)
    names = _that_fit([op.name for op in graph], stats, room)
    hidden = len(graph.operators) - len(names)
    note = f"busiest {len(names)} of {len(graph.operators)} operators; " if hidden else ""
    table = Table(
        caption=f"{note}last {_counted(len(recent), 'epoch')}" if recent else None,
        caption_justify="left",
        header_style="dim",
        box=None,
        pad_edge=False,
    )
    table.add_column("operator")
    table.add_column("kind", style="dim")
    for title in ("rows/s", "µs/row", "busy %", "p50 ms", "p99 ms"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in names:
        table.add_row(Text(name), graph[name].kind, *_figures(stats.get(name), run_us))
    return table


def _that_fit(names: list[str], stats: dict[str, OperatorStats], room: int) -> list[str]:
    """All operators, or the busiest ones, in the flow's order."""
    if len(names) <= room:
        return names
    busiest = sorted(names, key=lambda name: -stats[name].busy_us if name in stats else 1)[:room]
    return [name for name in names if name in set(busiest)]


def _figures(stats: OperatorStats | None, run_us: float) -> tuple[str, ...]:
    if stats is None or not run_us:
        return (_NONE,) * 5
    rows = stats.rows_in or stats.rows_out  # a source has no input
    busy = 100.0 * stats.busy_us / run_us
    ages = stats.latency_ms
    return (
        f"{1e6 * rows / run_us:,.0f}",
        f"{stats.busy_us / rows:,.1f}" if rows else _NONE,
        f"{busy:.0f}",
        *(f"{ages.quantile(q):,.0f}" if ages.count else _NONE for q in (0.5, 0.99)),
    )


def _age_at_sinks(graph: Graph, operators: Sequence[OperatorStats]) -> Histogram:
    """The age of rows at the end of the flow: at the last operator before each sink that measures it."""
    stats = {found.operator: found for found in operators if found.latency_ms.count}
    found: dict[str, Histogram] = {}
    seen: set[str] = set()
    waiting = [op.name for op in graph.of(Sink)]
    while waiting:
        name = waiting.pop()
        if name in stats:
            found[name] = stats[name].latency_ms
        elif name not in seen:
            seen.add(name)
            waiting.extend(port.operator for port in graph[name].inputs)
    return sum(found.values(), Histogram())


def _latency(ages: Histogram) -> str:
    if not ages.count:
        return ""
    return f"p50 {ages.quantile(0.5):,.0f} ms  p99 {ages.quantile(0.99):,.0f} ms"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
