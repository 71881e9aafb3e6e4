"""Ports for servers that must know theirs before they start."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

__all__ = ["free_ports"]

_LOWEST, _HIGHEST = 15_000, 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Neighbouring free ports of this machine.

    They lie below those that the kernel gives to outgoing connections. One of these would be free now, and taken a
    moment later, when the server has come so far.
    """
    try:
        highest = int(_RANGE.read_text().split()[0])
    except OSError:
        highest = _HIGHEST
    choose = random.SystemRandom()  # a seed of a test must not give two processes the same ports
    for _ in range(1000):
        first = choose.randrange(_LOWEST, max(highest - count, _LOWEST + 1))
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports
    raise OSError(f"there are no {count} free ports between {_LOWEST} and {highest}")
