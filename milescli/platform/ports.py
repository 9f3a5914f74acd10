"""Reserves ports for servers that start seconds after the choice, and finds the holders of
others."""

from __future__ import annotations

import os
import random
import socket
from collections import Counter, deque
from collections.abc import Collection
from contextlib import suppress

from milescli.core.errors import MachineError

RANGE = range(20_000, 32_000)
"""Range below the ports that Linux gives to outgoing connections (32768 and up): those can take a
free port before its server binds it."""
_reserved: deque[socket.socket] = deque(maxlen=256)
"""Locks of the ports that this process chose last; the servers of earlier ones already listen."""


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Return distinct free ports that this function has given to no other live process on this
    computer. Raises MachineError if there are too few."""
    free: dict[int, socket.socket] = {}
    # forked processes share the state of `random`; a number of the kernel for each port takes 30 ms
    for port in random.Random(os.urandom(8)).sample(RANGE, len(RANGE)):
        if len(free) == count:
            break
        if (reservation := _reserve(port, host)) is not None:
            free[port] = reservation
    if len(free) < count:
        raise MachineError(
            f"there are fewer than {count} free ports",
            why=f"on {host}, only {len(free)} ports from {RANGE.start} to {RANGE.stop} are free",
            fix="ss -ltnp",
        )
    _reserved.extend(free.values())
    return list(free)


def _reserve(port: int, host: str) -> socket.socket | None:
    """Reserve a port by a name in Linux's abstract namespace, which only one process can have: it
    belongs to a network namespace, as ports do, and disappears with the process. Return None if
    another process has it, or listens on the port."""
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        reservation.bind(f"\0miles-port-{port}")
        socket.create_server((host, port)).close()
    except OSError:
        reservation.close()
        return None
    return reservation


def port_holders(ports: Collection[int]) -> list[tuple[tuple[int, str], int]]:
    """Return ((pid, name), number of these ports that it listens on), most first; only processes
    that this one may inspect."""
    import psutil

    owners: Counter[tuple[int, str]] = Counter()
    for connection in psutil.net_connections(kind="tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.pid is not None
            and connection.laddr.port in ports
        ):
            with suppress(psutil.Error):
                owners[connection.pid, psutil.Process(connection.pid).name()] += 1
    return owners.most_common()
