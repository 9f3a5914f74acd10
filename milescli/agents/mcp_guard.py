"""The process around an MCP server that a run has started, or around the process of a foreign
package: it ends the server, with all that the server began, when the run's process is gone. Starts
with the standard library alone.

`python -I -S mcp_guard.py PID COMMAND...`: PID is the process that must live; standard input and
output are the server's. `mcp_server` and `foreign.process` start it, at the head of a process group
of its own.
"""

import ctypes
import os
import signal
import subprocess
import sys

PDEATHSIG = 1
CHILD_SUBREAPER = 36
MAX_ROUNDS = 64
"""Of looking for what is left: each ends those whose parents the one before ended."""


def main() -> None:
    """Ends as the server ends."""
    libc, parent = ctypes.CDLL(None), int(sys.argv[1])
    signal.signal(signal.SIGTERM, end_group)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run
    libc.prctl(PDEATHSIG, signal.SIGTERM)
    # what the server began in groups of their own is our child once its parent is gone
    libc.prctl(CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it was gone before it could tell
        end_group()

    def follow() -> None:
        libc.prctl(PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    try:
        server = subprocess.Popen(sys.argv[2:], preexec_fn=follow)
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
    # the pipes are the server's alone: they end with it
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    while os.wait()[0] != server.pid:  # the others were left by their parents
        pass
    end_group()


def end_group(*_: object) -> None:
    """All that is left of the server, in whatever group, and this process."""
    for _ in range(MAX_ROUNDS):
        if not (left := children()):
            break
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # ours to reap, so the number is no other's
        for pid in left:
            os.waitpid(pid, 0)
    os.killpg(0, signal.SIGKILL)


def children() -> list[int]:
    """Numbers of the processes whose parent this is."""
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
