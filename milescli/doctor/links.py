"""Judges links between devices: what the vendor's tool reports of each pair, and the bandwidth of a
collective over each pair. Pure; `trials` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from milescli.core.units import format_bytes, format_few
from milescli.doctor.collective import Report, first_broken
from milescli.doctor.finding import Finding, fail, ok, skip, warn
from milescli.plan.devices import pair_bandwidth
from milescli.platform.machine import DEVICE_MODELS, Device, Interconnect, model_of
from milescli.platform.probe import Accelerators

MAX_NAMED = 6
"""Largest number of pairs that one line lists."""
SHARE_WANTED = 0.5
"""Expected fraction of the link's bandwidth. A collective of two ranks is reported to reach about
0.7 to 0.8; less than half means that something is wrong."""


def check_topology(accelerators: Accelerators) -> list[Finding]:
    """Check that the devices are linked as their model can be."""
    if accelerators.kind == "cpu":
        return skip("topology", "there is no accelerator")
    if len(accelerators.devices) < 2:
        return skip("topology", "one device has no link to another")
    slow = sorted(pair for pair, link in accelerators.links.items() if not _is_fast(link))
    want = _usual_link(accelerators.devices[0])
    num_pairs = len(accelerators.devices) * (len(accelerators.devices) - 1) // 2
    look = "nvidia-smi nvlink --status" if accelerators.kind == "cuda" else "amd-smi xgmi"
    if not accelerators.links:
        why = "the vendor's tool does not show them; collectives may go through the host"
        return warn(
            "topology",
            f"the links of {num_pairs} pairs are unknown",
            why=why,
            fix=_topology_command(accelerators),
        )
    slowest = format_few([f"{a}-{b} {accelerators.links[a, b]}" for a, b in slow], 4)
    if slow and (want in ("nvlink", "xgmi") or len(slow) < num_pairs):
        return warn(
            "topology",
            f"{len(slow)} of {num_pairs} pairs have no {want if want != 'pcie' else 'fast link'}",
            why=f"{slowest}: tensor parallelism over such a pair runs at PCIe speed",
            fix=[f"{look}   # is a link down?", _topology_command(accelerators)],
        )
    if slow:
        return ok("topology", f"{num_pairs} pairs over PCIe, as usual for this model")
    return ok("topology", f"all {num_pairs} pairs over {accelerators.interconnect}")


def judge_collective(
    reports: Sequence[Report],
    *,
    backend: str,
    device: str,
    seconds: float,
    no_access: Sequence[str],
) -> list[Finding]:
    """Judge the reports of all processes on one machine. `device` is its name, or empty on a CPU;
    `no_access` are the pairs that cannot read each other's memory."""
    check = "collective"
    broken = first_broken(reports)
    if broken is not None:
        why = (
            broken.problem or f"it did not finish within {seconds:.0f} s, or its process was killed"
        )
        fixes = [
            "dmesg | tail   # messages of the driver about a device or a link",
            "NCCL_DEBUG=INFO miles doctor   # shows what was tried",
        ]
        lo = "ip -brief address show lo   # 127.0.0.1 must exist, and no firewall may block it"
        whole = f"{backend}: {broken.step} failed"
        return fail(check, whole, why=why, fix=fixes if device else lo) + skip(
            "links", f"see `{check}` first"
        )
    speed = reports[0].everyone
    bandwidth = f", {format_bytes(speed)}/s of bus bandwidth" if speed else ""
    findings = ok(
        check,
        f"{backend} added numbers across {len(reports)} processes in {seconds:.1f} s{bandwidth}",
    )
    if not device:
        return findings + skip("links", "a CPU has no links between devices")
    if len(reports) < 2:
        return findings + skip("links", "one device has no link to another")
    return findings + judge_bandwidths(reports[0].pairs, no_access, device=device)


def judge_bandwidths(
    speeds: Mapping[str, float], no_access: Sequence[str], *, device: str
) -> list[Finding]:
    """Judge the bandwidth of each pair. `speeds` maps `0-1` to the bytes per second of a collective
    over the pair; `no_access` is as in `judge_collective`."""
    if no_access:
        return fail(
            "links",
            f"{len(no_access)} directions have no peer access",
            why=f"{format_few(no_access, MAX_NAMED)}: weights cannot be passed there by "
            "memory handle, and collectives go through the host",
            fix=[
                "nvidia-smi topo -p2p r || amd-smi topology   # shows why",
                "--set weights.channel=distributed",
            ],
        )
    slowest, usual = min(speeds, key=lambda pair: speeds[pair]), median(speeds.values())
    what = (
        f"slowest pair {slowest}: {format_bytes(speeds[slowest])}/s; median {format_bytes(usual)}/s"
    )
    model = model_of(Device(index=0, name=device, memory_bytes=0, arch=""))
    link = pair_bandwidth(model) if model else None
    slow = sorted(
        (pair for pair in speeds if speeds[pair] < SHARE_WANTED * (link or usual)),
        key=lambda pair: speeds[pair],
    )
    if slow:
        against = (
            f"the link of {model} has {format_bytes(link)}/s in one direction"
            if link
            else "the others are twice as fast"
        )
        return warn(
            "links",
            what,
            why=f"{len(slow)} of {len(speeds)} pairs are slow: {format_few(slow, MAX_NAMED)}; "
            f"{against}, and a step waits for the slowest pair",
            fix=[
                "nvidia-smi nvlink --errorcounters || amd-smi xgmi   # is a link failing?",
                "NCCL_DEBUG=INFO miles doctor",
            ],
        )
    return ok("links", what)


def _is_fast(link: str) -> bool:
    return link.startswith("NV") or link == "XGMI"


def _usual_link(device: Device) -> Interconnect:
    """Return the link of servers with this device; PCIe for cards whose names say so."""
    model = model_of(device)
    return DEVICE_MODELS[model].interconnect if model else "pcie"


def _topology_command(accelerators: Accelerators) -> str:
    return (
        "nvidia-smi topo -m"
        if accelerators.kind == "cuda"
        else "amd-smi topology || rocm-smi --showtopo"
    )
