"""What every benchmark prints: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.company import QUIET, company


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all? The figures mean little")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write a plot (SVG or PNG)")
    return parser


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None = None) -> None:
    """Print a table; the first column is text, the others are figures."""
    grid = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*row)
    (console or Console()).print(grid)


def closing_line(name: str, figures: Mapping[str, Any], *, quick: bool) -> None:
    """Print the figures as one JSON object, the benchmark's last line, with how busy others kept the machine."""
    others = company.cores()
    if others is not None and others > QUIET:
        print(f"Other processes used {others:g} cores meanwhile: times, and ratios of times, mean little.")
    about = {"benchmark": name, "quick": quick, "python": platform.python_version(), "cores_used_by_others": others}
    print(json.dumps({**about, **figures}), flush=True)
