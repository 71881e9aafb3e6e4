"""One control operation in one task: which handlers are called, in which order, and with what result.

Operators are those of one stage; messages come from senders (the tasks of the stage before, one message for each wire
that an operator reads), from operators of the same task, or, where a stage is entered, by themselves.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from midstream.engine.clock import Clock
from midstream.engine.control_context import ControlContext
from midstream.engine.control_operations import ControlMessage, ControlMode, ControlOperation
from midstream.engine.control_order import ControlOrder, ControlReport
from midstream.engine.control_values import decoded, encoded
from midstream.engine.failure import USER_ERRORS, user_traceback
from midstream.engine.nodes import OperatorNode
from midstream.engine.resources import Resources
from midstream.errors import OperatorFailed
from midstream.flow.model import Operator
from midstream.ids import Epoch, PartitionId, WireId
from midstream.planner.programs import StageProgram

__all__ = ["Guard", "HandlersInTask", "Surroundings", "loaded", "unguarded"]

Guard = Callable[[ControlOrder, str, str], AbstractContextManager[None]]
"""Watches over a call of a handler, given the operation, the operator and the handler's name: if the call does not
return in time, another thread must report that, because this one cannot."""


@contextmanager
def unguarded(order: ControlOrder, operator: str, handler: str) -> Iterator[None]:
    """No watch: a call that never returns keeps its thread."""
    yield


class Surroundings:
    """What all control operations in a task have in common."""

    def __init__(
        self,
        program: StageProgram,
        at_work: Callable[[], Mapping[str, OperatorNode]],
        resources: Resources,
        clock: Clock,
        epoch: Epoch,
        partition: PartitionId,
        guard: Guard = unguarded,
    ) -> None:
        self.program = program
        self.at_work = at_work
        self.resources = resources
        self.clock = clock
        self.epoch = epoch
        self.partition = partition
        self.guard = guard


def loaded(order: ControlOrder, resources: Resources) -> tuple[ControlOperation, Mapping[str, Any]]:
    """An operation and its configurations, kept in this process. Runs the user's code."""

    def load() -> tuple[ControlOperation, Mapping[str, Any]]:
        found: tuple[ControlOperation, Mapping[str, Any]] = pickle.loads(resources.data(order.program))
        return found

    return resources.made("control", order.program, None, load)


class _Failed(Exception):
    """A handler has failed; the text says how."""

    def __init__(self, operator: str, text: str, traceback: str) -> None:
        super().__init__(text)
        self.operator = operator
        self.text = text
        self.traceback = traceback


