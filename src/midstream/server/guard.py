"""Who may ask: the outermost layer of the interface, which sees a request before anything of it is looked at.

Without the right token there is one answer to everything, so that a stranger learns not even which paths exist. A
browser that was lured here by a name that resolves to the loopback address (DNS rebinding) has no token; should it ever
have one, its ``Host`` header gives it away.
"""

from __future__ import annotations

import hmac

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.server.messages import ErrorReply

__all__ = ["Guard", "failure"]

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost"})


class Guard:
    """Lets requests through to ``app`` that carry the token and were meant for this machine."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let through."""
        if scope["type"] != "http":
            return  # nothing else is spoken here
        headers = Headers(scope=scope)
        if not self._is_known(headers.getlist("authorization")):
            await Response(status_code=401, headers={"connection": "close"})(scope, receive, send)
        elif _host_name(headers.get("host", "")) not in LOOPBACK_NAMES:
            answer = failure(421, "MisdirectedRequest", "this interface is reached by 127.0.0.1 or localhost only")
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, given: list[str]) -> bool:
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(" ")
        # Compared in a time that does not depend on where the first difference is.
        is_equal = hmac.compare_digest(token.strip().encode(errors="replace"), self._token)
        return is_equal and scheme.lower() == "bearer"


def failure(status: int, error: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An answer that says what is wrong."""
    body = msgspec.json.encode(ErrorReply(error, message))
    return Response(body, status, headers, "application/json")


def _host_name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
