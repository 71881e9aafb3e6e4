"""What a test wants during a run: changes, migrations, and cancelled or reversed migrations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midstream.change.migration_request import MigrationRequest, migration_request
from midstream.runtime.local.run import ChangeAt, ControlAt, MigrateAt

__all__ = ["Reconsideration", "migration_of", "wishes"]


@dataclass(frozen=True)
class Reconsideration:
    """A migration is cancelled or reversed."""

    epoch: int
    of: MigrateAt
    is_back: bool


def wishes(
    changes: Sequence[ChangeAt | MigrateAt | ControlAt],
) -> Iterator[ChangeAt | MigrateAt | ControlAt | Reconsideration]:
    """All requests of a test."""
    for each in changes:
        yield each
        if isinstance(each, MigrateAt):
            for epoch, is_back in ((each.cancel, False), (each.reverse, True)):
                if epoch is not None:
                    yield Reconsideration(epoch, each, is_back)


def migration_of(wanted: MigrateAt) -> MigrationRequest:
    """A migration as a request."""
    return migration_request(
        wanted.edits,
        by="test",
        strategy=wanted.strategy,
        budget=wanted.budget,
        prewarm=wanted.prewarm,
        at=wanted.at,
        queue=wanted.queue,
    )
