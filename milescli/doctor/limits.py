"""Checks of what this process may have: memory, open files, threads; of the machine, of its cgroups
and of its user."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from milescli.core.units import GIB, format_bytes
from milescli.doctor.finding import Finding, fail, ok, warn
from milescli.doctor.fixes import as_root
from milescli.platform.cpu import cgroup_folders, number_in

MEMORY_NEEDED, MEMORY_WANTED = 3 * GIB, 8 * GIB
"""Free: for the smallest run; for more than one engine or rank."""
NOFILE_NEEDED, NOFILE_WANTED, NOFILE_GOOD = 1024, 8192, 65536
"""Open files: that a run needs; that many engines and ranks want; what the fix sets."""
THREADS_NEEDED, THREADS_WANTED = 600, 2000
"""Beyond those that are there. A run of 13 processes was seen with 341 on 2 cores; libraries start
more on more cores."""


def check_memory(*, total_bytes: int, available_bytes: int) -> list[Finding]:
    """Main memory, as far as this process may use it."""
    what = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)} free"
    look = "ps -eo pid,rss,comm --sort=-rss | head   # who holds it; end what you do not need"
    if available_bytes < MEMORY_NEEDED:
        return fail(
            "memory", what, why=f"the smallest run needs {format_bytes(MEMORY_NEEDED)}", fix=look
        )
    if available_bytes < MEMORY_WANTED:
        return warn(
            "memory",
            what,
            why=f"runs with more than one engine or rank want {format_bytes(MEMORY_WANTED)}",
            fix=look,
        )
    return ok("memory", what)


def check_limits(*, soft: int | None = None, hard: int | None = None) -> list[Finding]:
    """Open files: every actor and engine holds hundreds."""
    own_soft, own_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = own_soft if soft is None else soft, own_hard if hard is None else hard
    if soft == resource.RLIM_INFINITY or soft >= NOFILE_WANTED:
        return ok(
            "limits",
            "open files: no limit" if soft == resource.RLIM_INFINITY else f"open files: {soft}",
        )
    count = hard if hard != resource.RLIM_INFINITY and hard >= NOFILE_WANTED else NOFILE_GOOD
    may_raise = hard == resource.RLIM_INFINITY or hard >= count
    fixes = (
        [f"ulimit -n {count}"]
        if may_raise
        else [as_root(f"prlimit --pid $$ --nofile={count}:{count}")]
    )
    fixes += [] if may_raise else [f"docker run --ulimit nofile={count}:{count} ...   # in Docker"]
    what = (
        f"open files: {soft}, may be raised to "
        f"{'any number' if hard == resource.RLIM_INFINITY else hard}"
    )
    if soft < NOFILE_NEEDED:
        return fail(
            "limits", what, why=f"Ray and SGLang need {NOFILE_NEEDED} at the least", fix=fixes
        )
    return warn("limits", what, why=f"many engines and ranks want {NOFILE_WANTED}", fix=fixes)


def check_threads(*, root: Path = Path("/")) -> list[Finding]:
    """Threads that the cgroups allow: Ray and the engines start hundreds, and die of `can't start
    new thread`."""
    tight = min(_threads_left(root), default=None)
    if tight is None:
        return ok("threads", "no limit")
    left, limit = tight
    what = f"{limit - left} of {limit} are in use"
    fixes = [
        "docker run --pids-limit=-1 ...   # in Docker",
        "systemctl show --property=TasksMax,TasksCurrent user.slice   # elsewhere: which limit it "
        "is",
    ]
    if left < THREADS_NEEDED:
        return fail(
            "threads",
            what,
            why=f"Ray, one engine and one rank start hundreds; {THREADS_NEEDED} should be free",
            fix=fixes,
        )
    if left < THREADS_WANTED:
        return warn(
            "threads",
            what,
            why=f"runs with several engines and ranks want {THREADS_WANTED} more",
            fix=fixes,
        )
    return ok("threads", what)


def _threads_left(root: Path) -> Iterator[tuple[int, int]]:
    """(how many may still be started, the limit) of each group that has one."""
    for group in cgroup_folders(root):
        limit, used = number_in(group / "pids.max"), number_in(group / "pids.current")
        if limit is not None and used is not None:
            yield limit - used, limit
