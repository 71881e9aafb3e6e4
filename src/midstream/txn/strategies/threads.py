"""Runs one kernel in several threads at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["run_in_threads"]

_pools: dict[int, ThreadPoolExecutor] = {}


def run_in_threads(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], failed: npt.NDArray[np.int64]
) -> None:
    """Call a function once per thread, the first time in the current one; returns when all have ended.

    If one raises, ``failed`` tells the others to stop waiting for it, and the error is raised here.
    """

    def guarded(args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException:
            failed[0] = 1
            raise

    others = [_pool().submit(guarded, args) for args in calls[1:]]
    try:
        guarded(calls[0])
    finally:
        errors = [error for other in others if (error := other.exception()) is not None]
    if errors:
        raise errors[0]


def _pool() -> ThreadPoolExecutor:
    """This process's threads, keyed by process id, because a fork does not inherit them."""
    pid = os.getpid()
    if pid not in _pools:
        _pools.clear()
        _pools[pid] = ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) * 2), thread_name_prefix="txn")
    return _pools[pid]
