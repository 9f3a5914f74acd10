"""Small files, damaged as the world damages them: bytes that flip, ends that are cut, values of
another type, nesting and digits without end, and things that are no files at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf")),
    *("", "\x1b[31m\x00\ud800", "x" * 5000, [], [[]], {}, {"a": [None]}, "../../etc/passwd"),
)


def flip(file: Path, draw: random.Random) -> None:
    """Flip up to eight bytes."""
    data = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(file: Path, draw: random.Random) -> None:
    """Cut the end off."""
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data) + 1)])


def empty(file: Path, draw: random.Random) -> None:
    """Leave nothing, or zeros as after a power cut."""
    file.write_bytes(b"\0" * draw.choice([0, 1, 4096]))


def nest(file: Path, draw: random.Random) -> None:
    """Put deep nesting in place of all, or of a value."""
    deep = draw.choice(['{"a":', "[", "- "]) * 100_000
    text = file.read_bytes().decode("utf-8", "replace")
    at = text.find(": ", draw.randrange(len(text) + 1)) if draw.random() < 0.7 else -1
    file.write_text(deep if at < 0 else text[: at + 2] + deep + text[at + 2 :])


def digits(file: Path, draw: random.Random) -> None:
    """Give a number 6,000 digits."""
    text = file.read_bytes().decode("utf-8", "replace")
    places = [at for at, letter in enumerate(text) if letter.isdigit()]
    at = draw.choice(places) if places else 0
    file.write_text(text[:at] + "9" * 6000 + text[at:], errors="replace")


def retype(file: Path, draw: random.Random) -> None:
    """Put a value of another type in place of one, in a JSON file or one of its lines."""
    text = file.read_bytes().decode("utf-8", "replace")
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    place = draw.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[place])
    except (ValueError, IndexError):
        flip(file, draw)
        return
    spots = list(_spots(value))
    odd = draw.choice(ODD_VALUES)
    if spots and draw.random() < 0.95:
        owner, key = draw.choice(spots)
        if draw.random() < 0.3:
            del owner[key]
        else:
            owner[key] = odd
    else:
        value = odd
    lines[place] = json.dumps(value)
    file.write_text("\n".join(lines) + "\n")


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _spots(inner)


def no_file(file: Path, draw: random.Random) -> None:
    """Put something else in its place: nothing, a folder, a FIFO, a device, a link to nowhere or to
    itself, or a file that may not be what it says."""
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    kind = draw.choice(["gone", "folder", "fifo", "zero", "nowhere", "loop", "binary"])
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "binary":
        file.write_bytes(draw.randbytes(2000))
    elif kind != "gone":
        file.symlink_to({"zero": "/dev/zero", "nowhere": "nowhere", "loop": file.name}[kind])


DAMAGES: tuple[Damage, ...] = (flip, cut, empty, nest, digits, retype, retype, retype, no_file)


class Hung(BaseException):
    """Raised where something takes longer than it may; no `except Exception` stops it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise Hung in the main thread after so many seconds."""

    def ring(*_: object) -> None:
        raise Hung(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
