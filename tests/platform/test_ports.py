"""Ports that are given to servers which do not listen yet."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from milescli.core.errors import MachineError
from milescli.platform import ports
from milescli.platform.ports import free_ports

ASK = """
import sys
from milescli.platform import ports
ports.RANGE = range(int(sys.argv[1]), int(sys.argv[1]) + 4)
print(ports.free_ports(2), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> range:
    """Ports that nobody has, which are all that there are; below those that servers of tests
    beside this one are given."""
    found = next(
        range(first, first + 4)
        for first in range(12_000, 20_000, 4)
        if all(_is_free(port) for port in range(first, first + 4))
    )
    monkeypatch.setattr(ports, "RANGE", found)
    return found


def _is_free(port: int) -> bool:
    reservation = ports._reserve(port, "127.0.0.1")
    if reservation is not None:
        reservation.close()
    return reservation is not None


def test_no_port_is_given_twice_although_nobody_listens_on_it_yet(four: range) -> None:
    given = [*free_ports(1), *free_ports(1), *free_ports(2)]
    assert sorted(given) == list(four)
    with pytest.raises(MachineError, match="fewer than 1 free ports"):
        free_ports(1)


def test_another_process_is_given_other_ports_until_this_one_has_ended(four: range) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", ASK, str(four.start)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    theirs = other.stdout.readline()
    assert theirs.startswith("[")
    ours = free_ports(2)
    assert sorted([*map(int, theirs.strip("[]\n").split(", ")), *ours]) == list(four)
    with pytest.raises(MachineError):
        free_ports(1)
    other.communicate(timeout=120)
    assert sorted(free_ports(2) + ours) == list(four)


def test_a_port_on_which_somebody_listens_is_passed_over(four: range) -> None:
    with socket.create_server(("127.0.0.1", four[1])):
        assert sorted(free_ports(3)) == [four[0], four[2], four[3]]
