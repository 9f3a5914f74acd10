"""Ports for servers that start seconds after they were chosen."""

from __future__ import annotations

import random
import socket

from milescli.core.errors import MachineError

RANGE = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (32768 and up): those can take a free
port before its server binds it."""


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that nobody listens on. Tried in random order, so that two runs that start
    together seldom meet."""
    free: list[int] = []
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        if len(free) == count:
            return free
        try:
            socket.create_server((host, port)).close()
        except OSError:  # taken
            continue
        free.append(port)
    raise MachineError(
        f"there are not {count} free ports",
        why=f"of {RANGE.start} to {RANGE.stop} on {host}, {len(free)} are free",
        fix="ss -ltnp",
    )
