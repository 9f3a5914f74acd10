"""Links between devices: what the vendor's tool says of each pair, and what a collective over each
pair reached. Pure; `trials` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from milescli.core.units import format_bytes
from milescli.doctor.collective import Report
from milescli.doctor.finding import Finding, fail, ok, skip, warn
from milescli.platform.machine import DEVICE_MODELS, Interconnect
from milescli.platform.probe import Accelerators

LINK_BYTES_PER_S: dict[str, float] = {
    "A100": 300e9,
    "H100": 450e9,
    "H200": 450e9,
    "B200": 900e9,
    "B300": 900e9,
    "GB200": 900e9,
    "GB300": 900e9,
    "MI300X": 64e9,
    "MI325X": 64e9,
    "MI350X": 76.8e9,
    "MI355X": 76.8e9,
}
"""One way between two devices, by the vendors' data sheets: NVLink 3, 4 and 5 through a switch give
a pair the whole bandwidth of a device (600, 900, 1800 GB/s both ways); AMD's devices have one
Infinity Fabric link to each of the seven others (128, 153.6 GB/s both ways)."""
MOST_NAMED = 6
"""Pairs in one line."""
SHARE_WANTED = 0.5
"""Of the link. A collective of two ranks reaches about 0.7 to 0.8 in others' reports; below a half
something is wrong."""


def check_topology(found: Accelerators) -> list[Finding]:
    """Whether the devices are linked as their model can be."""
    if found.kind == "cpu":
        return skip("topology", "there is no accelerator")
    if len(found.devices) < 2:
        return skip("topology", "one device has no link to another")
    slow = sorted(pair for pair, link in found.links.items() if not _is_fast(link))
    want = _wanted(found.devices[0].name)
    num_pairs = len(found.devices) * (len(found.devices) - 1) // 2
    look = "nvidia-smi nvlink --status" if found.kind == "cuda" else "amd-smi xgmi"
    if not found.links:
        why = "the vendor's tool did not tell; collectives may go over the host"
        return warn(
            "topology",
            f"links of {num_pairs} pairs are unknown",
            why=why,
            fix=_topology_command(found),
        )
    told = ", ".join(f"{a}-{b} {found.links[a, b]}" for a, b in slow[:4]) + (
        f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    )
    if slow and (want in ("nvlink", "xgmi") or len(slow) < num_pairs):
        return warn(
            "topology",
            f"{len(slow)} of {num_pairs} pairs have no {want if want != 'pcie' else 'fast link'}",
            why=f"{told}: tensor parallel over such a pair runs at the speed of PCIe",
            fix=[f"{look}   # a link that is down", _topology_command(found)],
        )
    if slow:
        return ok("topology", f"{num_pairs} pairs over PCIe, as this model has it")
    return ok("topology", f"all {num_pairs} pairs over {found.interconnect}")


def judge_collective(
    reports: Sequence[Report],
    *,
    backend: str,
    device: str,
    seconds: float,
    no_access: Sequence[str],
) -> list[Finding]:
    """Of all processes on one machine. `device`: its name, or empty on a CPU; `no_access`: pairs
    that cannot read each other's memory."""
    check = "collective"
    broken = next(
        (each for each in reports if each.problem),
        next((each for each in reports if each.step), None),
    )
    if broken is not None:
        why = broken.problem or f"it did not end within {seconds:.0f} s, or its process was killed"
        fixes = [
            "dmesg | tail   # what the driver says of a device or a link",
            "NCCL_DEBUG=INFO miles doctor   # what was tried",
        ]
        lo = "ip -brief address show lo   # 127.0.0.1 must be there, and no firewall before it"
        whole = f"{backend}: {broken.step} failed"
        return fail(check, whole, why=why, fix=fixes if device else lo) + skip(
            "links", f"see `{check}`, which comes first"
        )
    speed = reports[0].everyone
    told = f", {format_bytes(speed)}/s of bus bandwidth" if speed else ""
    found = ok(
        check, f"{backend} added numbers over {len(reports)} processes in {seconds:.1f} s{told}"
    )
    if not device:
        return found + skip("links", "there is no link between devices on a CPU")
    if len(reports) < 2:
        return found + skip("links", "one device has no link to another")
    return found + judge_bandwidths(reports[0].pairs, no_access, device=device)


def judge_bandwidths(
    speeds: Mapping[str, float], no_access: Sequence[str], *, device: str
) -> list[Finding]:
    """`speeds`: `0-1` -> bytes per second of a collective over the pair; `no_access` as in
    `judge_collective`."""
    if no_access:
        return fail(
            "links",
            f"{len(no_access)} directions have no peer access",
            why=f"{_few(no_access)}: weights cannot be handed over by memory handle there, and "
            "collectives go over the host",
            fix=[
                "nvidia-smi topo -p2p r || amd-smi topology   # why",
                "--set weights.channel=distributed",
            ],
        )
    slowest, usual = min(speeds, key=lambda pair: speeds[pair]), median(speeds.values())
    told = (
        f"slowest pair {slowest}: {format_bytes(speeds[slowest])}/s; median {format_bytes(usual)}/s"
    )
    model = _model_of(device)
    link = LINK_BYTES_PER_S.get(model or "")
    slow = sorted(
        (pair for pair in speeds if speeds[pair] < SHARE_WANTED * (link or usual)),
        key=lambda pair: speeds[pair],
    )
    if slow:
        against = (
            f"the link of {model} gives {format_bytes(link)}/s one way"
            if link
            else "the others are twice as fast"
        )
        return warn(
            "links",
            told,
            why=f"{len(slow)} of {len(speeds)} pairs are slow: {_few(slow)}; {against}, and a step "
            "waits for the slowest pair",
            fix=[
                "nvidia-smi nvlink --errorcounters || amd-smi xgmi   # a link that fails",
                "NCCL_DEBUG=INFO miles doctor",
            ],
        )
    return ok("links", told)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (
        f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    )


def _is_fast(link: str) -> bool:
    return link.startswith("NV") or link == "XGMI"


def _model_of(name: str) -> str | None:
    """H200 of `NVIDIA H200`; the longest that fits, for H200 is also in GH200."""
    words = name.upper().replace("-", " ").split()
    return next(
        (model for model in sorted(DEVICE_MODELS, key=len, reverse=True) if model in words), None
    )


def _wanted(name: str) -> Interconnect:
    """H100 and A100 also exist as PCIe cards, whose names say so."""
    model = _model_of(name)
    return DEVICE_MODELS[model].interconnect if model and "PCIE" not in name.upper() else "pcie"


def _topology_command(found: Accelerators) -> str:
    return (
        "nvidia-smi topo -m" if found.kind == "cuda" else "amd-smi topology || rocm-smi --showtopo"
    )
