"""Messages about control operations between a job and its clients, as JSON."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from midstream.checkpoint.control_log import ControlRecord
from midstream.engine.control_operations import ControlOperation, checked
from midstream.errors import FunctionError
from midstream.flow.functions import pack
from midstream.runtime.control_handle import ControlHandle
from midstream.server.messages import python_version, require_same_python

__all__ = ["ControlRequest", "ControlState"]

SHOWN = 100_000
"""Most characters of a result that is not JSON."""


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /controls``: a control operation, pickled by value."""

    operation: bytes
    python: str
    by: str | None = None
    note: str | None = None

    @classmethod
    def of(cls, operation: ControlOperation, by: str | None, note: str | None) -> ControlRequest:
        """Pack an operation; raises :class:`FunctionError` if that is impossible."""
        checked(operation)
        return cls(pack(operation, type(operation).__name__).data, python_version(), by, note)

    def unpacked(self) -> ControlOperation:
        """The operation. This runs the sender's code."""
        require_same_python(self.python)
        try:
            found: ControlOperation = pickle.loads(self.operation)
        except Exception as error:
            raise FunctionError(f"the operation cannot be loaded: {type(error).__name__}: {error}") from error
        return found


class ControlState(msgspec.Struct, frozen=True):
    """A control operation and, once it has ended here, its result."""

    record: ControlRecord
    is_over: bool
    error: str | None = None
    result: Any = None
    """As JSON; values that JSON lacks are text."""

    @classmethod
    def of(cls, handle: ControlHandle) -> ControlState:
        """The state of an operation now."""
        over = handle.is_over
        result = handle.result(0) if over and handle.error is None else None
        return cls(handle.record, over, handle.error, as_json(result))


def as_json(value: Any) -> Any:
    """A value in JSON's types; everything else as text.

    >>> as_json({("a", 1): {2.5}, "b": [b"x"]})
    {"('a', 1)": '{2.5}', 'b': ["b'x'"]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return repr(value)[:SHOWN]
