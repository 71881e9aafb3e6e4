"""The control plane of the local runtime: a coordinator that is called directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal
from midstream.control.messages import Event, Instruction, TaskFailed

__all__ = ["LocalControl"]


class LocalControl:
    """See :class:`midstream.runtime.driver.Control`."""

    def __init__(self, deliver: Callable[[Sequence[Instruction]], None]) -> None:
        self.coordinator = Coordinator()
        self._journal = Journal()
        self._deliver = deliver

    @property
    def failures(self) -> tuple[TaskFailed, ...]:
        """The failures that tasks of the run in progress have reported."""
        return self.coordinator.failures

    def journal(self) -> bytes:
        """The events of the newest run."""
        return self._journal.to_bytes()

    def tell(self, event: Event) -> list[Instruction]:
        """Hand an event to the coordinator; gives all that follows, answers to tasks included."""
        self._journal.append(event)
        instructions = self.coordinator.handle(event)
        self._deliver(instructions)
        return instructions
