"""Functions that tests have called on the nodes of a small cluster."""

from __future__ import annotations

import os
import socket
import time

from milescli.core.errors import DataError


def who(*, greeting: str) -> tuple[str, str, str | None]:
    """(greeting, host name, the odd variable)."""
    return greeting, socket.gethostname(), os.environ.get("MILES_TEST_ODD")


def stumble(*, on: str) -> str:
    """An explained error on the node of that host name."""
    if socket.gethostname() == on:
        raise DataError("row 7 is broken", why="no JSON", fix="fix it")
    return "fine"


def linger(*, on: str) -> str:
    """Never answers on the node of that host name."""
    if socket.gethostname() == on:
        time.sleep(600)
    return "fine"
