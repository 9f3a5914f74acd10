"""Layouts whose memory is measured: world -> (model, layout, positions of a sequence, precision).
Run by the worlds of `conftest`."""

from __future__ import annotations

from typing import NamedTuple


class MemoryCase(NamedTuple):
    """One model under one layout; of `mtp...` the MTP layer is trained, too."""

    model: str
    layout: dict[str, object]
    tokens: int = 64
    precision: str = "bf16"
    indexer: str = "frozen"
    rank: int = 0
    """Of an adapter; 0: all weights are trained."""

    @property
    def train(self) -> dict[str, object] | None:
        """Section `train` of the recipe."""
        return {"lora": {"rank": self.rank}} if self.rank else None

    @property
    def name(self) -> str:
        """Of the case."""
        cuts = " ".join(f"{key}{value}" for key, value in self.layout.items())
        trained = " indexer" if self.indexer != "frozen" else ""
        adapter = f" rank{self.rank}" if self.rank else ""
        return f"memory of {self.model} {self.precision} {cuts}".strip() + trained + adapter


_FULL = {"recompute": "full"}
_SEQUENCE = {"tp": 2, "sequence_parallel": True}
MEMORY: dict[str, list[MemoryCase]] = {
    "one": [
        MemoryCase("dense", {}, precision="fp32"),
        MemoryCase("dense", {}),
        MemoryCase("dense", _FULL),
        MemoryCase("dense", {"offload_optimizer": True}),
        MemoryCase("moe", {}),
        MemoryCase("moe", _FULL),
        MemoryCase("latent", {}),
        MemoryCase("latent", _FULL),
        MemoryCase("mtp", {}),
        MemoryCase("mtp", _FULL),
        MemoryCase("mtpnext", {}, tokens=256),
        MemoryCase("mtpv4", {}),
        MemoryCase("mtpv4", _FULL),
        MemoryCase("delta", {}, tokens=256),
        MemoryCase("nemotron", _FULL, tokens=256),
        MemoryCase("glm", {}),
        MemoryCase("v4", {}),
        MemoryCase("v4", {}, precision="fp32"),
        MemoryCase("v4", _FULL),
        MemoryCase("sparse", {}, tokens=12),
        MemoryCase("sparse", {}, tokens=12, indexer="kl"),
        MemoryCase("sparse", _FULL, tokens=12, indexer="kl"),
        MemoryCase("v4", {}, indexer="kl"),
        MemoryCase("dense", {}, rank=8),
        MemoryCase("dense", {}, rank=8, precision="fp32"),
        MemoryCase("dense", _FULL, rank=8),
        MemoryCase("moe", {}, rank=8),
        MemoryCase("latent", {}, rank=8),
    ],
    "two": [
        MemoryCase("dense", {"tp": 2}, precision="fp32"),
        MemoryCase("dense", _SEQUENCE),
        MemoryCase("dense", {"pp": 2}),
        MemoryCase("dense", {"pp": 2, **_FULL}),
        MemoryCase("dense", {"pp": 2, "first_stage_layers": 1}),
        MemoryCase("tied", {"pp": 2}),
        MemoryCase("dense", {"dp": 2}),
        MemoryCase("dense", {"cp": 2}),
        MemoryCase("moe", {"ep": 2, "dp": 2}),
        MemoryCase("moe", {**_SEQUENCE, "etp": 2}),
        MemoryCase("latent", {**_SEQUENCE, "ep": 2}),
        MemoryCase("latent", {"pp": 2}),
        MemoryCase("mtp", {"pp": 2}),
        MemoryCase("mtp", {**_SEQUENCE, "ep": 2}),
        MemoryCase("delta", {"cp": 2}, tokens=256),
        MemoryCase("glm", {**_SEQUENCE, "ep": 2}, precision="fp32"),
        MemoryCase("v4", {**_SEQUENCE, "etp": 2}),
        MemoryCase("v4", {"pp": 2}),
        MemoryCase("sparse", {**_SEQUENCE, "etp": 2}, tokens=12, indexer="kl"),
        MemoryCase("dense", _SEQUENCE, rank=8),
        MemoryCase("moe", {**_SEQUENCE, "etp": 2}, rank=8),
    ],
    "four": [
        MemoryCase("dense", {"tp": 2, "pp": 2}),
        MemoryCase("moe", {"ep": 2, "pp": 2, "dp": 2}),
        MemoryCase("latent", {**_SEQUENCE, "pp": 2, "ep": 2}),
    ],
}
