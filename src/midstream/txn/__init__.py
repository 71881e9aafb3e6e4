"""Transactions over shared tables: traced once, planned batch by batch, run as fast as their dependencies allow.

:func:`transaction` declares what an event does to :class:`Table` objects. Tracing it for a stream's columns yields a
:class:`TransactionType`; one or more types form a :class:`Program`, which an :class:`Engine` runs batch by batch. The
engine needs numba (``pip install 'midstream[txn]'``); describing transactions does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.flow.transactions.expressions import TransactionType
from midstream.flow.transactions.tables import Table
from midstream.flow.transactions.tracing import Transaction, transaction
from midstream.txn.program import Program

if TYPE_CHECKING:
    from midstream.txn.batches import Batch, MemoryTables, Result, TableSource
    from midstream.txn.decision import Calibration
    from midstream.txn.engine import Engine

__all__ = [
    "Batch",
    "Calibration",
    "Engine",
    "MemoryTables",
    "Program",
    "Result",
    "Table",
    "TableSource",
    "Transaction",
    "TransactionType",
    "transaction",
]

_LAZY = {
    "Batch": "batches",
    "Calibration": "decision",
    "Engine": "engine",
    "MemoryTables": "batches",
    "Result": "batches",
    "TableSource": "batches",
}


def __getattr__(name: str) -> Any:
    # Only running transactions needs numba, whose import takes half a second.
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"midstream.txn.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
