"""Takes out of a folder of installed packages what prune.txt names, and what a library carries for
debuggers: `python bench/gpu/prune.py FOLDER`. Called by pack.sh; knows nothing of single packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

RULES = Path(__file__).with_name("prune.txt")
STRIP_FROM_BYTES = 500_000
"""Smaller libraries are left as they are."""


def globs(rules: Path = RULES) -> list[str]:
    """The globs of the file, without its comments."""
    lines = rules.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def prune(folder: Path) -> None:
    """Remove what matches a glob, and take the debug sections out of large libraries."""
    for glob in globs():
        for path in list(folder.glob(glob)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size >= STRIP_FROM_BYTES and is_elf(path):
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def is_elf(path: Path) -> bool:
    """Whether it is a library or a program. Those of `NAME.libs` folders, which auditwheel has
    rewritten, are told apart: strip can break them."""
    if path.parent.name.endswith(".libs"):
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


if __name__ == "__main__":
    prune(Path(sys.argv[1]))
