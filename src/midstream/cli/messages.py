"""How commands tell what went wrong: a message for people on the error stream, and an exit code for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from midstream.cli.target import TargetError, UserCodeError
from midstream.errors import MidstreamError

__all__ = ["errors_told", "failed"]


@contextmanager
def errors_told() -> Iterator[None]:
    """Turn what users can act on into a message and an exit code; anything else is our bug, and shows its traceback."""
    try:
        yield
    except TargetError as error:
        raise failed(str(error), 2) from error
    except (UserCodeError, MidstreamError) as error:
        raise failed(str(error), 1) from error


def failed(message: str, code: int) -> typer.Exit:
    """The end of a command that cannot do what it was asked for."""
    typer.echo(message if message.startswith("Traceback") else f"Error: {message}", err=True)
    return typer.Exit(code)
