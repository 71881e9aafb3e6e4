"""An operator in a task, as handlers of a control operation see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.data.rows import to_rows
from midstream.engine.control_operations import ControlMode
from midstream.engine.control_values import StoredValue, stored
from midstream.engine.nodes import OperatorNode
from midstream.errors import StateError
from midstream.ids import Epoch, PartitionId
from midstream.metrics import OperatorStats
from midstream.state.keyed_states import KeyedStates

__all__ = ["ControlContext"]


class ControlContext:
    """An operator in a task, as handlers of a :class:`midstream.ControlOperation` see it. One for each operator and
    task; it lives from ``begin`` to ``dispose``.

    >>> from midstream import ControlOperation, Flow, ListSource, MemorySink
    >>> from midstream.testing import ControlAt, run_local
    >>> class Look(ControlOperation):
    ...     mode = "blocking"
    ...
    ...     def complete(self, ctx):
    ...         return {ctx.operator: (ctx.kind, ctx.stats.rows_in)}
    >>> flow = Flow("numbers")
    >>> numbers = flow.source("in", ListSource([[{"n": 1}, {"n": 2}]] * 4, "n int"))
    >>> numbers.map("double", lambda row: {"n": 2 * row["n"]}).sink("out", MemorySink())
    >>> look = ControlAt(0, Look())
    >>> _ = run_local(flow, partitions=1, changes=[look])
    >>> look.handle.result()["double"]
    ('map', 2)
    """

    def __init__(
        self,
        number: int,
        mode: ControlMode,
        configuration: Any,
        operator: OperatorNode,
        kind: str,
        epoch: Epoch,
        partition: PartitionId,
        values: str,
    ) -> None:
        self.number = number
        """The operation's number; the same in all tasks, and if it is restarted."""
        self.configuration = configuration
        """The configuration that ``prepare`` returned for this operator."""
        self.operator = operator.name
        """The operator's name."""
        self.kind = kind
        """Its kind, such as ``"map"``."""
        self.epoch = int(epoch)
        """The epoch in which this happens."""
        self.partition = int(partition)
        """The task's partition."""
        self.variables: dict[str, Any] = {}
        """Session variables: whatever handlers of this operator in this task want to remember."""
        self._mode = mode
        self._node = operator
        self._values = values
        self._keyed: Callable[[], KeyedStates] | None = None
        self._handler = ""
        self._states: KeyedStates | None = None
        self.sent: Any = None
        """The last value given to :meth:`send`."""

    @property
    def stats(self) -> OperatorStats:
        """What the operator has done in this epoch so far: rows in and out, busy time, and so on."""
        return self._node.stats()

    @property
    def sample(self) -> list[dict[str, Any]]:
        """A few of the first rows that the operator took in this epoch. For a fast operation, only partition 0 has
        some."""
        return [] if self._node.sample is None else to_rows(self._node.sample)

    def send(self, value: Any) -> None:
        """Give a value to the operators that read this one; they get it with the message, merged where streams meet.
        From ``complete``, or before. Values do not travel through a transform, which Spark runs."""
        self.sent = value

    def store(self, value: Any) -> StoredValue:
        """Store a large value in the checkpoint; return the reference to it instead of the value."""
        return stored(value, self._values)

    @property
    def state(self) -> KeyedStates:
        """The state of the keys of this task. Only in ``complete`` of a blocking operation, where all rows of the epoch
        have been taken and none of the next one; and only for a process."""
        if self._mode is not ControlMode.BLOCKING:
            raise StateError(
                f"operator {self.operator!r}: an operation with mode={str(self._mode)!r} runs in the middle of an "
                f"epoch, where state cannot be reached; use mode='blocking'"
            )
        if self._handler != "complete":
            raise StateError(
                f"operator {self.operator!r}: {self._handler} cannot reach state, because rows may still come; only "
                f"complete can"
            )
        if self._keyed is None:
            raise StateError(
                f"operator {self.operator!r} is a {self.kind}; control operations reach the state of a process only. "
                f"job.state({self.operator!r}) reads the committed state of others"
            )
        if self._states is None:
            self._states = self._keyed()
        return self._states

    # ── called by the engine ──────────────────────────────────────────────────────────────────────────────────────

    def enter(self, handler: str, keyed: Callable[[], KeyedStates] | None = None) -> None:
        """A handler is about to be called; ``keyed`` returns the operator's state if it has some that can be
        reached."""
        self._handler, self._keyed = handler, keyed

    def leave(self) -> None:
        """``complete`` has returned: its changes of state count."""
        if self._states is not None:
            self._states.write()
            self._states = None
