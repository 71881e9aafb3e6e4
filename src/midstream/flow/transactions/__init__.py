"""Descriptions of transactions: tables, and functions traced on symbols. :mod:`midstream.txn` runs them."""

from midstream.flow.transactions.expressions import TransactionType
from midstream.flow.transactions.tables import Table
from midstream.flow.transactions.tracing import Transaction, transaction

__all__ = ["Table", "Transaction", "TransactionType", "transaction"]
