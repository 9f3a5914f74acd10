"""What users bring on a bad day; each is called in a process of its own."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

COUNT = 0


def good(*, number: int) -> int:
    """As it should be."""
    return 2 * number


def counting(*, number: int) -> int:
    """Leaves something in its module."""
    global COUNT
    COUNT += number
    return COUNT


def counted(*, number: int) -> int:
    """Finds what another left."""
    return COUNT


def folder(*, number: int) -> str:
    """Where it is called."""
    return os.getcwd()


def raising(*, number: int) -> int:
    """Its author's mistake."""
    return number // 0


def backtracking(*, number: int) -> bool:
    """A regular expression that never ends, in C."""
    return bool(re.fullmatch(r"(a+)+b", "a" * 60))


def sleeping(*, number: int) -> None:
    """Waits for what never comes."""
    time.sleep(600)


def swallowing(*, number: int) -> None:
    """Catches whatever would end it."""
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


def leaving(*, number: int) -> None:
    """Without a word."""
    os._exit(1)


def exiting(*, number: int) -> None:
    """Politely."""
    raise SystemExit(3)


def interrupted(*, number: int) -> None:
    """As if by Ctrl-C."""
    raise KeyboardInterrupt


def chatty(*, number: int) -> None:
    """Prints 100 MB."""
    for _ in range(1600):
        print("x" * 65_536, flush=True)


def greedy(*, number: int) -> int:
    """Asks for 10 GB."""
    return len(bytearray(10 * 1024**3))


def unpicklable(*, number: int) -> object:
    """What no other process can be given."""
    return lambda: number


def endless(*, number: int) -> Iterator[int]:
    """Yields without end."""
    while True:
        yield number


def forking(*, number: int) -> None:
    """Ends itself in two ways at once."""
    os.fork()
    os.kill(os.getpid(), 9)


def closing(*, number: int) -> None:
    """Closes all that it can."""
    os.closerange(0, 100)


class Counter:
    """An object with a state, made by a factory."""

    kind = "counter"

    def __init__(self, *, start: int) -> None:
        self._value = start

    @property
    def state(self) -> int:
        """How far it is."""
        return self._value

    def add(self, number: int) -> int:
        """One step."""
        self._value += number
        return self._value
