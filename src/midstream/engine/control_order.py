"""The order that a task gets about a control operation, and its report. Parts of messages, without users' code."""

from __future__ import annotations

import msgspec

from midstream.engine.control_operations import ControlMode
from midstream.ids import Digest, StageIndex

__all__ = ["ControlOrder", "ControlReport"]


class ControlOrder(msgspec.Struct, frozen=True, gc=False):
    """A control operation, for the tasks of a run.

    ``program`` is the blob with the operation and its configurations, so that orders are small whatever these are.
    """

    number: int
    name: str
    mode: ControlMode
    program: Digest
    operators: tuple[str, ...]
    """Where handlers run; all other operators pass messages on."""
    entries: tuple[StageIndex, ...]
    """The stages at which messages enter by themselves: all that are not behind an exchange."""
    values: str
    """The folder for values that are too large for a result."""
    time_limit_s: float = 10.0
    result_limit: int = 256 * 1024


class ControlReport(msgspec.Struct, frozen=True, gc=False):
    """The pickled result of a control operation in one task, or why it failed.

    ``operators`` completed, in this order.
    """

    number: int
    operators: tuple[str, ...] = ()
    result: bytes | None = None
    error: str | None = None
