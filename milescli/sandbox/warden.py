"""Supervises one run under Landlock: confines a child, becomes the parent of every orphaned process
of the run, and ends all of them. Not confined itself; called by the jail.

`python -I -S -c "... main()" JOB LEASH`: descriptors of the job, and of a pipe that closes when the
run must end."""

from __future__ import annotations

import ctypes
import marshal
import os
import select
import sys
import time
from _signal import SIGKILL  # `signal` costs every run some milliseconds

from milescli.sandbox import landlock
from milescli.sandbox.processes import children_of, descendants_of

_SUBREAPER, _PDEATHSIG = 36, 1
_ENDING_S = 5.0
SIGNAL_BASE = 128
"""Exit codes above it mean a signal, as in shells and bubblewrap."""


def main() -> None:
    """Run the child, and exit with its exit code."""
    job_fd, leash = int(sys.argv[1]), int(sys.argv[2])
    code, job = marshal.loads(os.pread(job_fd, os.fstat(job_fd).st_size, 0))
    os.close(job_fd)
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)
    warden = os.getpid()
    child = os.fork()
    if child == 0:
        _confine(job)
        libc.prctl(_PDEATHSIG, SIGKILL)  # a change of user would clear it
        if os.getppid() != warden:
            os._exit(1)
        landlock.set_filter(job["filter"])
        exec(code, {"__name__": "inside", "JOB": job})
        sys.exit()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2, job["control"]):  # they end with the run's own processes
        os.dup2(nothing, stream)
    ends = select.poll()
    ends.register(os.pidfd_open(child), select.POLLIN)
    ends.register(leash, select.POLLIN | select.POLLHUP)
    ends.poll()
    if not _has_ended(child):
        os.kill(child, SIGKILL)
    status = os.waitpid(child, 0)[1]
    _end_all(job["uid"])
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNAL_BASE - code)


def _confine(job: dict[str, object]) -> None:
    os.setsid()
    os.chdir(job["folder"])
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != job["control"]:
            try:  # noqa: SIM105 - contextlib costs every run some milliseconds
                os.close(descriptor)
            except OSError:
                pass  # of the listing itself
    landlock.restrict(read=job["readable"], devices=job["devices"], write=job["folder"])
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    sys.path[:] = job["path"]
    for name in [name for name in sys.modules if name.startswith("milescli")]:
        del sys.modules[name]


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_all(uid: int | None) -> None:
    """Kill everything that is left, however it hides: orphans become our children. Bounded."""
    deadline = time.monotonic() + _ENDING_S
    while time.monotonic() < deadline:
        if not children_of(os.getpid()):
            return
        if uid is not None:
            _end_user(uid)
        for pid in descendants_of(os.getpid()):
            try:
                os.kill(pid, SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _end_user(uid: int) -> None:
    """Kill all processes of the run's own user at once, which no fork outruns."""
    if (killer := os.fork()) == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)
