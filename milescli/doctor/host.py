"""Checks of the computer itself: devices, memory, disk, shared memory, limits, loopback. Quick; each takes its inputs as arguments."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from milescli.backends.sglang.ports import RANGE
from milescli.core.units import GIB, MIB, format_bytes
from milescli.doctor.finding import Finding, Status, fail, ok, warn
from milescli.platform.machine import Machine
from milescli.platform.probe import Accelerators
from milescli.platform.visibility import find_conflicts, find_contradictions, set_variables

MEMORY_NEEDED, MEMORY_WANTED = 3 * GIB, 8 * GIB
DISK_NEEDED, DISK_WANTED = 2 * GIB, 20 * GIB
DISK_SPEED_WANTED = 50 * MIB
"""Per second; a checkpoint of a 1B model and its optimizer is 16 GB."""
SHM_NEEDED, SHM_WANTED = 600 * MIB, 2 * GIB
"""Ray's object store takes 512 MiB there, weights in transit some more."""
NOFILE_NEEDED, NOFILE_WANTED = 1024, 8192
NUM_PORTS = 16


def check_platform(machine: Machine) -> list[Finding]:
    """What was found, and what was odd."""
    node = machine.nodes[0]
    devices = (
        f"{len(node.devices)} x {node.devices[0].name} ({node.devices[0].arch}), {node.interconnect}" if node.devices else "CPU"
    )
    versions = (
        f", driver {machine.driver_version}, runtime {machine.runtime_version or 'unknown'}" if machine.driver_version else ""
    )
    what = f"{devices}{versions}; {node.cpu_cores} cores, {format_bytes(node.memory_bytes)}"
    if machine.notes:
        return warn(
            "platform", what, why="; ".join(machine.notes), fix="nvidia-smi || amd-smi list   # should show every device"
        )
    return ok("platform", what)


def check_visibility(found: Accelerators, *, environ: Mapping[str, str]) -> list[Finding]:
    """CUDA_, HIP_, ROCR_VISIBLE_DEVICES against each other and the devices."""
    status = Status.FAIL
    conflicts = find_conflicts(found.kind, found.devices, environ)
    if found.kind == "cpu":  # nobody obeys them here; a machine with devices would stumble
        status, conflicts = Status.WARN, find_contradictions(environ)
    if conflicts:
        return [Finding(check="visibility", status=status, what=each.what, why=each.why, fix=each.fixes) for each in conflicts]
    given = set_variables(environ)
    return ok("visibility", ", ".join(f"{name}={value}" for name, value in given.items()) or "no variable hides a device")


def check_memory(*, total_bytes: int, available_bytes: int) -> list[Finding]:
    """Main memory, as far as this process may use it."""
    what = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)} free"
    look = "ps aux --sort=-rss | head   # who holds it"
    if available_bytes < MEMORY_NEEDED:
        return fail("memory", what, why=f"the smallest run needs {format_bytes(MEMORY_NEEDED)}", fix=look)
    if available_bytes < MEMORY_WANTED:
        return warn("memory", what, why=f"runs with more than one engine or rank want {format_bytes(MEMORY_WANTED)}", fix=look)
    return ok("memory", what)


def available_memory(*, root: Path = Path("/")) -> int:
    """MemAvailable of /proc/meminfo; 0 where it is not told."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def check_disk(folder: Path, *, free_bytes: int | None = None, bytes_per_s: float | None = None) -> list[Finding]:
    """Space and writing speed where runs live (or will: the nearest folder that exists)."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    another = "--set run.dir=/another/disk/runs"
    if not os.access(existing, os.W_OK):
        return fail("disk", f"{existing} cannot be written", why="runs are kept there", fix=another)
    if free < DISK_NEEDED:
        why = f"the smallest run with two checkpoints needs {format_bytes(DISK_NEEDED)}"
        return fail("disk", f"{format_bytes(free)} free in {existing}", why=why, fix=[another, f"du -sh {folder}/*"])
    speed = write_speed(existing) if bytes_per_s is None else bytes_per_s
    what = f"{format_bytes(free)} free in {existing}, writes {format_bytes(speed)}/s"
    if free < DISK_WANTED or speed < DISK_SPEED_WANTED:
        why = f"wanted: {format_bytes(DISK_WANTED)} and {format_bytes(DISK_SPEED_WANTED)}/s, for checkpoints of real models"
        return warn("disk", what, why=why, fix=another)
    return ok("disk", what)


