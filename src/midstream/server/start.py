"""The option ``serve=``: checked before anything starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from midstream.errors import FlowError, SetupError

if TYPE_CHECKING:
    from midstream.runtime.spark.job import Job
    from midstream.server.serve import JobServer

__all__ = ["port_wanted", "server_wanted"]


def port_wanted(serve: bool | int) -> int | None:
    """The port to serve a job on (0: any free one), or None if it should not be served.

    >>> port_wanted(False) is None, port_wanted(True), port_wanted(8123)
    (True, 0, 8123)
    """
    if serve is False:
        return None
    if serve is not True and (type(serve) is not int or not 1 <= serve <= 65535):
        raise FlowError(f"serve={serve!r}: use True (any free port), or a port from 1 to 65535")
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"serve={serve!r} needs {' and '.join(missing)}, not installed here: pip install 'midstream[server]'"
        )
    return 0 if serve is True else serve


def server_wanted(serve: bool | int) -> Callable[[Job, str], JobServer] | None:
    """A function that serves a job, given the job and its checkpoint location; None if it should not be served."""
    port = port_wanted(serve)
    if port is None:
        return None

    def serve_job(job: Job, checkpoint: str) -> JobServer:
        from midstream.server.serve import JobServer  # needs packages that other jobs do not need

        folder = checkpoint if "://" in checkpoint else os.path.abspath(checkpoint)
        return JobServer(job, port=port, checkpoint=folder)

    return serve_job
