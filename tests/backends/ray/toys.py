"""Objects to be hosted in actors by the tests of this folder."""

from __future__ import annotations

import hashlib
import os
import threading
import time

import numpy as np

from milescli.backends.ray.cluster import Cluster
from milescli.core.errors import DataError, WaitTimeout
from tests.waiting import runs, until


class Traveller:
    """Arrives as the name of the thread that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        """See the class."""
        return _thread, ()


def _thread() -> str:
    return threading.current_thread().name


class Toy:
    """Does what a test needs done."""

    def __init__(self, *, number: int, traveller: object = None) -> None:
        self.number, self.traveller = number, traveller

    def arrived(self) -> tuple[object, str]:
        """(what unpickling made of the traveller, the thread that works)."""
        return self.traveller, _thread()

    def add(self, other: int) -> int:
        """A result."""
        print("adding", flush=True)
        return self.number + other

    def total(self, values: list[int]) -> int:
        """Of a value that travelled through the object store."""
        return sum(values)

    def refuse(self) -> None:
        """An explained error."""
        raise DataError("row 7 is broken", why="no JSON", fix="fix it")

    def wait_in_vain(self) -> None:
        """A wait of its own that reached its bound."""
        raise WaitTimeout("an engine did not answer", why="waited 600 s", fix="read its log")

    def break_down(self) -> None:
        """An error that nobody explained."""
        print("about to break", flush=True)
        raise KeyError("weights")

    def sleep(self, seconds: float) -> None:
        """Be busy."""
        time.sleep(seconds)

    def lose_peer(self, pid: int) -> None:
        """What a rank says whose neighbour, the process `pid`, was killed."""
        until(lambda: not runs(pid))
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")

    def pid(self) -> int:
        """To be killed by."""
        return os.getpid()

    def environment(self, name: str) -> str | None:
        """What a variable is here."""
        return os.environ.get(name)


class Parent:
    """Starts a process of its own."""

    def __init__(self, *, cluster: Cluster) -> None:
        self.cluster = cluster

    async def spawn(self, target: str) -> int:
        """The pid of another."""
        child = await self.cluster.spawn(
            "child", target, node=0, num_cpus=0.0, kwargs={"number": 1}, environment={}
        )
        return await child.start(timeout_s=60)

    def environment(self, name: str) -> str | None:
        """What a variable is here."""
        return os.environ.get(name)


class Bytes:
    """Holds a million of them, of its own, and room for as many of another's."""

    def __init__(self, *, seed: int) -> None:
        rng = np.random.default_rng(seed)
        own = rng.integers(0, 256, 1_000_001, dtype=np.uint8)
        self.held = {"own": own, "theirs": np.zeros_like(own)}

    def read(self, which: str, offset: int, size_bytes: int) -> np.ndarray:
        """A part."""
        return self.held[which][offset : offset + size_bytes]

    def write(self, which: str, offset: int, part: np.ndarray) -> None:
        """A part."""
        self.held[which][offset : offset + part.size] = part

    def sha256(self, which: str) -> str:
        """Of all."""
        return hashlib.sha256(self.held[which].tobytes()).hexdigest()
