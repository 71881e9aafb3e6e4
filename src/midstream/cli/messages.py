"""How commands report errors: a message on the error stream, and an exit code for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from midstream.cli.target import TargetError, UserCodeError
from midstream.errors import MidstreamError

__all__ = ["failed", "reporting_errors", "write_text"]


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn errors that users can act on into a message and an exit code; others are our bugs, and show a traceback."""
    try:
        yield
    except TargetError as error:
        raise failed(str(error), 2) from error
    except (UserCodeError, MidstreamError) as error:
        raise failed(str(error), 1) from error


def failed(message: str, code: int) -> typer.Exit:
    """The exit of a command that failed, after printing the message."""
    typer.echo(message if message.startswith("Traceback") else f"Error: {message}", err=True)
    return typer.Exit(code)


def write_text(file: Path, text: str) -> None:
    """Write a command's output to a file."""
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise failed(f"cannot write {str(file)!r}: {error.strerror}.", 1) from error
