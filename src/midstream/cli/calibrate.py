"""``midstream calibrate``: measures the cost of each step of running transactions on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from midstream.cli.messages import failed, reporting_errors

if TYPE_CHECKING:
    from midstream.txn import Calibration

__all__ = ["calibrate"]


def calibrate() -> None:
    """Measure this machine, so that transactions run in the way that is fastest here."""
    try:
        from midstream.txn import calibration
    except ImportError as error:
        raise failed(f"{error}. Transactions need numba: pip install 'midstream[txn]'.", 1) from error
    console = Console()
    with reporting_errors():
        with console.status("Measuring, some 20 seconds"):
            prices = calibration.calibrate()
        place = calibration.store_calibration(prices)
    console.print(_table(prices))
    console.print(f"Stored in {place}; jobs that start from now on use it.", soft_wrap=True, highlight=False)


def _table(prices: Calibration) -> Table:
    table = Table("step", "ns", title="cost of steps on this machine", title_justify="left")
    table.columns[1].justify = "right"
    for name, seconds in asdict(prices).items():
        table.add_row(name, f"{1e9 * seconds:,.0f}")
    return table
