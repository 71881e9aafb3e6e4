"""Commands that attach controllers to a running job, detach them, and list what they have proposed."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from midstream.cli.change import JobArgument
from midstream.cli.functions import Functions
from midstream.cli.messages import reporting_errors
from midstream.cli.served import client_of
from midstream.cli.tables import table_of
from midstream.cli.target import TargetError, calling_user_code
from midstream.controllers.auto_scale import AutoScale
from midstream.controllers.balance import Balance
from midstream.controllers.controller import Controller
from midstream.controllers.pace import Pace
from midstream.controllers.proposal_records import ProposalOutcome, ProposalRecord

__all__ = ["attach", "controllers", "detach", "proposals"]

READY_MADE: dict[str, type[Controller]] = {each.__name__: each for each in (AutoScale, Balance, Pace)}

_STYLES = {
    ProposalOutcome.APPLIED: "green",
    ProposalOutcome.PENDING: "yellow",
    ProposalOutcome.ADVISED: "cyan",
    ProposalOutcome.FAILED: "bold red",
    ProposalOutcome.FAULT: "bold red",
    ProposalOutcome.REFUSED: "dim",
}


def attach(
    job: JobArgument,
    controller: Annotated[
        str,
        typer.Argument(
            metavar="CONTROLLER",
            help="AutoScale, Balance or Pace; or MODULE:CONTROLLER, a Controller, its class, or with () a function "
            "that returns one; in a dotted module or a .py file.",
            show_default=False,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting, as in Python; may be repeated.", show_default=False
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name under which it is attached. Default: its class.")] = None,
    advise: Annotated[bool, typer.Option("--advise", help="Only report what it would do.")] = False,
) -> None:
    """Let a controller look after a running job. Its code travels to the job."""
    with reporting_errors():
        found = _loaded(controller, settings or [])
        state = client_of(job).attach(found, name=name, advise=advise)
        typer.echo(
            f"controller {state.name} is attached{' and only advises' if state.advises else ''}: {state.settings}"
        )


def detach(
    job: JobArgument,
    name: Annotated[str, typer.Argument(help="Its name; 'midstream controllers' lists them.", show_default=False)],
) -> None:
    """Stop asking a controller of a running job. What it has requested goes on."""
    with reporting_errors():
        state = client_of(job).detach(name)
        typer.echo(
            f"controller {state.name} is detached; {state.applied} of its {state.proposals} proposals were applied"
        )


def controllers(job: JobArgument) -> None:
    """List the controllers of a running job."""
    with reporting_errors():
        found = client_of(job).controllers()
        if not found:
            typer.echo("The job has no controllers.")
            return
        table = table_of("name", "settings", "proposals", "applied", "attached", "state")
        for each in found:
            state = f"stopped: {each.stopped}" if each.stopped else "advises" if each.advises else "active"
            style = "bold red" if each.stopped else None
            cells = (each.name, each.settings, str(each.proposals), str(each.applied), _time(each.attached_at), state)
            table.add_row(*cells, style=style)
        Console().print(table)


def proposals(job: JobArgument) -> None:
    """List the proposals of a running job's controllers, with their reasons and outcomes."""
    with reporting_errors():
        found = client_of(job).proposals()
        if not found:
            typer.echo("The job's controllers have proposed nothing.")
            return
        table = table_of("#", "epoch", "controller", "operation", "times", "outcome", "reason", "figures", "error")
        for each in found:
            table.add_row(*_row(each), style=_STYLES[each.outcome])
        Console().print(table)


def _row(record: ProposalRecord) -> list[str]:
    figures = ", ".join(f"{name} {value:g}" for name, value in record.figures.items())
    return [
        str(record.number),
        str(record.epoch),
        record.controller,
        record.operation,
        str(record.times),
        str(record.outcome),
        record.reason,
        figures,
        (record.error or "").partition("\n")[0],
    ]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _loaded(text: str, settings: Sequence[str]) -> Any:
    values = dict(_setting(each) for each in settings)
    if ":" not in text:
        if text not in READY_MADE:
            raise TargetError(f"{text!r} is not one of {', '.join(READY_MADE)}, nor MODULE:CONTROLLER.")
        return _made(READY_MADE[text], values)
    found = Functions().load(text)
    if isinstance(found, type) and issubclass(found, Controller):
        return calling_user_code(lambda: _made(found, values))
    if values:
        raise TargetError(f"--set is for a class of controllers, and {text} is not one.")
    return found


def _made(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise TargetError(f"{kind.__name__} cannot be set like that: {error}") from None


def _setting(text: str) -> tuple[str, Any]:
    """A setting: a literal of Python, or else a text.

    >>> _setting("between=(1, 4)"), _setting("latency=1 s")
    (('between', (1, 4)), ('latency', '1 s'))
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise TargetError(f"--set {text!r} is not NAME=VALUE, e.g. --set 'latency=1 s'.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
