"""Commands that name an epoch of a job, begin another job there, or go back to it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console

from midstream.change import fork as forks
from midstream.change import rewind as rewinds
from midstream.change import savepoint as offline
from midstream.cli.change import client_of_job_or_folder
from midstream.cli.messages import reporting_errors
from midstream.cli.tables import table_of
from midstream.errors import CheckpointError
from midstream.server.messages import SavepointState

__all__ = ["fork", "rewind", "savepoint", "savepoints"]

PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB|CHECKPOINT", help="A served job, or the folder of one that is not running.", show_default=False
    ),
]


def savepoint(
    job: PlaceArgument,
    name: Annotated[str, typer.Argument(help="Its name, such as 'before tuning'.", show_default=False)],
    note: Annotated[str | None, typer.Option(help="The reason, for people.")] = None,
) -> None:
    """Give the last committed epoch of a job a name, and keep all that a restart from there needs."""
    with reporting_errors():
        client = client_of_job_or_folder(job)
        if client is None:
            taken = SavepointState.of(offline.take_savepoint(job, name, note=note))
        else:
            taken = client.savepoint(name, note=note)
        typer.echo(f"savepoint {taken.name!r} is epoch {taken.epoch}, revision {taken.revision}")


def savepoints(
    job: PlaceArgument,
    delete: Annotated[str | None, typer.Option(metavar="NAME", help="Delete this one.", show_default=False)] = None,
) -> None:
    """List the savepoints of a job, or delete one."""
    with reporting_errors():
        client = client_of_job_or_folder(job)
        if delete is not None:
            if client is None:
                gone = SavepointState.of(offline.delete_savepoint(job, delete))
            else:
                gone = client.delete_savepoint(delete)
            typer.echo(f"savepoint {gone.name!r} (epoch {gone.epoch}) is deleted")
            return
        found = [SavepointState.of(each) for each in offline.savepoints(job)] if client is None else client.savepoints()
        if not found:
            typer.echo("The job has no savepoints.")
            return
        table = table_of("name", "epoch", "revision", "taken", "by", "note")
        for each in found:
            when = datetime.fromtimestamp(each.taken_at).strftime("%Y-%m-%d %H:%M:%S")
            note = "; ".join(part for part in ("abandoned by a rewind" if each.is_abandoned else "", each.note) if part)
            table.add_row(each.name, str(each.epoch), str(each.revision), when, each.by, note)
        Console().print(table)


def fork(
    savepoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT@NAME", help="The folder of a job, and a savepoint.", show_default=False)
    ],
    new: Annotated[str, typer.Argument(help="The new folder; missing or empty.", show_default=False)],
) -> None:
    """Make a new checkpoint that goes on from a savepoint; the first job stays as it is, and may be running."""
    with reporting_errors():
        checkpoint, found, name = savepoint.rpartition("@")
        if not (checkpoint and found and name):
            raise CheckpointError(f"{savepoint!r} is not CHECKPOINT@NAME, such as /data/job@tuned")
        taken = forks.fork(checkpoint, name, new)
        typer.echo(
            f"{new} goes on after epoch {taken.epoch} of {checkpoint}. Start the flow on it with other folders and "
            f"tables for its sinks"
        )


def rewind(
    checkpoint: Annotated[str, typer.Argument(help="The folder of a job that is not running.", show_default=False)],
    to: Annotated[
        str, typer.Argument(metavar="EPOCH|NAME", help="The epoch or savepoint to go back to.", show_default=False)
    ],
) -> None:
    """Let a stopped job go on from an earlier epoch, as if it had stopped there."""
    with reporting_errors():
        done = rewinds.rewind(checkpoint, int(to) if to.isdigit() else to)
        typer.echo(f"the next start of the job goes on after {done.target}")
