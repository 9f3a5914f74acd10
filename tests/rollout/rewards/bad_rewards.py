"""Rewards of users who had a bad day; each is called in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np

from milescli.core.errors import DataError


def good(*, prompt: str, response: str, label: str | None) -> float:
    """As it should be."""
    return np.float32(response == label)


async def good_async(*, prompt: str, response: str, label: str | None) -> float:
    """As it should be."""
    await asyncio.sleep(0.01)
    return float(response == label)


def ranking(*, prompt: str, responses: list[str], label: str | None) -> list[float]:
    """The share of the others that are not longer."""
    return [
        sum(len(text) <= len(other) for other in responses) / len(responses) for text in responses
    ]


async def ranking_async(*, prompt: str, responses: list[str], label: str | None) -> list[float]:
    """The same."""
    return ranking(prompt=prompt, responses=responses, label=label)


def batched(*, prompts: list[str], responses: list[str], labels: list[str | None]) -> np.ndarray:
    """As a model would; tells how many it was given."""
    time.sleep(0.2)
    return np.array([len(responses) if text == "size" else len(text) for text in responses])


def refusing(*, prompts: list[str], responses: list[str], labels: list[str | None]) -> list[float]:
    """With an error of miles' own."""
    raise DataError("no such label", why="it is none", fix="another")


def too_few(*, prompts: list[str], responses: list[str], labels: list[str | None]) -> list[float]:
    """Forgets one."""
    return [1.0] * (len(responses) - 1)


def one_number(*, prompt: str, responses: list[str], label: str | None) -> float:
    """For all."""
    return 1.0


def backtracking(*, prompt: str, response: str, label: str | None) -> float:
    """A regular expression that never ends, in C."""
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 60)))


async def blocking(*, prompt: str, response: str, label: str | None) -> float:
    """Blocks its event loop."""
    time.sleep(600)
    return 1.0


async def never(*, prompt: str, response: str, label: str | None) -> float:
    """Awaits what never comes."""
    await asyncio.Event().wait()
    return 1.0


def leaving(*, prompt: str, response: str, label: str | None) -> float:
    """Ends its process."""
    os._exit(1)


def killed(*, prompt: str, response: str, label: str | None) -> float:
    """As the kernel does where memory is short."""
    print("about to be killed", flush=True)
    os.kill(os.getpid(), 9)
    return 1.0


def exiting(*, prompt: str, response: str, label: str | None) -> float:
    """Politely."""
    raise SystemExit(3)


def chatty(*, prompt: str, response: str, label: str | None) -> float:
    """Prints 100 MB."""
    for _ in range(100):
        print("x" * 2**20)
    return 1.0


def greedy(*, prompt: str, response: str, label: str | None) -> float:
    """Wants 10 GB."""
    return float(len(bytearray(10 * 1024**3)))


def raising(*, prompt: str, response: str, label: str | None) -> float:
    """Its author's mistake."""
    return float(response.split()[7] == label)


def not_a_number(*, prompt: str, response: str, label: str | None) -> float:
    """NaN."""
    return float("nan")


def a_text(*, prompt: str, response: str, label: str | None) -> str:
    """Not a number."""
    return "1.0"


def nothing(*, prompt: str, response: str, label: str | None) -> None:
    """Forgot to return."""


def breeding(*, prompt: str, response: str, label: str | None) -> float:
    """Leaves a process behind, then hangs."""
    child = subprocess.Popen(["sleep", "600"])
    Path(response).write_text(str(child.pid))
    time.sleep(600)
    return 1.0


def closing(*, prompt: str, response: str, label: str | None) -> float:
    """Closes what it was asked through."""
    os.closerange(0, 64)
    return 1.0


def lying(*, prompt: str, response: str, label: str | None) -> float:
    """Prints what looks like a reply."""
    print('{"id": 0, "reward": 1000.0}', flush=True)
    return 0.5


async def never_for_five(*, prompt: str, response: str, label: str | None) -> float:
    """Is slow for all, and hangs for some."""
    await asyncio.sleep(600 if response == "5" else 1.5)
    return float(response == label)


async def deaf(*, prompt: str, response: str, label: str | None) -> float:
    """Blocks in C, so that not even what it is asked is read any more."""
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 60)))


def slow(*, prompt: str, response: str, label: str | None) -> float:
    """Waits for somebody else, as one that asks a judge does."""
    time.sleep(2)
    return 1.0


def spoiling(*, prompt: str, response: str, label: str | None) -> float:
    """Writes into whatever is open."""
    for descriptor in range(3, 16):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"garbage\n")
    return 1.0


class Judge:
    """An object that can be called, and raises."""

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Its author's mistake."""
        raise KeyError("judge")


judge = Judge()


def bytes_of_images(*, prompt: str, response: str, label: str | None, images: list[bytes]) -> float:
    return float(sum(map(len, images)))
