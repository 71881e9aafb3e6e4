"""Commands for jobs that run in other processes on this machine: list, show and change them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from midstream.change.offline_revert import revert_offline
from midstream.change.restart_plan import restart_plan
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.cli.functions import named_functions, script_of, updates_of
from midstream.cli.messages import failed, reporting_errors, write_text
from midstream.cli.served import NONE_SERVED, NoSuchJob, client_of, find_job
from midstream.cli.tables import jobs_table, outcome_of, print_history, print_state, taken_back_text
from midstream.drawing.epoch_chart import epoch_as_svg, epoch_as_text
from midstream.errors import MidstreamError
from midstream.planner.change_plan import Scheduler
from midstream.server.client import JobClient
from midstream.server.messages import JobState
from midstream.server.registry import ServedEntry, served_jobs

__all__ = [
    "client_of_job_or_folder",
    "deploy",
    "epoch",
    "explain",
    "history",
    "jobs",
    "revert",
    "status",
    "tell_outcome",
    "update",
]

LOOK_S = 5.0

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The name of a served job, or the beginning of its id.", show_default=False)
]
PairsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="OPERATOR MODULE:FUNCTION ...",
        help="What each operator runs instead: a function, a callable object or a table, in a dotted module or a "
        ".py file; MODULE:make() calls make first.",
        show_default=False,
    ),
]
SchedulerOption = Annotated[Scheduler, typer.Option(help="How the change is enacted.")]
MigrateOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPERATOR=MODULE:FUNCTION",
        help="A function that converts a process's state to its new layout; may be repeated.",
    ),
]
ReturnsOption = Annotated[
    list[str] | None,
    typer.Option(metavar="OPERATOR=DDL", help="The columns that a new function returns; may be repeated."),
]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Do not wait for the outcome.")]


def jobs() -> None:
    """List the jobs of this user that are served on this machine."""
    found = [(entry, _state_of(entry)) for entry in served_jobs()]
    if not found:
        typer.echo(NONE_SERVED)
        return
    Console().print(jobs_table(found))


def status(job: JobArgument) -> None:
    """Show the status of a job: its recent epochs, and the change on trial."""
    with reporting_errors():
        entry = find_job(job)
        print_state(entry, JobClient(entry.url, entry.token).status(), Console())


def epoch(
    job: JobArgument,
    number: Annotated[
        int | None, typer.Option("--epoch", min=0, help="Which one of the recent epochs. Default: the last.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", "-o", help="SVG file to write to.", show_default=False)
    ] = None,
) -> None:
    """Show where the time of an epoch went, as a chart."""
    if output is not None and output.suffix.lower() != ".svg":
        raise typer.BadParameter(f"{str(output)!r} must end with .svg, the format that is written", param_hint="--out")
    with reporting_errors():
        recent = {each.epoch: each for each in client_of(job).status().progress}
        if not recent:
            raise MidstreamError(f"job {job!r} has committed no epoch since its start; wait for one")
        progress = recent.get(max(recent) if number is None else number)
        if progress is None:
            raise MidstreamError(
                f"job {job!r} no longer knows epoch {number}, or not yet; it has {', '.join(map(str, recent))}"
            )
        if output is None:
            typer.echo(epoch_as_text(progress))
        else:
            write_text(output, epoch_as_svg(progress))


def explain(
    job: JobArgument,
    updates: PairsArgument,
    migrate: MigrateOption = None,
    returns: ReturnsOption = None,
    scheduler: SchedulerOption = Scheduler.FRIES,
    svg: Annotated[Path | None, typer.Option(help="File for a drawing of the change.", show_default=False)] = None,
) -> None:
    """Explain a change without making it."""
    with reporting_errors():
        client = client_of(job)
        explained = client.explain(*updates_of(updates, migrate or [], returns or []), scheduler=scheduler)
        typer.echo(explained.text)
        if svg is not None:
            try:
                svg.write_text(explained.svg + "\n", encoding="utf-8")
            except OSError as error:
                raise failed(f"cannot write {str(svg)!r}: {error.strerror}.", 1) from error


def update(
    job: JobArgument,
    updates: PairsArgument,
    migrate: MigrateOption = None,
    returns: ReturnsOption = None,
    scheduler: SchedulerOption = Scheduler.FRIES,
    time_limit: Annotated[
        str | None, typer.Option(help="Roll back if an epoch on trial takes longer than this, e.g. '5 seconds'.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="The reason, for the history.")] = None,
    no_wait: NoWaitOption = False,
) -> None:
    """Replace functions of a running job: all or none, and rolled back automatically if they fail."""
    with reporting_errors():
        client = client_of(job)
        wanted = updates_of(updates, migrate or [], returns or [])
        record = client.update(*wanted, scheduler=scheduler, time_limit=time_limit, note=note)
        tell_outcome(client, record, job, no_wait)


def deploy(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB|CHECKPOINT",
            help="A served job; or, with --plan, the folder of a job that is not running.",
            show_default=False,
        ),
    ],
    flow: Annotated[str, typer.Argument(metavar="MODULE:FLOW", help="The script as it now is.", show_default=False)],
    plan: Annotated[bool, typer.Option("--plan", help="Only show what would change.")] = False,
    migrate: MigrateOption = None,
    scheduler: SchedulerOption = Scheduler.FRIES,
    time_limit: Annotated[
        str | None, typer.Option(help="Roll back if an epoch on trial takes longer than this, e.g. '5 seconds'.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="The reason, for the history.")] = None,
    svg: Annotated[Path | None, typer.Option(help="File for a drawing of the change.", show_default=False)] = None,
    flush: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPERATOR",
            help="A window, outer join or process with timers that the script removes: it emits all that is open "
            "before it goes; may be repeated.",
        ),
    ] = None,
    no_wait: NoWaitOption = False,
) -> None:
    """Run what a script says: what differs from the running flow becomes one change, rolled back if it fails."""
    with reporting_errors():
        steps = named_functions(migrate or [])
        client = client_of_job_or_folder(job)
        with script_of(flow) as script:
            if client is None:
                if not plan:
                    raise failed(
                        f"no job is running on {job!r}, so there is nothing to deploy to: start the script on this "
                        f"checkpoint. --plan shows what would change.",
                        1,
                    )
                typer.echo(restart_plan(job, script))
                return
            planned = client.deploy(script, migrate=steps, flush=flush or (), scheduler=scheduler, plan_only=True)
            if not planned.text:
                typer.echo("The job runs what the script says: nothing to change.")
                return
            typer.echo(planned.text)
            if svg is not None:
                write_text(svg, planned.svg)
            if plan:
                return
            found = client.deploy(
                script, migrate=steps, flush=flush or (), scheduler=scheduler, time_limit=time_limit, note=note
            )
        if found.change is not None:
            tell_outcome(client, found.change, job, no_wait)


def history(
    job: Annotated[
        str, typer.Argument(metavar="JOB|CHECKPOINT", help="A served job, or the folder of any job, running or not.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the full records as JSON.")] = False,
) -> None:
    """Show all changes of a job: who, when, what, and the outcome."""
    with reporting_errors():
        records = _records(job)
        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(records), indent=2).decode())
        elif records:
            print_history(records, Console())
        else:
            typer.echo("The job has not been changed.")


def revert(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB|CHECKPOINT",
            help="A served job; or the folder of a job that is not running, whose next start goes back.",
            show_default=False,
        ),
    ],
    revision: Annotated[int, typer.Argument(help="The revision to go back to.", show_default=False)],
    migrate: MigrateOption = None,
    scheduler: Annotated[Scheduler, typer.Option(help="How a running job is changed.")] = Scheduler.FRIES,
    no_wait: NoWaitOption = False,
) -> None:
    """Go back to an earlier revision of a job: while it runs, or if it can no longer start."""
    with reporting_errors():
        steps = named_functions(migrate or [])
        client = client_of_job_or_folder(job)
        if client is None:
            typer.echo(taken_back_text(revert_offline(job, revision, steps)))
            return
        record = client.revert(revision, migrate=steps, scheduler=scheduler)
        tell_outcome(client, record, job, no_wait)


def tell_outcome(client: JobClient, record: ChangeRecord, job: str, no_wait: bool) -> None:
    """Wait for the outcome of a change, unless that is not wanted, and print it; exits with 1 if it failed."""
    what = f"revision {record.revision} ({record.subjects})"
    if not no_wait:
        try:
            with Console(stderr=True).status(f"waiting for {what}"):
                record = client.wait(record.number)
        except KeyboardInterrupt:
            raise failed(f"no longer waiting for {what}; 'midstream history {job}' shows the outcome.", 1) from None
    typer.echo(outcome_of(record))
    if record.outcome is not Outcome.APPLIED and not no_wait:
        raise typer.Exit(1)


def _records(text: str) -> list[ChangeRecord]:
    client = client_of_job_or_folder(text)
    return Checkpoint.of_any_flow(text).changes.records() if client is None else client.history()


def client_of_job_or_folder(text: str) -> JobClient | None:
    """The client of a served job, which may be named by its checkpoint; None for the folder of a job that is not
    served.
    """
    try:
        return client_of(text)
    except NoSuchJob:
        if not ("/" in text or Path(text).exists()):
            raise
    if "://" not in text:
        folder = os.path.realpath(text)
        for entry in served_jobs():
            if os.path.realpath(entry.checkpoint) == folder:
                return JobClient(entry.url, entry.token)
    return None


def _state_of(entry: ServedEntry) -> JobState | None:
    try:
        return JobClient(entry.url, entry.token).status(timeout=LOOK_S)
    except MidstreamError:
        return None
