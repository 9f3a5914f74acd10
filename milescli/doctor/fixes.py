"""Composes commands that fix something, ready to paste: with the user's own arguments and Python,
and with `sudo` unless the user is root."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.core.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Holds the options that the user gave to `miles doctor`."""

    recipe: str | None = None
    """Value of `--recipe`."""
    sets: Sequence[str] = ()
    """Values of `--set`."""
    address: str | None = None
    """Value of `--address`."""

    def command(self, verb: str, *more: str) -> str:
        """Return `miles VERB` with all these options and `more`, which take precedence: no key is
        set twice."""
        keys = {_key(option) for option in more}
        sets = [text for text in self.sets if _key(f"--set {text}") not in keys]
        words = ["miles", verb]
        words += (
            ["--recipe", self.recipe or "quickstart"] if self.recipe or verb == "launch" else []
        )
        words += [word for text in sets for word in ("--set", text)]
        words += ["--address", self.address] if self.address else []
        return " ".join([shlex.join(words), *more])

    def full_command(self, fix: str) -> str:
        """Turn a fix that is an option into the whole command, and give `miles doctor` alone the
        user's own arguments."""
        if fix.startswith("--"):
            return self.command("launch", fix)
        if fix.split("#")[0].strip() == "miles doctor":
            return fix.replace("miles doctor", self.command("doctor"), 1)
        return fix


def as_root(command: str) -> str:
    """Return the command, with sudo unless the user is root."""
    return command if os.geteuid() == 0 else f"sudo {command}"


def pip_install(*words: str) -> str:
    """Return a pip command for this Python environment, whichever `pip` is first in PATH."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def another_folder(*, but_not: Path, needed_bytes: int = 20 * GIB) -> Path:
    """Find a writable folder for runs on the file system with the most free space, other than that
    of `but_not`; if none has `needed_bytes`, return a placeholder that the user must replace."""
    import psutil

    here, home = file_system_of(but_not), Path.home()
    places = [
        home,
        *(Path(partition.mountpoint) for partition in psutil.disk_partitions(all=False)),
    ]
    usable = [
        place
        for place in places
        if place.is_dir() and os.access(place, os.W_OK) and file_system_of(place) != here
    ]
    free, _, place = max(
        ((shutil.disk_usage(place).free, place == home, place) for place in usable),
        default=(0, False, home),
    )
    return place / "miles-runs" if free >= needed_bytes else Path("/path/to/a/larger/disk")


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest existing parent."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def file_system_of(path: Path) -> int:
    """Return the number of the file system on which the path is, or will be."""
    return nearest_folder(path).stat().st_dev


def _key(option: str) -> str:
    """Return the key of an option: `--set data.prompts` for `--set data.prompts=x   # why`;
    `--nodes` for `--nodes 1`."""
    words = option.split("#")[0].split()
    return (
        " ".join([words[0], words[1].partition("=")[0]])
        if len(words) > 1 and words[0] == "--set"
        else words[0]
    )
