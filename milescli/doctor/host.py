"""Checks the computer itself: devices, memory, disk, shared memory, limits, loopback. The checks
are quick; each takes its inputs as arguments."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence

from milescli.core.units import GIB, MIB, format_bytes
from milescli.doctor.disk import format_size
from milescli.doctor.finding import Finding, fail, failed, judge_amount, ok, warn
from milescli.doctor.fixes import as_root
from milescli.platform.machine import Machine
from milescli.platform.ports import RANGE, port_holders
from milescli.platform.probe import Accelerators, fault_errors
from milescli.platform.visibility import find_conflicts, find_contradictions, set_variables

SHM_NEEDED, SHM_WANTED = 600 * MIB, 2 * GIB
"""Ray's object store takes 512 MiB there; weights in transit need some more."""
SHM_GROWN = 8 * GIB
"""Free bytes after the proposed fix."""
NUM_PORTS = 16
"""Number of free ports to look for: a run takes one or two for each engine, and some of its own."""


def check_platform(machine: Machine) -> list[Finding]:
    """Report the devices that were found, and anything unusual."""
    node = machine.nodes[0]
    devices = (
        f"{len(node.devices)} x {node.devices[0].name} ({node.devices[0].arch}), "
        f"{node.interconnect}"
        if node.devices
        else "CPU"
    )
    versions = (
        f", driver {machine.driver_version}, runtime {machine.runtime_version or 'unknown'}"
        if machine.driver_version
        else ""
    )
    what = f"{devices}{versions}; {node.cpu_cores} cores, {format_bytes(node.memory_bytes)}"
    if machine.notes:
        return warn(
            "platform",
            what,
            why="; ".join(machine.notes),
            fix="nvidia-smi || amd-smi list   # should show every device",
        )
    return ok("platform", what)


def check_visibility(accelerators: Accelerators, *, environ: Mapping[str, str]) -> list[Finding]:
    """Check CUDA_, HIP_ and ROCR_VISIBLE_DEVICES against each other and the devices; report
    unusable devices first."""
    if faults := fault_errors(accelerators, environ):
        return [finding for fault in faults for finding in failed("visibility", fault)]
    judge, conflicts = fail, find_conflicts(accelerators.kind, accelerators.devices, environ)
    if accelerators.kind == "cpu":
        # nobody obeys them here; they would mislead a machine with devices
        judge, conflicts = warn, find_contradictions(environ)
    if conflicts:
        return [
            finding
            for one in conflicts
            for finding in judge("visibility", one.what, why=one.why, fix=one.fixes)
        ]
    given = set_variables(environ)
    return ok(
        "visibility",
        ", ".join(f"{name}={value}" for name, value in given.items())
        or "no variable hides a device",
    )


def check_shm(*, size_bytes: int, free_bytes: int) -> list[Finding]:
    """Check /dev/shm, which holds Ray's object store and weights in transit."""
    what = f"{format_bytes(free_bytes)} of {format_bytes(size_bytes)} free in /dev/shm"
    grown = format_size(size_bytes - free_bytes + SHM_GROWN)
    fixes = [
        as_root(f"mount -o remount,size={grown} /dev/shm"),
        "ls -lS /dev/shm | head   # what uses the space?",
    ]
    in_docker = f"docker run --shm-size={grown} ...   # in Docker"
    why = f"Ray and the weight channel need {format_bytes(SHM_NEEDED)}; Docker provides 64 MiB"
    return judge_amount(
        "shm",
        what,
        free_bytes,
        needed=(SHM_NEEDED, why),
        wanted=(SHM_WANTED, f"larger models need {format_bytes(SHM_WANTED)}"),
        fix=[*fixes, in_docker],
    )


def shm_sizes() -> tuple[int, int]:
    """Return size and free bytes of /dev/shm; zeros if it does not exist."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def check_ports(*, candidates: Sequence[int] = RANGE, host: str = "127.0.0.1") -> list[Finding]:
    """Check that loopback works, and that enough ports for engines and ranks are free. Names the
    holders of the others."""
    free, taken = [], []
    for port in candidates:
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return fail(
                    "ports",
                    f"{host} does not exist",
                    why=str(error),
                    fix=as_root("ip link set lo up"),
                )
            taken.append(port)
            continue
        free.append(port)
        if len(free) == NUM_PORTS:
            break
    if len(free) < NUM_PORTS:
        what = (
            f"{len(free)} of {NUM_PORTS} ports are free between {candidates[0]} and "
            f"{candidates[-1]}"
        )
        holders = port_holders(candidates)
        holding = ", ".join(f"{name} (pid {pid}) holds {count}" for (pid, name), count in holders)
        fixes = [f"kill {pid}   # {name}, {count} ports" for (pid, name), count in holders[:3]]
        return fail(
            "ports",
            what,
            why=holding or "processes of other users use the rest",
            fix=fixes or "sudo ss -ltnp",
        )
    try:
        with socket.create_server((host, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5.0).close()
    except OSError as error:
        why = f"a connection to {host} failed: {error}"
        return fail(
            "ports",
            f"{host} does not accept connections",
            why=why,
            fix=[as_root("ip link set lo up"), "iptables -L INPUT -n   # is there a firewall?"],
        )
    others = ""
    if taken:
        names = ", ".join(f"{name} (pid {pid})" for (pid, name), _ in port_holders(taken)[:3])
        are = "1 is" if len(taken) == 1 else f"{len(taken)} are"
        others = f"; {are} in use and skipped{f', by {names}' if names else ''}"
    return ok(
        "ports",
        f"{host} responds; {NUM_PORTS} ports from {free[0]} on are free{others}, and none is fixed",
    )
