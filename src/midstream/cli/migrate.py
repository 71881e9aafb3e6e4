"""Commands that move and rescale the state of a running job, with a progress bar."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from midstream.change.migration_goals import Drain, Goal, Rebalance
from midstream.checkpoint.change_records import Outcome
from midstream.cli.change import JobArgument, NoWaitOption
from midstream.cli.messages import failed, reporting_errors, write_text
from midstream.cli.served import client_of
from midstream.cli.tables import assignment_table, executors_table, migrations_table
from midstream.drawing.figures import size_text
from midstream.flow.edits import Divide, Move, Rescale
from midstream.planner.assignment import Assignment
from midstream.planner.migration import StepStrategy
from midstream.server.client import JobClient, is_over
from midstream.server.migration_messages import MigrationState

__all__ = ["assignment", "divide", "drain", "executors", "freeze", "migrate", "migrations", "rebalance", "rescale"]

LOOK_S = 0.5
"""Seconds between two requests for the progress of a migration."""

StageOption = Annotated[
    str | None,
    typer.Option(help="The key_by of the stage, or an operator in it. Default: every stage.", show_default=False),
]
StrategyOption = Annotated[StepStrategy, typer.Option(help="How the moves are cut into steps.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(help="What a step may add to its epoch: '50 ms', or bytes such as '16 MB'.", show_default=False),
]
PrewarmOption = Annotated[bool, typer.Option(help="Let executors load the state of bins before they take them.")]
AtOption = Annotated[
    str | None,
    typer.Option(
        metavar="EPOCH|TIME", help="Begin with this epoch, or at this event time (ISO 8601).", show_default=False
    ),
]
QueueOption = Annotated[bool, typer.Option("--queue", help="Wait for a migration in progress instead of giving up.")]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Only say what would happen.")]
SvgOption = Annotated[
    Path | None,
    typer.Option(help="With --explain: file for a drawing of who gives what to whom.", show_default=False),
]
NoteOption = Annotated[str | None, typer.Option(help="The reason, for the history.")]


def _command(goal_of: Callable[..., Goal]) -> Callable[..., None]:
    """A command that takes a job, what ``goal_of`` takes, and the options of every migration."""

    def command(job: str, explain: bool, svg: Path | None, no_wait: bool, **given: Any) -> None:
        how = _how(**{name: given.pop(name) for name in inspect.signature(_how).parameters})
        _migrate(job, goal_of(**given), how, explain, svg, no_wait)

    first, *shared = inspect.signature(_shared, eval_str=True).parameters.values()
    own = inspect.signature(goal_of, eval_str=True).parameters.values()
    found = {each.name: each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (first, *own, *shared)}
    command.__name__, command.__doc__ = goal_of.__name__, goal_of.__doc__
    command.__signature__ = inspect.Signature([*found.values()])  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {name: each.annotation for name, each in found.items()}
    return command


def _shared(
    job: JobArgument,
    strategy: StrategyOption = StepStrategy.BUDGETED,
    budget: BudgetOption = None,
    prewarm: PrewarmOption = True,
    at: AtOption = None,
    queue: QueueOption = False,
    explain: ExplainOption = False,
    svg: SvgOption = None,
    note: NoteOption = None,
    no_wait: NoWaitOption = False,
) -> None:
    """The parameters of every command that migrates."""


@_command
def rescale(
    partitions: Annotated[int, typer.Argument(help="How many partitions a stage is to have.", show_default=False)],
    stage: StageOption = None,
) -> Goal:
    """Give the stages of a running job another number of partitions; their state moves along."""
    return Rescale(partitions, stage)


@_command
def rebalance(
    stage: StageOption = None,
    measure: Annotated[str, typer.Option(help="What is evened out: work, rows or bytes.")] = "work",
) -> Goal:
    """Give the partitions of a running job about the same weight, as it was measured."""
    return Rebalance(stage, measure)


@_command
def drain(
    executor: Annotated[str, typer.Argument(help="Its id; 'midstream executors' lists them.", show_default=False)],
) -> Goal:
    """Move everything off an executor of a running job, so that it can be removed."""
    return Drain(executor)


@_command
def divide(
    join: Annotated[str, typer.Argument(help="The join.", show_default=False)],
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="The hot key; once for each key column.", show_default=False),
    ] = None,
    bin: Annotated[int | None, typer.Option(help="The bin instead of a key.", show_default=False)] = None,
    into: Annotated[int, typer.Option(help="How many partitions share its rows; 1 unites them.")] = 2,
    spread: Annotated[str, typer.Option(help="The side whose rows are spread; the others are copied.")] = "left",
) -> Goal:
    """Let several partitions of a running job share a hot key of a join."""
    pairs = [text.partition("=") for text in key or ()]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise typer.BadParameter(f"{wrong[0]!r} is not COLUMN=VALUE", param_hint="--key")
    with reporting_errors():
        return Divide(join, {name: value for name, _, value in pairs} or None, bin, into, spread)


@_command
def migrate(
    moves: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BIN=PARTITION ...]", help="The new owner of each bin.", show_default=False),
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="The key_by of the stage, or an operator in it.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="All owners, as 'midstream assignment --json' prints them.", show_default=False
        ),
    ] = None,
) -> Goal:
    """Give some bins of a running job other owners, or all bins those of a file."""
    if (not moves) == (to is None):
        raise typer.BadParameter("give BIN=PARTITION, e.g. 17=2, or a file with --to", param_hint="BIN=PARTITION")
    if to is not None:
        return _assignments(to)
    return Move(dict(_move(text) for text in moves or ()), stage)


def migrations(
    job: JobArgument,
    number: Annotated[int | None, typer.Argument(help="Follow this one to its end.", show_default=False)] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Make no more steps of it.")] = False,
    reverse: Annotated[bool, typer.Option("--reverse", help="Bring its bins back to where they were.")] = False,
    no_wait: NoWaitOption = False,
) -> None:
    """Show the migrations of a running job; follow, cancel or reverse one."""
    if (cancel or reverse) and number is None:
        raise typer.BadParameter("say which migration, by its number", param_hint="NUMBER")
    if cancel and reverse:
        raise typer.BadParameter("choose one of --cancel and --reverse", param_hint="--reverse")
    with reporting_errors():
        client = client_of(job)
        if number is None:
            found = client.migrations()
            if found:
                Console().print(migrations_table(found))
            else:
                typer.echo("No migration is in progress.")
            return
        state = client.cancel(number) if cancel else client.reverse(number) if reverse else client.migration(number)
        wanted = Outcome.STOPPED if cancel else Outcome.REVERTED if reverse else None
        _follow(client, state, job, no_wait, wanted)


def assignment(
    job: JobArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="The owner of each bin, for 'midstream migrate --to'.")
    ] = False,
) -> None:
    """Show the partitions of a running job: how many bins each owns, and its load."""
    with reporting_errors():
        stages = client_of(job).assignment()
        if as_json:
            found = {each.name: {"partitions": len(each.partitions), "owners": each.owners} for each in stages}
            typer.echo(json.dumps(found))
            return
        for stage in stages:
            Console().print(assignment_table(stage))


def executors(job: JobArgument) -> None:
    """List the executors of a running job, and how many bins each of them has, including those without any."""
    with reporting_errors():
        Console().print(executors_table(client_of(job).executors()))


def freeze(
    job: JobArgument,
    epochs: Annotated[int, typer.Argument(help="For how many epochs.", show_default=False)],
) -> None:
    """Keep bins where they are for the next epochs of a running job; migrations that would begin are refused."""
    with reporting_errors():
        free = client_of(job).freeze(epochs)
        typer.echo(f"bins stay where they are for {epochs} epochs; epoch {free} is the first in which they may move")


def _how(
    strategy: StepStrategy, budget: str | None, prewarm: bool, at: str | None, queue: bool, note: str | None
) -> dict[str, Any]:
    return {
        "strategy": str(strategy),
        "budget": int(budget) if budget is not None and budget.isdigit() else budget,
        "prewarm": prewarm,
        "at": _moment(at),
        "queue": queue,
        "note": note,
    }


def _moment(at: str | None) -> int | datetime | None:
    if at is None or at.isdigit():
        return None if at is None else int(at)
    try:
        return datetime.fromisoformat(at)
    except ValueError:
        raise typer.BadParameter(
            f"{at!r} is neither the number of an epoch nor a time such as 2026-05-01T12:00:00", param_hint="--at"
        ) from None


def _move(text: str) -> tuple[int, int]:
    number, equals, owner = text.partition("=")
    if not (equals and number.isdigit() and owner.isdigit()):
        raise typer.BadParameter(f"{text!r} is not BIN=PARTITION, e.g. 17=2", param_hint="BIN=PARTITION")
    return int(number), int(owner)


def _assignments(file: Path) -> dict[str, Assignment]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {name: Assignment.from_document(each) for name, each in found.items()}
    except OSError as error:
        raise typer.BadParameter(f"cannot read {str(file)!r}: {error.strerror}", param_hint="--to") from None
    except (ValueError, AttributeError) as error:
        raise typer.BadParameter(
            f"{str(file)!r} lacks the owners of bins by stage, as 'midstream assignment --json' prints them: {error}",
            param_hint="--to",
        ) from None


def _migrate(job: str, goal: Goal, how: dict[str, Any], explain: bool, svg: Path | None, no_wait: bool) -> None:
    if svg is not None and not explain:
        raise typer.BadParameter("the drawing is part of an explanation; add --explain", param_hint="--svg")
    with reporting_errors():
        client = client_of(job)
        if explain:
            found = client.explain_migration(goal, **how)
            typer.echo(found.text)
            if svg is not None:
                write_text(svg, found.svg)
            return
        _follow(client, client.migrate(goal, **how), job, no_wait)


def _follow(client: JobClient, state: MigrationState, job: str, no_wait: bool, wanted: Outcome | None = None) -> None:
    """Show a bar until the migration has ended, then its outcome; any outcome but the wanted one is a failure."""
    number = state.record.number
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    if not no_wait:
        try:
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(f"migration {number}", total=1.0, text="")
                while not is_over(state.record):
                    bar.update(task, completed=state.progress.share, text=_text(state))
                    state = client.migration(number, LOOK_S)
        except KeyboardInterrupt:
            raise failed(
                f"no longer waiting for migration {number}; 'midstream migrations {job} {number}' goes on, with "
                f"--cancel it stops.",
                1,
            ) from None
    record = state.record
    error = f": {record.error}" if record.error else ""
    typer.echo(f"migration {number} ({record.subjects}): {record.outcome}, {_text(state)}{error}")
    if not no_wait and record.outcome not in (wanted, Outcome.APPLIED):
        raise typer.Exit(1)


def _text(state: MigrationState) -> str:
    progress = state.progress
    left = "" if progress.left_s is None else f", {progress.left_s:,.0f} s left"
    waiting = f", waits for {progress.is_waiting_for}" if progress.is_waiting_for else ""
    return f"{progress.bins_done} of {progress.bins} bins, {size_text(progress.bytes_done)}{left}{waiting}"
