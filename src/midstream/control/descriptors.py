"""The limit of files and connections that this process may have open.

The control channel and the server of a job must accept a connection before they can reject a stranger. Each costs a
descriptor, and a process without free descriptors cannot write a manifest. Both limit the number of strangers; this
module makes sure that these numbers fit into the process's limit.
"""

from __future__ import annotations

import logging
import resource
from functools import cache

__all__ = ["make_room"]

_log = logging.getLogger("midstream")

WANTED = 65_536
"""The limit is not raised above this: some libraries walk through all possible descriptors."""

ENOUGH = 2_048
"""With fewer, a burst of strangers can use up all descriptors for a moment: libzmq accepts up to 1,000 connections
before it can be told to close any (see :mod:`midstream.control.connection_limit`)."""


def make_room() -> int:
    """Raise the soft limit of open files as far as the system allows, and return it. Call this before listening.

    Harmless when repeated. Warns, once in a process, if even the raised limit is small.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (wanted := raised(soft, hard)) != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):  # macOS has another limit, which getrlimit does not report
            pass
    if _unlimited(soft) < ENOUGH:
        _warn(soft)
    return soft


def raised(soft: int, hard: int) -> int:
    """The soft limit to set; never less than the current one.

    >>> raised(1_024, 524_288), raised(1_024, 4_096), raised(100_000, 524_288)
    (65536, 4096, 100000)
    """
    if _unlimited(soft) >= WANTED:
        return soft
    return min(WANTED, int(_unlimited(hard)))


def _unlimited(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


@cache
def _warn(limit: int) -> None:
    _log.warning(
        "this process may have only %d files and connections open; many connections to the job's ports at once could "
        "make it fail. Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd) to %d or more",
        limit,
        ENOUGH,
    )
