"""The process around an MCP server that a run has started: it ends the server, with all that the
server began, when the run's process is gone. Starts with the standard library alone.

`python -I -S mcp_guard.py PID COMMAND...`: PID is the process that must live; standard input and
output are the server's. `mcp_server` starts it, at the head of a process group of its own.
"""

import ctypes
import os
import signal
import subprocess
import sys

PDEATHSIG = 1


def main() -> None:
    """Ends as the server ends."""
    libc, parent = ctypes.CDLL(None), int(sys.argv[1])
    signal.signal(signal.SIGTERM, end_group)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run
    libc.prctl(PDEATHSIG, signal.SIGTERM)
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
    server.wait()
    end_group()


def end_group(*_: object) -> None:
    """All that is left of the server, and this process."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
