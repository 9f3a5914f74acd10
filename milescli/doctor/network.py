"""Checks one machine's network: interfaces that variables name, proxies, the host name, RDMA. Reads
/sys; connects to nothing."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.doctor.finding import Finding, fail, ok, skip, warn
from milescli.doctor.fixes import as_root
from milescli.platform.machine import Kind

NCCL_VARIABLE, GLOO_VARIABLE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
PROXIES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "grpc_proxy",
)
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """Describes one network interface."""

    name: str
    is_up: bool
    addresses: tuple[str, ...] = ()
    """IPv4 addresses."""


def list_interfaces() -> list[Interface]:
    """List the interfaces of this machine, by name."""
    import psutil

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return [
        Interface(
            name=name,
            is_up=states[name].isup,
            addresses=tuple(
                address.address
                for address in addresses.get(name, ())
                if address.family == socket.AF_INET
            ),
        )
        for name in sorted(states)
    ]


def check_interfaces(
    interfaces: Sequence[Interface], *, environ: Mapping[str, str], kind: Kind
) -> list[Finding]:
    """Check that NCCL_ and GLOO_SOCKET_IFNAME name interfaces that exist and are up. On a CPU,
    where NCCL is not used, a fault is a warning."""
    findings: list[Finding] = []
    usable = [interface.name for interface in interfaces if interface.is_up and interface.addresses]
    best = next((name for name in usable if not name.startswith(VIRTUAL)), "lo")
    for variable, choose in ((NCCL_VARIABLE, nccl_choice), (GLOO_VARIABLE, gloo_choice)):
        value = environ.get(variable)
        if value is None or choose(value, usable):
            continue
        there = choose(value, [interface.name for interface in interfaces])
        why = (
            f"it exists, but is down or has no address: {', '.join(there)}"
            if there
            else f"the interfaces are {', '.join(usable) or 'none that are up'}"
        )
        # Without accelerators NCCL is not used, and on one node miles itself sets Gloo's to
        # loopback.
        judge = fail if variable == NCCL_VARIABLE and kind != "cpu" else warn
        findings += judge(
            "network",
            f"{variable}={value} does not name a working interface",
            why=why,
            fix=[f"export {variable}={best}", f"unset {variable}"],
        )
    if "lo" not in usable:
        findings += fail(
            "network",
            "loopback is down",
            why="engines, trainer ranks and Ray connect through it",
            fix=as_root("ip link set lo up"),
        )
    return [*findings, *_proxies(environ)] or ok(
        "network",
        ", ".join(
            f"{interface.name} {interface.addresses[0]}"
            for interface in interfaces
            if interface.name in usable
        ),
    )


def nccl_choice(value: str, names: Sequence[str]) -> list[str]:
    """Return the names that NCCL would use by its rules (its manual, NCCL_SOCKET_IFNAME): words are
    prefixes; `^` excludes them; `=` makes them exact. Without a value, lo and docker come last."""
    exclude, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [name for name in names if fits(name) != exclude]


def gloo_choice(value: str, names: Sequence[str]) -> list[str]:
    """Return the names that Gloo would use: exact ones, all of which must exist."""
    wanted = [word.strip() for word in value.split(",")]
    return wanted if all(word in names for word in wanted) else []


def _proxies(environ: Mapping[str, str]) -> list[Finding]:
    """Check that no_proxy excludes loopback: gRPC, and so Ray, sends even that through a proxy."""
    given = [name for name in PROXIES if environ.get(name)]
    exempt = f"{environ.get('no_proxy', '')},{environ.get('NO_PROXY', '')}".split(",")
    if (
        not given
        or "*" in exempt
        or {"127.0.0.1", "localhost"} <= {word.strip() for word in exempt}
    ):
        return []
    return warn(
        "network",
        f"{', '.join(given)} would also redirect connections to this machine itself",
        why="no_proxy does not contain 127.0.0.1 or localhost, where Ray and the engines listen",
        fix='export no_proxy="$no_proxy,127.0.0.1,localhost"',
    )


def check_host_name(
    *,
    name: str | None = None,
    address: str = "127.0.0.1",
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> list[Finding]:
    """Check that the host name resolves: torch.distributed and Ray look it up. `address` is the one
    to which it should resolve, for the fix."""
    name = name or socket.gethostname()
    try:
        return ok("hostname", f"{name} is {resolve(name)}")
    except OSError as error:
        return warn(
            "hostname",
            f"{name} does not resolve",
            why=f"{error}; on one machine miles uses loopback, but several machines would not "
            "find each other",
            fix=f"echo '{address} {name}' | {as_root('tee -a /etc/hosts')}",
        )


def check_rdma(
    *, root: Path = Path("/"), environ: Mapping[str, str], memlock: int | None = None
) -> list[Finding]:
    """Check RDMA devices in /sys/class/infiniband: which ports are up, and whether NCCL_IB_HCA and
    the memlock limit fit. A single machine needs none."""
    folder = root / "sys/class/infiniband"
    ports = {
        path.parent.parent.name + ":" + path.name: _port(path)
        for path in sorted(folder.glob("*/ports/*"))
    }
    wanted = environ.get("NCCL_IB_HCA", "")
    devices = sorted({name.partition(":")[0] for name in ports})
    words = [word.partition(":")[0] for word in wanted.lstrip("^=").split(",") if word]
    if (
        words
        and not wanted.startswith("^")
        and not any(name.startswith(word) for name in devices for word in words)
    ):
        why = (
            f"there are {', '.join(devices) or 'none'}: NCCL would fall back to TCP without a "
            "message"
        )
        return warn(
            "rdma",
            f"NCCL_IB_HCA={wanted} does not name an existing device",
            why=why,
            fix="unset NCCL_IB_HCA",
        )
    if not ports:
        return skip(
            "rdma", "there is no RDMA device; one machine needs none, but several would use TCP"
        )
    up = {name: rate for name, (state, rate) in ports.items() if state == "ACTIVE"}
    what = f"{len(up)} of {len(ports)} ports are up" + (
        f": {', '.join(f'{name} {rate}' for name, rate in up.items())}" if up else ""
    )
    if len(up) < len(ports):
        down = ", ".join(
            f"{name} {state}" for name, (state, _) in ports.items() if state != "ACTIVE"
        )
        return warn("rdma", what, why=down, fix="ibstat   # cable, switch, or `ip link set DEV up`")
    if environ.get("NCCL_IB_DISABLE") == "1":
        return warn(
            "rdma",
            what,
            why="NCCL_IB_DISABLE=1 prevents NCCL from using them",
            fix="unset NCCL_IB_DISABLE",
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if memlock is None else memlock
    if limit != resource.RLIM_INFINITY:
        why = f"memory for RDMA must be locked, but only {limit // 1024} KiB may be"
        raised = (
            "ulimit -l unlimited"
            if os.geteuid() == 0
            else as_root("prlimit --pid $$ --memlock=unlimited")
        )
        return fail(
            "rdma", what, why=why, fix=[raised, "docker run --ulimit memlock=-1 ...   # in Docker"]
        )
    return ok("rdma", what)


def _port(path: Path) -> tuple[str, str]:
    """Read state and rate: ("ACTIVE", "400 Gb/s") from "4: ACTIVE" and "400 Gb/sec (4X NDR)"."""
    try:
        state, rate = (path / "state").read_text().strip(), (path / "rate").read_text().strip()
    except OSError:
        return "unknown", ""
    match = re.match(r"[\d.]+ G", rate)
    return state.partition(": ")[2] or state, f"{match[0]}b/s" if match else rate
