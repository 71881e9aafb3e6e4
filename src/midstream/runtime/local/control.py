"""The control plane of the local runtime: a coordinator that is called directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal
from midstream.control.messages import (
    ChangeBegun,
    Commit,
    EpochAbandoned,
    EpochOpened,
    EpochSealed,
    Event,
    Instruction,
    Reject,
    TaskFailed,
)
from midstream.errors import ProtocolError

__all__ = ["LocalControl"]


class LocalControl:
    """See :class:`midstream.runtime.driver.Control`."""

    def __init__(self, enact: Callable[[Sequence[Instruction]], None]) -> None:
        self.coordinator = Coordinator()
        self._journal = Journal()
        self._enact = enact

    def open(self, event: EpochOpened) -> None:
        """A run begins."""
        self.tell(event)

    def begin(self, event: ChangeBegun) -> Sequence[Instruction]:
        """Tell tasks of a change; gives what the driver must know."""
        self._enact(instructions := self.tell(event))
        return instructions

    def seal(self, event: EpochSealed) -> Commit:
        """What to commit."""
        [verdict] = self.tell(event)
        if isinstance(verdict, Reject):
            raise ProtocolError(f"epoch {event.epoch} is not whole: {verdict.reason}")
        assert isinstance(verdict, Commit)
        return verdict

    def abandon(self, event: EpochAbandoned) -> tuple[TaskFailed, ...]:
        """The run is over without success; gives the failures that its tasks reported."""
        failures = self.coordinator.failures
        self.tell(event)
        return failures

    def journal(self) -> bytes:
        """The events of the newest run."""
        return self._journal.to_bytes()

    def tell(self, event: Event) -> list[Instruction]:
        """Hand an event to the coordinator."""
        self._journal.append(event)
        return self.coordinator.handle(event)