def write_speed(folder: Path, *, size_bytes: int = 32 * MIB) -> float:
    """Bytes per second of one synced write."""
    block = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.monotonic()
        for _ in range(size_bytes // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size_bytes / (time.monotonic() - start)


def check_shm(*, size_bytes: int, free_bytes: int) -> list[Finding]:
    """/dev/shm: Ray's object store and weights on their way live there."""
    what = f"{format_bytes(free_bytes)} of {format_bytes(size_bytes)} free in /dev/shm"
    fixes = ["docker run --shm-size=8g ...", "mount -o remount,size=8G /dev/shm", "ls -lS /dev/shm | head   # what fills it"]
    if free_bytes < SHM_NEEDED:
        return fail(
            "shm", what, why=f"Ray and the weight channel need {format_bytes(SHM_NEEDED)}; Docker gives 64 MiB", fix=fixes
        )
    if free_bytes < SHM_WANTED:
        return warn("shm", what, why=f"larger models want {format_bytes(SHM_WANTED)}", fix=fixes)
    return ok("shm", what)


def shm_sizes() -> tuple[int, int]:
    """Size and free bytes of /dev/shm; zeros where there is none."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def check_limits(*, soft: int | None = None, hard: int | None = None) -> list[Finding]:
    """Open files: every actor and engine holds hundreds."""
    found_soft, found_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = found_soft if soft is None else soft, found_hard if hard is None else hard
    if soft == resource.RLIM_INFINITY or soft >= NOFILE_WANTED:
        return ok("limits", "open files: no limit" if soft == resource.RLIM_INFINITY else f"open files: {soft}")
    may_raise = hard == resource.RLIM_INFINITY or hard >= NOFILE_WANTED
    fix = (
        "ulimit -n 65536"
        if hard == resource.RLIM_INFINITY
        else f"ulimit -n {hard}"
        if may_raise
        else "docker run --ulimit nofile=65536:65536 ..."
    )
    told = f"open files: {soft}, may be raised to {'any number' if hard == resource.RLIM_INFINITY else hard}"
    if soft < NOFILE_NEEDED:
        return fail("limits", told, why=f"Ray and SGLang need {NOFILE_NEEDED} at the least", fix=fix)
    return warn("limits", told, why=f"many engines and ranks want {NOFILE_WANTED}", fix=fix)


def check_ports(*, candidates: Sequence[int] = RANGE, host: str = "127.0.0.1") -> list[Finding]:
    """Loopback answers, and enough of the ports are free that engines, router and ranks are given. Names who holds them."""
    free = []
    for port in candidates:
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return fail("ports", f"{host} is not there", why=str(error), fix="ip link set lo up")
            continue
        free.append(port)
        if len(free) == NUM_PORTS:
            break
    if len(free) < NUM_PORTS:
        what = f"{len(free)} of {NUM_PORTS} ports are free between {candidates[0]} and {candidates[-1]}"
        holders = port_holders(candidates)
        told = ", ".join(f"{name} (pid {pid}) holds {count}" for (pid, name), count in holders)
        fixes = [f"kill {pid}   # {name}, {count} ports" for (pid, name), count in holders[:3]]
        return fail("ports", what, why=told or "processes of other users hold the rest", fix=fixes or "sudo ss -ltnp")
    try:
        with socket.create_server((host, free[0])) as listener:
            socket.create_connection(listener.getsockname(), timeout=5.0).close()
    except OSError as error:
        why = f"a connection to {host} failed: {error}"
        return fail(
            "ports", f"{host} takes no connections", why=why, fix=["ip link set lo up", "iptables -L INPUT -n   # a firewall"]
        )
    return ok("ports", f"{host} answers; {NUM_PORTS} ports from {free[0]} on are free, none is fixed")


def port_holders(ports: Collection[int]) -> list[tuple[tuple[int, str], int]]:
    """((pid, name), number of these ports that it listens on), most first; only processes that we may look at."""
    import psutil

    held: Counter[tuple[int, str]] = Counter()
    for each in psutil.net_connections(kind="tcp"):
        if each.status == psutil.CONN_LISTEN and each.pid is not None and each.laddr.port in ports:
            with contextlib.suppress(psutil.Error):
                held[each.pid, psutil.Process(each.pid).name()] += 1
    return held.most_common()
