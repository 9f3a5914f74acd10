"""Ends child processes with the process that started them. A child of our own calls
`end_with_parent`; `guarded` puts this file, as a program, around a command of others: it ends the
command, with all that the command started, when the process that must live is gone.

`python -I -S guard.py PID COMMAND...`: PID is the process that must live; standard input and output
are the command's. Starts with the standard library alone, at the head of a process group of its
own. MCP servers and the processes of foreign packages are started so.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

PDEATHSIG = 1
CHILD_SUBREAPER = 36
MAX_ROUNDS = 64
"""Number of searches for remaining processes: each ends those whose parents the previous one
ended."""


def end_with_parent(parent: int | None = None, *, by: int = signal.SIGKILL) -> None:
    """Have the kernel end this process when the thread that started it ends, `by` a signal.
    `parent`: id of the process that started it; this one exits at once if that has ended
    already."""
    ctypes.CDLL(None).prctl(PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what descendants of this process leave behind when they end."""
    ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1)


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` below a guard, which outlives this process only
    to end what `command` started."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Run the command until it ends, and exit with its status."""
    libc, parent = ctypes.CDLL(None), int(sys.argv[1])
    signal.signal(signal.SIGTERM, end_group)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    libc.prctl(PDEATHSIG, signal.SIGTERM)
    # what the command started in groups of their own is our child once its parent is gone
    adopt_orphans()
    if os.getppid() != parent:  # it was gone before it could tell
        end_group()

    def follow() -> None:
        libc.prctl(PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    try:
        child = subprocess.Popen(sys.argv[2:], preexec_fn=follow)
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
    # the pipes are the command's alone: they end with it
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    while os.wait()[0] != child.pid:  # the others were left by their parents
        pass
    end_group()


def end_group(*_: object) -> None:
    """End all remaining processes of the command, in whatever group, and this process."""
    for _ in range(MAX_ROUNDS):
        if not (left := children()):
            break
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # ours to reap, so the number is no other's
        for pid in left:
            os.waitpid(pid, 0)
    os.killpg(0, signal.SIGKILL)


def children() -> list[int]:
    """Return the ids of the processes whose parent this is."""
    here = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            here.append(int(name))
    return here


if __name__ == "__main__":
    main()
