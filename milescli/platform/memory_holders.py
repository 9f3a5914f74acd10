"""Finds which processes use the main memory that a run needs: how much others use, and the largest
processes of this user. Shows no arguments of theirs, which may contain secrets. Reads /proc
alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import MemoryTaken
from milescli.core.units import GIB, format_bytes

NUM_SHOWN = 3
MIN_BYTES = GIB // 4
"""Smallest size of a process that is worth ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Describes one process of this user."""

    pid: int
    name: str
    """Program, and the script or module that it runs."""
    size_bytes: int


def largest_processes(*, root: Path = Path("/proc")) -> list[Holder]:
    """Return the processes of this user that hold most, except the ancestors of this one."""
    own = set(_ancestors(root))
    found = [
        holder
        for folder in root.iterdir()
        if folder.name.isdigit() and int(folder.name) not in own
        if (holder := _holder(folder)) is not None and holder.size_bytes >= MIN_BYTES
    ]
    return sorted(found, key=lambda one: -one.size_bytes)[:NUM_SHOWN]


def name_holders(error: MemoryTaken, *, held_bytes: int) -> MemoryTaken:
    """Return the same refusal with the holders of the memory, and the command that shows them
    first."""
    largest = largest_processes()
    shown = ", ".join(
        f"{one.name} (process {one.pid}) {format_bytes(one.size_bytes)}" for one in largest
    )
    why = f"other processes hold {format_bytes(held_bytes)}, without which it would fit; "
    why += f"yours that hold most: {shown}" if largest else "none of the large ones is yours"
    pids = ",".join(str(one.pid) for one in largest)
    fix = (
        [f"ps -o pid,rss,etime,args -p {pids}   # then end what nobody needs: kill PID"]
        if largest
        else ["ps aux --sort=-rss | head   # who holds it: wait, or ask them"]
    )
    return MemoryTaken(error.what, why=f"{error.why}\n{why}", fix=[*fix, *error.fixes])


def _ancestors(root: Path) -> Iterator[int]:
    pid = os.getpid()
    while pid > 1:
        yield pid
        try:
            text = (root / str(pid) / "stat").read_text()
        except OSError:
            return
        pid = int(text.rpartition(")")[2].split()[1])


def _holder(folder: Path) -> Holder | None:
    """Describe a process; None if it belongs to another user, or has just ended."""
    with suppress(OSError, ValueError, IndexError):
        if folder.stat().st_uid != os.getuid():
            return None
        pages = int((folder / "statm").read_text().split()[1])
        words = (folder / "cmdline").read_text(errors="replace").split("\0")
        if words[0]:
            size = pages * os.sysconf("SC_PAGE_SIZE")
            return Holder(pid=int(folder.name), name=_name(words), size_bytes=size)
    return None


def _name(words: list[str]) -> str:
    """Return the name of a command: ['/usr/bin/python3', '-m', 'pkg.train', '--key=x'] -> 'python3
    -m pkg.train'."""
    program, rest = Path(words[0].split(" ")[0]).name, words[1:]
    if not program.startswith(("python", "bash", "sh", "node", "java")) or not rest:
        return program
    if rest[0] == "-m" and len(rest) > 1:
        return f"{program} -m {rest[1]}"
    return program if rest[0].startswith("-") else f"{program} {Path(rest[0]).name}"
