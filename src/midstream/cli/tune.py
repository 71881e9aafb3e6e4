"""The command that shows the knobs of a running job, and sets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from midstream.cli.change import JobArgument, NoWaitOption, tell_outcome
from midstream.cli.messages import reporting_errors
from midstream.cli.served import client_of
from midstream.cli.tables import table_of
from midstream.errors import FlowError
from midstream.flow.edits import Tune
from midstream.flow.knobs import KNOBS

__all__ = ["tune"]


def tune(
    job: JobArgument,
    knobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KNOB=VALUE ...",
            help="Such as pace='500 ms', frame='1 MiB', slice=default. Without any, all knobs are shown.",
            show_default=False,
        ),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(help="Roll back if an epoch on trial takes longer than this, e.g. '5 seconds'.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="The reason, for the history.")] = None,
    no_wait: NoWaitOption = False,
) -> None:
    """Show the knobs of a running job, or set some: pace, slices, frames and limits."""
    with reporting_errors():
        client = client_of(job)
        if not knobs:
            Console().print(knobs_table(client.status().knobs))
            return
        record = client.update(Tune(**parsed_knobs(knobs)), time_limit=time_limit, note=note)
        tell_outcome(client, record, job, no_wait)


def parsed_knobs(texts: Sequence[str]) -> dict[str, str | None]:
    """``KNOB=VALUE`` by knob; ``default`` is None.

    >>> parsed_knobs(["pace=500 ms", "slice=default"])
    {'pace': '500 ms', 'slice': None}
    """
    found: dict[str, str | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise FlowError(f"{text!r} is not KNOB=VALUE, e.g. pace='500 ms'; knobs: {', '.join(KNOBS)}")
        if name in found:
            raise FlowError(f"knob {name} is given twice")
        found[name] = None if value.strip() == "default" else value
    return found


def knobs_table(values: Mapping[str, int | None]) -> Table:
    """The knobs of a job."""
    table = table_of("knob", "value", "default", "from", "to", "what")
    for name, knob in KNOBS.items():
        value = knob.in_words(values.get(name, knob.default))
        ends = [knob.in_words(end) for end in (knob.default, knob.least, knob.most)]
        table.add_row(name, value, *ends, knob.does)
    return table
