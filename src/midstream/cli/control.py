"""Commands that run control operations on a running job, and list them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from midstream.checkpoint.control_log import ControlOutcome, ControlRecord
from midstream.cli.change import JobArgument, NoWaitOption
from midstream.cli.functions import Functions
from midstream.cli.messages import failed, reporting_errors
from midstream.cli.served import client_of
from midstream.cli.tables import table_of
from midstream.cli.target import calling_user_code
from midstream.engine.control_operations import ControlOperation

__all__ = ["control", "controls"]

LOOK_S = 5.0
_STYLES = {ControlOutcome.COMPLETE: "green", ControlOutcome.FAILED: "bold red", ControlOutcome.PENDING: "yellow"}


def control(
    job: JobArgument,
    operation: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OPERATION",
            help="A ControlOperation, its class, or with () a function that returns one; in a dotted module or a .py "
            "file.",
            show_default=False,
        ),
    ],
    note: Annotated[str | None, typer.Option(help="The reason, for people.")] = None,
    no_wait: NoWaitOption = False,
) -> None:
    """Run a control operation on a running job, and print its result as JSON. Its code travels to the job."""
    with reporting_errors():
        client = client_of(job)
        state = client.control(_loaded(operation), note=note)
        number = state.record.number
        if no_wait:
            typer.echo(f"control operation {number} ({state.record.name}) is on its way")
            return
        while not state.is_over:
            state = client.wait_control(number, LOOK_S)
        if state.error is not None:
            raise failed(f"control operation {number} ({state.record.name}) failed: {state.error}", 1)
        typer.echo(msgspec.json.format(msgspec.json.encode(state.result), indent=2).decode())


def controls(job: JobArgument) -> None:
    """List the control operations of a running job."""
    with reporting_errors():
        found = client_of(job).controls()
        if not found:
            typer.echo("The job has had no control operations.")
            return
        table = table_of("#", "operation", "mode", "outcome", "epoch", "tasks", "requested", "by", "note")
        for each in found:
            table.add_row(*_row(each), style=_STYLES[each.outcome])
        Console().print(table)


def _row(record: ControlRecord) -> list[str]:
    when = datetime.fromtimestamp(record.requested_at).strftime("%Y-%m-%d %H:%M:%S")
    epoch = "" if record.epoch is None else str(record.epoch)
    why = "" if record.error is None else record.error.splitlines()[0]
    note = "; ".join(part for part in (record.note, why) if part)
    return [
        str(record.number),
        record.name,
        record.mode,
        str(record.outcome),
        epoch,
        str(record.tasks),
        when,
        record.by,
        note,
    ]


def _loaded(text: str) -> Any:
    found = Functions().load(text)
    if isinstance(found, type) and issubclass(found, ControlOperation):
        return calling_user_code(found)
    return found
