"""A bound on connections to a job's server that have not sent a request.

uvicorn waits for the first request of a connection for ever, and so would let strangers hold any number of descriptors.
Whoever has sent a request is no stranger for long: without the token it is answered with 401 and disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BACKLOG", "limited_protocol"]

_log = logging.getLogger("midstream")

STRANGERS = 64
"""Connections that may be without a request at the same time; when there are more, the oldest is closed."""

PATIENCE_S = 10.0
"""How long the first request, without its body, may take."""

BACKLOG = 32
"""Connections that wait in the kernel. asyncio accepts this many at once before it says so to anybody."""


def limited_protocol(strangers: int = STRANGERS, patience_s: float = PATIENCE_S) -> type[asyncio.Protocol]:
    """uvicorn's protocol for the connections of one server, with these bounds."""
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # oldest first
    told = False

    class LimitedProtocol(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.logger = _quiet_log()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            waiting[self] = self.loop.call_later(patience_s, transport.abort)
            if len(waiting) > strangers:
                oldest = next(iter(waiting))
                _no_longer(oldest)
                oldest.transport.abort()
                _tell(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:  # a request is there, whole but for its body
                _no_longer(self)

        def connection_lost(self, exc: Exception | None) -> None:
            _no_longer(self)
            super().connection_lost(exc)

    def _no_longer(protocol: H11Protocol) -> None:
        if (timer := waiting.pop(protocol, None)) is not None:
            timer.cancel()

    def _tell(transport: asyncio.Transport) -> None:
        nonlocal told
        if not told:
            told = True
            _log.warning(
                "more than %d connections to the job's server at port %s have sent no request; the oldest are closed. "
                "This is said once",
                strangers,
                transport.get_extra_info("sockname")[1],
            )

    return LimitedProtocol


def _quiet_log() -> logging.Logger:
    """For what uvicorn says of a connection: errors of the application, not every stranger's bad request."""
    log = logging.getLogger("midstream.server.http")
    log.setLevel(logging.ERROR)
    return log
