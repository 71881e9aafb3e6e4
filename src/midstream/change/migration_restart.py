"""The fate of migrations that were in progress when a driver ended."""

from __future__ import annotations

import msgspec

from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, Outcome

__all__ = ["migrations_that_go_on", "stop_migrations"]


def _pending(log: ChangeLog) -> list[ChangeRecord]:
    return [record for record in log.records() if record.migration is not None and record.outcome is Outcome.PENDING]


def stop_migrations(log: ChangeLog, why: str) -> None:
    """Record that they will not continue: bins stay where the last committed epoch had them, or where this start puts
    them.

    >>> import tempfile
    >>> stop_migrations(ChangeLog(tempfile.mkdtemp()), "there is none")
    """
    for record in _pending(log):
        log.keep(msgspec.structs.replace(record, outcome=Outcome.STOPPED, error=why))


def migrations_that_go_on(log: ChangeLog) -> list[str]:
    """One sentence for each migration that a start goes on with, for the user."""
    return [
        f"migration {record.number} ({record.subjects}), which {record.by} had requested, goes on with the first epoch "
        f"of this start; start with changes='drop', or with partitions=, to leave the bins where they are"
        for record in _pending(log)
    ]
