"""Serves a job on the loopback address, in a thread, until the job ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING

import uvicorn

from midstream.control.descriptors import make_room
from midstream.errors import FlowError, SetupError
from midstream.server.app import application
from midstream.server.connection_limit import BACKLOG, limited_protocol
from midstream.server.registry import ServedEntry, register

if TYPE_CHECKING:
    from midstream.runtime.spark.job import Job

__all__ = ["JobServer"]

LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
GRACE_S = 2
"""Seconds that requests in progress may take when the job ends."""


class JobServer:
    """The HTTP interface of a running job; see ``job.server``. Listens from the moment it is created.

    :param checkpoint: the location of the job's checkpoint, for the registry.
    """

    def __init__(self, job: Job, host: str = "127.0.0.1", port: int = 0, *, checkpoint: str = "") -> None:
        make_room()
        self._listener = _listen(host, port)
        self.token = secrets.token_urlsafe(32)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(job, self.token),
                http=limited_protocol(),
                backlog=BACKLOG,
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,
                log_config=None,  # the user configures logging
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._thread = threading.Thread(target=self._run, name="midstream-server", daemon=True)
        try:
            self._entry = register(
                ServedEntry(
                    pid=os.getpid(),
                    host=socket.gethostname(),
                    url=self.url,
                    token=self.token,
                    job=job.id,
                    name=job.name,
                    checkpoint=checkpoint,
                    started_at=time.time(),
                )
            )
        except BaseException:
            self._listener.close()
            raise
        self._thread.start()

    def __repr__(self) -> str:
        return f"JobServer({self.url!r})"  # without the token, which must not get into logs

    def close(self) -> None:
        """Stop serving: requests in progress are finished, new ones are refused. Safe to call repeatedly."""
        with contextlib.suppress(OSError):
            self._entry.unlink(missing_ok=True)
        self._server.should_exit = True
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        # uvicorn installs signal handlers only in the main thread.
        self._server.run(sockets=[self._listener])


def _listen(host: str, port: int) -> socket.socket:
    if host not in LOOPBACK:
        raise FlowError(
            f"a job is served on 127.0.0.1 only, not on {host!r}: anyone who can reach it can run code in it. For "
            f"access from elsewhere, use a tunnel such as ssh -L"
        )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK[host], port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"the job cannot be served on port {port}: {error.strerror or error}; use another port, or serve=True for "
            f"any free one"
        ) from error
    return listener
