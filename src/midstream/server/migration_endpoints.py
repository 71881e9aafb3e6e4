"""The part of a job's HTTP interface that moves and rescales state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from midstream.change.migration import Migration
from midstream.control.placement import ExecutorShare
from midstream.errors import FlowError
from midstream.runtime.migration_desk import StageShares
from midstream.server.migration_messages import (
    FreezeRequest,
    Frozen,
    MigrationExplained,
    MigrationState,
    MigrationTurn,
    MigrationWish,
)

if TYPE_CHECKING:
    from midstream.runtime.migrating_job import MigratingJob

__all__ = ["MigrationEndpoints"]


class MigrationEndpoints:
    """Does what the requests ask for, apart from HTTP. Called in threads."""

    def __init__(self, job: MigratingJob) -> None:
        self._job = job

    def migrate(self, wish: MigrationWish) -> MigrationState:
        """``POST /migrate``."""
        how: dict[str, Any] = wish.how()
        return MigrationState.of(self._job.migrate(*wish.unpacked(), **how))

    def explain(self, wish: MigrationWish) -> MigrationExplained:
        """``POST /explain-migration``."""
        how = {name: value for name, value in wish.how().items() if value is not None}
        found = self._job.explain_migration(*wish.unpacked(), **how)
        return MigrationExplained(str(found), found.to_svg(), len(found.steps), found.bins, found.bytes, found.seconds)

    def assignment(self) -> tuple[StageShares, ...]:
        """``GET /assignment``."""
        return self._job.assignment()

    def executors(self) -> tuple[ExecutorShare, ...]:
        """``GET /executors``."""
        return self._job.executors

    def migrations(self) -> list[MigrationState]:
        """``GET /migrations``: those in progress."""
        return [MigrationState.of(each) for each in self._job.migrations]

    def migration(self, number: int, wait_s: float) -> MigrationState:
        """``GET /migrations/{number}``: waits for its end."""
        found = self._find(number)
        found.wait(wait_s)
        return MigrationState.of(found)

    def turn(self, number: int, turn: MigrationTurn) -> MigrationState:
        """``POST /migrations/{number}``."""
        found = self._find(number)
        match turn.turn:
            case "cancel":
                found.cancel()
            case "reverse":
                found = found.reverse()
            case _:
                raise FlowError(f"turn {turn.turn!r:.40} is not known; allowed: 'cancel', 'reverse'")
        return MigrationState.of(found)

    def freeze(self, wanted: FreezeRequest) -> Frozen:
        """``POST /freeze``."""
        return Frozen(self._job.freeze(wanted.epochs))

    def _find(self, number: int) -> Migration:
        found = self._job.migration(number)
        if found is None:
            raise HTTPException(404, f"there is no migration {number} of this start of the job")
        return found
