"""Replays hand-written outputs of the vendors' tools (`tools/`), and plants what the kernel lists:
a stand-in for hardware that is not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from milescli.platform import cuda, rocm
from milescli.platform.probe import RunTool, ToolReply

FOLDER = Path(__file__).parent / "tools"


def text(name: str) -> str:
    """One file of the folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


NVIDIA = {
    cuda.QUERY: text("nvidia_query.txt"),
    cuda.SUMMARY: text("nvidia_summary.txt"),
    cuda.TOPOLOGY: text("nvidia_topo.txt"),
}
GB200 = {cuda.QUERY: text("gb200_query.txt"), cuda.TOPOLOGY: text("gb200_topo.txt")}
MIG = {
    cuda.QUERY: text("mig_query.txt"),
    cuda.INSTANCES: text("mig_list.txt"),
    cuda.SUMMARY: text("mig_summary.txt"),
}
LOST = {cuda.QUERY: text("lost_query.txt")}
AMD = {rocm.AMD_STATIC: text("amd_static.json"), rocm.AMD_TOPOLOGY: text("amd_topology.json")}
ROCM = {rocm.ROCM_STATIC: text("rocm_static.txt"), rocm.ROCM_TOPOLOGY: text("rocm_topology.json")}


def replay(texts: Mapping[tuple[str, ...], str], *, problem: str = "") -> RunTool:
    """A tool that says `texts` and, to all else, nothing (or `problem`)."""

    def run(command: Sequence[str]) -> ToolReply:
        known = texts.get(tuple(command))
        return ToolReply(text=known) if known is not None else ToolReply(text="", problem=problem)

    return run


def fail(tool: str, said: str, *, text: str = "") -> RunTool:
    """`tool` prints `text` and fails with `said`; the others are not installed."""
    problem = said if "did not answer" in said else f"`{tool}` ended with 9: {said}"

    def run(command: Sequence[str]) -> ToolReply:
        return ToolReply(text=text, problem=problem) if command[0] == tool else ToolReply(text="")

    return run


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Files of /dev, /proc and /sys below `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def plant_amd(
    root: Path, *, versions: Sequence[int] = (90402, 90402), link_type: int = 11, files: bool = True
) -> Path:
    """What amdkfd reports of a host and these devices, all linked; with their device files or (a
    container) without."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    kernel = {
        "dev/kfd": "",
        f"{nodes}/0/properties": "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n",
    }
    for number, version in enumerate(versions, start=1):
        node, minor = f"{nodes}/{number}", 127 + number
        kernel[f"{node}/properties"] = (
            f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nvendor_id 4098\n"
            f"device_id {29857 if version == 90402 else 0}\ndrm_render_minor {minor}\nunique_id "
            f"{4096 + number}\n"
        )
        kernel[f"{node}/mem_banks/0/properties"] = "heap_type 1\nsize_in_bytes 206141652992\n"
        others = [0, *(other for other in range(1, len(versions) + 1) if other != number)]
        for place, other in enumerate(others):
            kind = link_type if other else 2
            kernel[f"{node}/io_links/{place}/properties"] = (
                f"type {kind}\nnode_from {number}\nnode_to {other}\n"
            )
        if files:
            kernel[f"dev/dri/renderD{minor}"] = ""
    return plant(root, kernel)
