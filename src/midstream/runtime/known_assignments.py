"""The assignments that a process of tasks knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.control.messages import TaskOrder
from midstream.errors import ProtocolError
from midstream.ids import Digest
from midstream.planner.assignment import Assignments, unpack_assignments

__all__ = ["KnownAssignments"]

_NONE = Digest("")


@dataclass(frozen=True)
class KnownAssignments:
    """The newest assignments sent to a process, and their name.

    A task says which ones its process knows, and gets newer ones with its order. So they are sent once to each process
    for each step of a migration, and what depends on them (:attr:`.Assignment.owner_array`) is computed once.
    """

    digest: Digest = _NONE
    assignments: Assignments = field(default_factory=dict)

    def under(self, order: TaskOrder) -> KnownAssignments:
        """The assignments of an order, given that the task which asked for it knew these."""
        if order.assignments == self.digest:
            return self
        if order.owners is None:
            raise ProtocolError(
                f"the order of a task names assignments {order.assignments[:8]!r} without their owners, but its "
                f"process knows {self.digest[:8]!r} only"
            )
        return KnownAssignments(order.assignments, unpack_assignments(order.owners))