class HandlersInTask:
    """One control operation in one task. If a handler of a blocking operation fails, the task does; all others only
    say so in their report, and pass messages on without calling any more handlers."""

    def __init__(self, order: ControlOrder, around: Surroundings) -> None:
        self.order = order
        self._around = around
        self._operation: ControlOperation | None = None
        self._contexts: dict[str, ControlContext] = {}
        self._begun: set[str] = set()
        self._completed: list[str] = []
        self._values: dict[str, Any] = {}
        """By operator without a configuration: the value that it passes on."""
        self._carried: dict[WireId, Any] = {}
        """By wire that passes through this stage: the value to pass on."""
        self._sent: Mapping[str, Any] = {}
        """By operator: the value that it sent to its readers."""
        self._result: bytes | None = None
        self.error: str | None = None
        """Why it failed, here or at a sender."""
        with self._contained():
            self._load()

    def _load(self) -> None:
        order, around = self.order, self._around
        operators = {op.name: op for op in around.program.operators if op.name in order.operators}
        if not operators and not around.program.onward:
            return  # the last stage: nobody here handles messages, and there is nobody to pass them on to
        try:
            self._operation, configurations = loaded(order, around.resources)
        except USER_ERRORS as error:
            raise self._failed(next(iter(operators), ""), "loading it", error) from error
        nodes = around.at_work()
        for name, op in operators.items():
            if name in nodes:
                self._contexts[name] = ControlContext(
                    order.number,
                    order.mode,
                    configurations[name],
                    nodes[name],
                    op.spec.kind,
                    around.epoch,
                    around.partition,
                    order.values,
                )

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, sender: PartitionId, values: Mapping[WireId, bytes], error: str | None) -> None:
        """The message of a sender has come, with a value for each wire on which one was sent."""
        if error is not None:
            self.error = self.error or error
        if self.error is not None or self._operation is None:
            return
        program = self._around.program
        with self._contained():
            for wire in program.wires:
                if wire.id not in program.stage.receives and wire.id not in program.stage.carries:
                    continue
                value = self._received(wire.port.operator, values.get(wire.id))
                if wire.id in program.stage.carries:
                    self._carried[wire.id] = self._merged(wire.port.operator, self._carried.get(wire.id), value)
                    continue
                for op in program.operators:
                    if op.name in wire.consumers:
                        self._deliver(op.name, ControlMessage(self.order.number, sender, None, value))

    def _received(self, operator: str, data: bytes | None) -> Any:
        try:
            return None if data is None else decoded(data)
        except USER_ERRORS as error:
            raise self._failed(operator, "reading the value that it sent", error) from error

    def sweep(self, *, reaches_state: bool) -> None:
        """The messages of all senders have come, or enter here: go through all operators in the stream's order."""
        if self.error is None and self._operation is not None:
            with self._contained():
                results = self._swept(reaches_state)
                if results:
                    merged = None
                    for operator, result in results:
                        merged = self._merged(operator, merged, result)
                    self._encode(results[0][0], merged)
        with self._contained():
            self._dispose()

    def _swept(self, reaches_state: bool) -> list[tuple[str, Any]]:
        program = self._around.program
        here = {op.name for op in program.operators}
        sent: dict[str, Any] = {}
        results: list[tuple[str, Any]] = []
        for op in program.operators:
            for upstream in self._upstream(op, here):
                self._deliver(op.name, ControlMessage(self.order.number, None, upstream, sent.get(upstream)))
            context = self._contexts.get(op.name)
            if context is None:
                sent[op.name] = self._values.get(op.name)
                continue
            if op.name not in self._begun:
                self._deliver(op.name, ControlMessage(self.order.number))
            result = self._complete(context, reaches_state)
            sent[op.name] = context.sent
            self._completed.append(op.name)
            if result is not None:
                results.append((op.name, result))
        self._sent = sent
        return results

    def _upstream(self, op: Operator, here: set[str]) -> Sequence[str]:
        """The operators of this task that an operator reads. An inlet reads nobody here: its rows enter."""
        if op.name in self._around.program.stage.inlets:
            return ()
        return [port.operator for port in op.inputs if port.operator in here]

    def _deliver(self, name: str, message: ControlMessage) -> None:
        context = self._contexts.get(name)
        if context is None:
            self._values[name] = self._merged(name, self._values.get(name), message.value)
            return
        assert self._operation is not None
        if name not in self._begun:
            self._begun.add(name)
            self._call(context, "begin", self._operation.begin, message)
        self._call(context, "next", self._operation.next, message)

    def _complete(self, context: ControlContext, reaches_state: bool) -> Any:
        assert self._operation is not None
        node = self._around.at_work()[context.operator]
        version = node.versions.get(node.latest)
        keyed = version.work.keyed if reaches_state and version is not None else None
        context.enter("complete", keyed)
        with self._around.guard(self.order, context.operator, "complete"):
            began = self._around.clock.stopwatch_ns()
            try:
                result = self._operation.complete(context)
                context.leave()
            except USER_ERRORS as error:
                raise self._failed(context.operator, "complete", error) from error
        self._require_in_time(context.operator, "complete", began)
        return result

    def _call(
        self,
        context: ControlContext,
        handler: str,
        function: Callable[[ControlContext, ControlMessage], None],
        message: ControlMessage,
    ) -> None:
        context.enter(handler)
        with self._around.guard(self.order, context.operator, handler):
            began = self._around.clock.stopwatch_ns()
            try:
                function(context, message)
            except USER_ERRORS as error:
                raise self._failed(context.operator, handler, error) from error
        self._require_in_time(context.operator, handler, began)

    def _dispose(self) -> None:
        """Dispose of every handler that began; raise the first failure when all of it is done."""
        begun, self._begun = self._begun, set()
        failures = []
        for name in [op.name for op in self._around.program.operators if op.name in begun]:
            context = self._contexts[name]
            context.enter("dispose")
            assert self._operation is not None
            try:
                with self._around.guard(self.order, name, "dispose"):
                    self._operation.dispose(context)
            except USER_ERRORS as error:
                failures.append(self._failed(name, "dispose", error))
            context.variables.clear()
        if failures:
            raise failures[0]

    def _merged(self, operator: str, one: Any, other: Any) -> Any:
        """Two values or results as one; None stands for nothing."""
        if one is None or other is None:
            return other if one is None else one
        assert self._operation is not None
        with self._around.guard(self.order, operator, "merge"):
            try:
                return self._operation.merge(one, other)
            except USER_ERRORS as error:
                raise self._failed(operator, "merge", error) from error

    def _encode(self, operator: str, result: Any) -> None:
        try:
            is_kept = self.order.mode is ControlMode.BLOCKING  # in the manifest
            self._result = encoded(result, self.order.result_limit, "the result of a task", lasting=is_kept)
        except USER_ERRORS as error:
            raise self._failed(operator, "returning the result", error) from error

    # ── what comes of it ──────────────────────────────────────────────────────────────────────────────────────────

    def outgoing(self) -> dict[WireId, bytes]:
        """The values for the next stage, by wire. After :meth:`sweep`."""
        if self.error is not None:
            return {}
        program = self._around.program
        found = {wire.id: self._sent.get(wire.port.operator) for wire in program.wires}
        # All tasks of this stage have the same messages to pass on, so only one of them does.
        is_carrier = self._around.partition == 0
        found.update({wire: self._carried.get(wire) if is_carrier else None for wire in program.stage.carries})
        values: dict[WireId, bytes] = {}
        with self._contained():
            for wire in program.wires:
                value = found.get(wire.id)
                if wire.id in program.onward and value is not None:
                    try:
                        values[wire.id] = encoded(value, self.order.result_limit, "a value to send")
                    except USER_ERRORS as error:
                        raise self._failed(wire.port.operator, "sending a value", error) from error
        return {} if self._has_failed() else values

    def _has_failed(self) -> bool:
        return self.error is not None

    def report(self) -> ControlReport:
        """Its result in this task."""
        if self.error is not None:
            return ControlReport(self.order.number, tuple(self._completed), None, self.error)
        return ControlReport(self.order.number, tuple(self._completed), self._result)

    def _failed(self, operator: str, what: str, error: BaseException) -> _Failed:
        text = f"{self._where(operator)}: {what} raised {type(error).__name__}: {error}"
        return _Failed(operator, text, user_traceback(error))

    def _where(self, operator: str) -> str:
        return f"operator {operator!r}, epoch {self._around.epoch}, partition {self._around.partition}"

    def _require_in_time(self, operator: str, handler: str, began: int) -> None:
        took = (self._around.clock.stopwatch_ns() - began) / 1e9
        if took > self.order.time_limit_s:
            why = f"{handler} took {took:.1f} s, and {self.order.time_limit_s:g} s are allowed"
            raise _Failed(operator, f"{self._where(operator)}: {why}", "")

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Within this block, a failure of a handler ends the task if the operation is blocking, otherwise only the
        operation."""
        try:
            yield
        except _Failed as failed:
            self.error = self.error or (f"{failed.text}\n\n{failed.traceback}" if failed.traceback else failed.text)
            with suppress(_Failed):
                self._dispose()
            if self.order.mode is ControlMode.BLOCKING:
                raise OperatorFailed(
                    f"control operation {self.order.number} ({self.order.name}) failed: {failed.text}",
                    operator=failed.operator,
                    error=failed.text,
                    row=None,
                    user_traceback=failed.traceback,
                    operation=self.order.number,
                ) from failed.__cause__
