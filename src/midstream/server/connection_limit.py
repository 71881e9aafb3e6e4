"""Limits the connections to a job's server that have not sent a request.

uvicorn waits forever for the first request of a connection, so strangers could hold any number of file descriptors.
After a request, a stranger is gone soon: without the token it gets a 401 and is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BACKLOG", "limited_protocol"]

_log = logging.getLogger("midstream")

STRANGERS = 64
"""Most connections without a request at the same time; if there are more, the oldest is closed."""

PATIENCE_S = 10.0
"""Seconds that the first request may take, not counting its body."""

BACKLOG = 32
"""Length of the kernel's accept queue. asyncio accepts this many connections at once before any handler runs."""


def limited_protocol(strangers: int = STRANGERS, patience_s: float = PATIENCE_S) -> type[asyncio.Protocol]:
    """uvicorn's protocol for the connections of one server, with these limits."""
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
                _forget(oldest)
                oldest.transport.abort()
                _warn_once(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:  # a request has arrived, complete except for its body
                _forget(self)

        def connection_lost(self, exc: Exception | None) -> None:
            _forget(self)
            super().connection_lost(exc)

    def _forget(protocol: H11Protocol) -> None:
        if (timer := waiting.pop(protocol, None)) is not None:
            timer.cancel()

    def _warn_once(transport: asyncio.Transport) -> None:
        nonlocal told
        if not told:
            told = True
            _log.warning(
                "more than %d connections to the job's server at port %s have sent no request; the oldest are closed. "
                "This is logged only once",
                strangers,
                transport.get_extra_info("sockname")[1],
            )

    return LimitedProtocol


def _quiet_log() -> logging.Logger:
    """A logger for uvicorn's connections: shows errors of the application, but not every stranger's bad request."""
    log = logging.getLogger("midstream.server.http")
    log.setLevel(logging.ERROR)
    return log
