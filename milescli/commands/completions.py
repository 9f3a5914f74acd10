"""The static completion scripts in completions/, which the wheel installs for bash, zsh and fish.

`python -m milescli.commands.completions --write`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {"bash": "miles.bash", "zsh": "_miles", "fish": "miles.fish"}
"""Shell -> file name."""


def script(shell: str) -> str:
    """Return what the program prints for this shell: the script calls `miles` at each TAB, so it
    rarely changes."""
    environment = {**os.environ, "_MILES_COMPLETE": f"source_{shell}"}
    starter = "import sys; from milescli.commands.app import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", starter],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip() + "\n"


def write(folder: Path) -> None:
    """Write the scripts of all shells."""
    folder.mkdir(exist_ok=True)
    for shell, name in FILES.items():
        (folder / name).write_text(script(shell), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m milescli.commands.completions --write")
    write(Path(__file__).resolve().parents[2] / "completions")
