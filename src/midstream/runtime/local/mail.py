"""Messages on their way between the driver and tasks of the local runtime. They may be lost, repeated, or late."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from midstream.control.messages import (
    FromTask,
    Handle,
    Instruction,
    Prefetch,
    Send,
    StageChange,
    Switch,
    TaskId,
    WorkerId,
)
from midstream.engine.control_order import ControlOrder
from midstream.runtime.local.executors import LocalExecutor
from midstream.runtime.local.run import Faults
from midstream.runtime.local.tasks import peer_of

__all__ = ["Mail"]


class Mail:
    """The messages of one driver; they die with it. ``chance`` says whether something of a probability happens."""

    def __init__(self, faults: Faults, rng: random.Random, chance: Callable[[float], bool]) -> None:
        self._faults = faults
        self._rng = rng
        self._chance = chance
        self._switches: dict[bytes, Switch] = {}
        self._handles: dict[bytes, list[ControlOrder]] = {}
        self._echoes: list[FromTask] = []
        """Messages to the driver that will arrive once more."""
        self._executors: dict[bytes, LocalExecutor] = {}
        """The executor of each worker, by the worker's address."""

    def starts(self, task: TaskId, executor: LocalExecutor) -> None:
        """A task starts there, in a worker of its own."""
        self._executors[_address(task)] = executor

    def deliver(self, instructions: Sequence[Instruction]) -> None:
        """Take what the coordinator sends to workers; some of it is lost, some is repeated."""
        for instruction in instructions:
            match instruction:
                case Send(peer, Switch() as switch) if not self._chance(self._faults.lose):
                    self._switches[peer] = switch
                case Send(peer, Handle(order=order)) if not self._chance(self._faults.lose):
                    self._handles.setdefault(peer, []).extend([order] * self._copies())
                case Send(peer, Prefetch() as wanted) if not self._chance(self._faults.lose):
                    if peer in self._executors:
                        self._executors[peer].inbox += [wanted] * self._copies()
                case _:
                    pass

    def told(self, task: TaskId, chance: float) -> StageChange | None:
        """The change for a task, if its message arrives now; it may arrive later."""
        peer = _address(task)
        if peer not in self._switches or not self._chance(chance):
            return None
        return self._switches.pop(peer).change

    def asked(self, task: TaskId, chance: float) -> Sequence[ControlOrder]:
        """The fast control operations for a task, if their messages arrive now; they may arrive later."""
        peer = _address(task)
        return self._handles.pop(peer) if peer in self._handles and self._chance(chance) else ()

    def maybe_keep(self, message: FromTask) -> None:
        """Keep a message to the driver, if it is one that will arrive again."""
        if self._chance(self._faults.repeat):
            self._echoes.append(message)

    def maybe_repeat(self) -> FromTask | None:
        """A message that arrives once more now."""
        if self._echoes and self._rng.random() < 0.5:
            return self._echoes.pop(self._rng.randrange(len(self._echoes)))
        return None

    def _copies(self) -> int:
        return 2 if self._chance(self._faults.repeat) else 1


def _address(task: TaskId) -> bytes:
    return peer_of(WorkerId("local", task.attempt))
