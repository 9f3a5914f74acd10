"""Reads docker/pins.env: the versions that miles is tested with, and the oldest that it supports.
Reads no other file; called by doctor and by the code that writes job scripts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FILE = "pins.env"
PREFIX = "PIN_"


def pin(name: str) -> str:
    """Return a pinned version: `pin("torch")` -> `2.13.0`. Raises KeyError for a name that is not
    in the file, which is a bug of miles."""
    return pins()[name]


def version_pin(name: str) -> tuple[int, ...]:
    """Return a pinned version as numbers: `version_pin("python_oldest")` -> (3, 11)."""
    return tuple(map(int, pin(name).split(".")))


@cache
def pins() -> dict[str, str]:
    """Return all pins by their names, in lower case without the prefix."""
    lines = pins_file().read_text(encoding="utf-8").splitlines()
    parted = [line.removeprefix(PREFIX).partition("=") for line in lines if line.startswith(PREFIX)]
    return {name.lower(): value for name, _, value in parted}


def pins_file() -> Path:
    """Return the file's path: inside the package in a wheel, in docker/ in the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / FILE
    return inside if inside.is_file() else package.parent / "docker" / FILE
