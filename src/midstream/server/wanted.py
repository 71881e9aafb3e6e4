"""Whether a job is to be served, and whether it can be: asked before anything starts."""

from __future__ import annotations

import importlib.util

from midstream.errors import FlowError, SetupError

__all__ = ["port_wanted"]


def port_wanted(serve: bool | int) -> int | None:
    """The port to serve a job on (0: any that is free), or None if it is not to be served.

    >>> port_wanted(False) is None, port_wanted(True), port_wanted(8123)
    (True, 0, 8123)
    """
    if serve is False:
        return None
    if serve is not True and (type(serve) is not int or not 1 <= serve <= 65535):
        raise FlowError(f"serve={serve!r}: give True (any port that is free), or a port from 1 to 65535")
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"serve={serve!r} needs {' and '.join(missing)}, not installed here: pip install 'midstream[server]'"
        )
    return 0 if serve is True else serve
