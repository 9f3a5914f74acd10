"""What is seen of a process that does not speak: whether the system lets it run, and where its
threads are, which is written down before it is ended; by py-spy, where it is installed and the
system allows it to look."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from milescli.core.run_processes import state_of

DUMP_TIMEOUT_S = 10.0
"""For py-spy to read one process."""


def dump_stacks(pids: Mapping[str, int], file: Path) -> str | None:
    """Append the stacks of these processes, by the name that is written before each; the file's
    path, or None where nothing was to be seen."""
    if (tool := py_spy()) is None:
        return None
    seen = list[str]()
    for name, pid in pids.items():
        # a stopped process cannot be made to wait for the look at it
        command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            dumped = subprocess.run(
                command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False
            )
        except (subprocess.TimeoutExpired, OSError):
            continue
        if dumped.returncode == 0:
            seen.append(f"== {name}, process {pid}\n{dumped.stdout}")
    if not seen:
        return None
    with file.open("a", encoding="utf-8") as stacks:
        stacks.write("\n".join(seen) + "\n")
    return str(file)


def py_spy() -> str | None:
    """The program, beside this Python or on the path."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def is_stopped_process(pid: int) -> bool:
    """Whether the system holds it, by SIGSTOP or by a debugger."""
    return state_of(pid) in ("T", "t")
