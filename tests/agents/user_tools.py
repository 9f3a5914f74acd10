"""Tools as a user writes them, good and bad."""

from __future__ import annotations

import asyncio
import io
import os
import time

from PIL import Image as Pillow

from milescli.recipe.schema import Rollout

closed: list[int] = []
"""How many calls each counter had when its episode ended."""


class Counter:
    """Count calls within one episode."""

    def __init__(self, settings: Rollout) -> None:
        self.num_calls = 0

    def __call__(self) -> int:
        """Count one more."""
        self.num_calls += 1
        return self.num_calls

    def close(self) -> None:
        """Remember."""
        closed.append(self.num_calls)


class Unclosable:
    """Cannot be closed."""

    def __init__(self, settings: Rollout) -> None:
        pass

    def __call__(self) -> str:
        """Work."""
        return "worked"

    def close(self) -> None:
        """Fail."""
        raise RuntimeError("the connection is lost")


async def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what
    """
    await asyncio.sleep(0)
    return text


def sleepy(seconds: float) -> str:
    """Take a while.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "up"


def broken() -> str:
    """Never works."""
    raise RuntimeError("out of order")


def where() -> int:
    """Tell the number of its process."""
    return os.getpid()


def picture(kind: str) -> object:
    """Draw.

    Args:
        kind: how it is returned
    """
    drawn = Pillow.new("CMYK", (201 if kind == "long" else 8, 1), (0, 255, 255, 0))
    if kind == "file":
        drawn.convert("RGB").save(file := io.BytesIO(), format="WEBP", lossless=True)
        return file.getvalue()
    return {"both": ["a cat", drawn], "broken": b"1234", "long": drawn}[kind]


def huge() -> str:
    """Says too much."""
    return "x" * 100_000_000
