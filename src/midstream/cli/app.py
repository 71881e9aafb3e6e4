"""The commands. Exit codes: 0 success, 1 failure, 2 wrong command line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from midstream.change.forget import forget_state
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.cli.calibrate import calibrate
from midstream.cli.change import deploy, epoch, explain, history, jobs, revert, status, update
from midstream.cli.control import control, controls
from midstream.cli.controllers import attach, controllers, detach, proposals
from midstream.cli.live import print_summary, watch
from midstream.cli.messages import reporting_errors, write_text
from midstream.cli.migrate import assignment, divide, drain, executors, freeze, migrate, migrations, rebalance, rescale
from midstream.cli.savepoints import fork, rewind, savepoint, savepoints
from midstream.cli.state import held_table, parse_key, state_table
from midstream.cli.target import find, needs_session, to_flow
from midstream.cli.top import top
from midstream.cli.trust import TrustOption, require_trust
from midstream.cli.tune import tune
from midstream.control.journal import read, tell
from midstream.drawing.render import Style, render
from midstream.errors import StateError
from midstream.flow.model import Graph
from midstream.operators.builder import Flow
from midstream.planner.stages import compile_plan
from midstream.runtime.spark import doctor as checks
from midstream.runtime.spark.session import local_session
from midstream.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="midstream",
    help="Change a running Spark stream without stopping it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FlowArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FLOW",
        help="A dotted module or a .py file, and in it a Flow or a function that returns one "
        "(it is called with the SparkSession if it takes a parameter).",
        show_default=False,
    ),
]


class Format(StrEnum):
    """Formats of ``midstream graph``; the styles of :func:`~midstream.drawing.render.render`."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


def main() -> None:
    """Entry point of the command ``midstream``."""
    app(prog_name="midstream")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"midstream {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def graph(
    flow: FlowArgument,
    format: Annotated[Format, typer.Option("--format", "-f", help="How to draw it.")] = Format.TEXT,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write to.", show_default=False)] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Show in which stage each operator runs.")] = False,
) -> None:
    """Draw a flow: for the terminal, as Mermaid, or as SVG."""
    with reporting_errors():
        target = find(flow)
        found = target.load()
        with _session() if needs_session(found) else nullcontext() as spark:
            drawn_graph = to_flow(found, target, spark).graph
        style: Style = format.value
        drawn = render(drawn_graph, style, groups=_by_stage(drawn_graph) if stages else None)
        if output is None:
            typer.echo(drawn)
            return
        write_text(output, drawn)


@app.command()
def run(
    flow: FlowArgument,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="The job's folder; with the same one it continues. Default: a temporary one."),
    ] = None,
    trigger: Annotated[
        str | None, typer.Option(help="When epochs start: '500 ms', 'available-now'. Default: one after the other.")
    ] = None,
    seconds: Annotated[float | None, typer.Option("--for", min=0, help="Stop after this many seconds.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Stop after this many epochs.")] = None,
    master: Annotated[str, typer.Option(help="Spark's master.")] = "local[*]",
    conf: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark; may be repeated.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line per epoch instead of a live table.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Let 'midstream update' and other commands reach the running job.")
    ] = False,
) -> None:
    """Run a flow on Spark until it ends, a limit is reached, or Ctrl-C."""
    settings = dict(_setting(text) for text in conf or [])
    with reporting_errors():
        target = find(flow)
        # Before importing the module: code at its top level that asks for the session gets this one.
        with _session(master, settings) as spark:
            built = to_flow(target.load(), target, spark)
            with _folder(checkpoint) as folder:
                _run(built, spark, folder, trigger, seconds, epochs, plain, serve)


@app.command()
def doctor(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems.")] = False,
) -> None:
    """Check that everything midstream and Spark need is installed."""
    findings = checks.diagnose()
    shown = [finding for finding in findings if not (quiet and finding.ok)]
    if shown:
        Console().print(_findings_table(shown))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def state(
    checkpoint: Annotated[str, typer.Argument(help="The folder of a job, running or not.")],
    operator: Annotated[str | None, typer.Argument(help="Show the state of this operator or table.")] = None,
    key: Annotated[
        str | None, typer.Argument(help="Show only this key; several columns are separated by commas.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many rows.")] = 20,
    forget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Drop the state that this removed operator left. The job must not run."),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Show the keyed state of a job after its last committed epoch. This unpickles objects from the checkpoint."""
    with reporting_errors():
        require_trust(checkpoint, trust)
        if forget is not None:
            if operator is not None:
                raise StateError("--forget drops state and shows none; leave out the other arguments")
            record = forget_state(checkpoint, forget)
            typer.echo(f"{record.plan} (revision {record.revision}): an operator of this name starts empty")
            return
        reader = StateReader.at(checkpoint)
        if operator is None:
            Console().print(held_table(reader.epoch, reader.overview()))
            return
        parsed = None if key is None else parse_key(key, reader.key_schema(operator))
        Console().print(state_table(read_state(checkpoint, operator, parsed), operator, reader.epoch, limit))


@app.command()
def journal(
    file: Annotated[Path, typer.Argument(help="A file below journal/ of a checkpoint.", exists=True, dir_okay=False)],
) -> None:
    """Show the events of a failed run of an epoch."""
    with reporting_errors():
        typer.echo(tell(read(file.read_bytes())))


for changing in (jobs, status, top, epoch, explain, update, tune, deploy, history, revert, calibrate):
    app.command()(changing)
for moving in (rescale, rebalance, drain, divide, migrate, migrations, assignment, executors, freeze):
    app.command()(moving)
for controlling in (control, controls):
    app.command()(controlling)
for steering in (attach, detach, controllers, proposals):
    app.command()(steering)
for keeping in (savepoint, savepoints, fork, rewind):
    app.command()(keeping)


def _run(
    flow: Flow,
    spark: Any,
    checkpoint: str,
    trigger: str | None,
    seconds: float | None,
    epochs: int | None,
    plain: bool,
    serve: bool,
) -> None:
    console = Console()
    job = flow.start(spark, checkpoint=checkpoint, trigger=trigger, serve=serve)
    try:
        watch(job, seconds=seconds, epochs=epochs, plain=plain, console=console)
    except KeyboardInterrupt:
        console.print("stopping", style="dim")
    finally:
        job.stop()
        print_summary(job, console)


@contextmanager
def _session(master: str = "local[*]", conf: dict[str, str] | None = None) -> Iterator[Any]:
    spark = local_session(master, conf)
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _folder(checkpoint: str | None) -> Iterator[str]:
    if checkpoint is not None:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="midstream-", ignore_cleanup_errors=True) as folder:
        typer.echo(f"No --checkpoint: using {folder}, removed at the end; the job cannot be continued.", err=True)
        yield folder


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE, e.g. spark.driver.memory=2g", param_hint="--conf")
    return key, value


def _by_stage(graph: Graph) -> dict[str, str]:
    """The stage of each operator; sinks, and transforms that only feed sinks, run in Catalyst and have none."""
    return {name: f"stage {stage.index}" for stage in compile_plan(graph).stages for name in stage.operators}


def _findings_table(findings: list[checks.Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "what", "found", "advice"):
        table.add_column(title)
    for finding in findings:
        mark = Text("ok", "green") if finding.ok else Text("problem", "bold red")
        table.add_row(mark, finding.what, Text(finding.found), Text(finding.advice))
    return table
