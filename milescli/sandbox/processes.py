"""Reads a run's processes from /proc: their ids, memory and time. Ends nothing; called by the
supervisor and the warden."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [
            int(child) for tid in threads for child in _text(f"{pid}/task/{tid}/children").split()
        ]
    except OSError:
        return []


def descendants_of(pid: int) -> list[int]:
    """Return the processes below `pid`, without itself; zombies too."""
    below = children_of(pid)
    for child in below:  # grows meanwhile
        below += children_of(child)
    return below


def memory_of(pids: list[int], *, limit_bytes: int) -> int:
    """Return the bytes that the processes hold together. Shared pages count once, which is slow to
    compute and done only if the quick sum exceeds the limit."""
    resident = sum(_resident(pid) for pid in pids)
    return resident if resident <= limit_bytes else sum(_share(pid) for pid in pids)


def cpu_s_of(pids: list[int]) -> float:
    """Return user plus system seconds, including those of ended children that were waited for."""
    return sum(sum(map(int, fields[11:15])) for fields in _stats(pids)) / _TICKS


def num_tasks_of(pids: list[int]) -> int:
    """Return the number of processes and threads."""
    return sum(int(fields[17]) for fields in _stats(pids))


def tasks_of_user(uid: int) -> int:
    """Return the number of a user's tasks on the whole machine, which the kernel compares with
    RLIMIT_NPROC."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _stats(pids: list[int]) -> list[list[str]]:
    """Return the fields of /proc/PID/stat after the name, from its state on."""
    rows = []
    for pid in pids:
        try:
            rows.append(_text(f"{pid}/stat").rpartition(")")[2].split())
        except OSError:
            continue
    return rows


def _resident(pid: int) -> int:
    try:
        return int(_text(f"{pid}/statm").split()[1]) * _PAGE
    except OSError:
        return 0


def _share(pid: int) -> int:
    try:
        lines = _text(f"{pid}/smaps_rollup").splitlines()
    except OSError:
        return _resident(pid)
    return (
        sum(int(line.split()[1]) for line in lines if line.startswith(("Pss:", "SwapPss:"))) * 1024
    )


def _text(name: str) -> str:
    with open(f"/proc/{name}", encoding="utf-8", errors="replace") as file:
        return file.read()
