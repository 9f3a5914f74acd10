"""Replays hand-written outputs of the vendors' tools (`tools/`): a stand-in for hardware that is not here."""

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
AMD = {rocm.AMD_STATIC: text("amd_static.json"), rocm.AMD_TOPOLOGY: text("amd_topology.json")}
ROCM = {rocm.ROCM_STATIC: text("rocm_static.txt"), rocm.ROCM_TOPOLOGY: text("rocm_topology.json")}


def replay(texts: Mapping[tuple[str, ...], str], *, problem: str = "") -> RunTool:
    """A tool that says `texts` and, to all else, nothing (or `problem`)."""

    def run(command: Sequence[str]) -> ToolReply:
        known = texts.get(tuple(command))
        return ToolReply(text=known) if known is not None else ToolReply(text="", problem=problem)

    return run
