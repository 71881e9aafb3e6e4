"""Access control: the outermost layer of the interface, which checks a request before anything else handles it.

Without the right token every request gets the same answer, so a stranger does not even learn which paths exist. A
browser lured here by a name that resolves to the loopback address (DNS rebinding) has no token; if it ever had one, its
``Host`` header would still give it away.
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
    """Passes requests on to ``app`` if they carry the token and are addressed to this machine."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if scope["type"] != "http":
            return  # only HTTP is served
        headers = Headers(scope=scope)
        if not self._is_known(headers.getlist("authorization")):
            await Response(status_code=401, headers={"connection": "close"})(scope, receive, send)
        elif _host_name(headers.get("host", "")) not in LOOPBACK_NAMES:
            answer = failure(421, "MisdirectedRequest", "this interface is only available as 127.0.0.1 or localhost")
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, given: list[str]) -> bool:
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(" ")
        # In constant time, so that the duration does not reveal the first difference.
        is_equal = hmac.compare_digest(token.strip().encode(errors="replace"), self._token)
        return is_equal and scheme.lower() == "bearer"


def failure(status: int, error: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An answer that reports an error."""
    body = msgspec.json.encode(ErrorReply(error, message))
    return Response(body, status, headers, "application/json")


def _host_name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
