"""Messages about controllers between a job and its clients, as JSON."""

from __future__ import annotations

import pickle

import msgspec

from midstream.controllers.controller import Controller
from midstream.errors import FlowError, FunctionError
from midstream.flow.functions import pack
from midstream.server.messages import python_version, require_same_python

__all__ = ["AttachRequest"]


class AttachRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /controllers``: a controller, pickled by value."""

    controller: bytes
    python: str
    name: str | None = None
    advise: bool = False

    @classmethod
    def of(cls, controller: Controller, name: str | None, advise: bool) -> AttachRequest:
        """Pack a controller; raises :class:`FlowError` if it is not one, or cannot be sent."""
        if not isinstance(controller, Controller):
            raise FlowError(f"a controller must be an instance of a subclass of Controller, found {controller!r:.60}")
        return cls(pack(controller, type(controller).__name__).data, python_version(), name, advise)

    def unpacked(self) -> Controller:
        """The controller. This runs the sender's code."""
        require_same_python(self.python)
        try:
            found: Controller = pickle.loads(self.controller)
        except Exception as error:
            raise FunctionError(f"the controller cannot be loaded: {type(error).__name__}: {error}") from error
        return found
