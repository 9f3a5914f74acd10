"""Logits of Hugging Face folders by transformers' own implementation, in a process of its own: Megatron's CPU shim changes torch
process-wide, and a model built beside it computes otherwise. `python -m milescli.backends.transformers.logits REQUEST.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def declare_torchvision_operators() -> None:
    """transformers imports torchvision where it is installed, and its wheel for CUDA finds no operators beside a CPU torch."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@torch.inference_mode()
def logits(folder: Path, rows: list[list[int]], *, dtype: torch.dtype) -> list[torch.Tensor]:
    """[tokens, vocab] float32 per row of token ids. Runs no code of the folder's."""
    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return [model(torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]


def main() -> None:
    """REQUEST: {"threads", "jobs": [{"folder", "rows", "dtype", "out"}]}; `out` is a safetensors file of logits by number of the row."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(request.get("threads", 1))
    for job in request["jobs"]:
        found = logits(Path(job["folder"]), job["rows"], dtype=getattr(torch, job["dtype"]))
        save_file({str(number): row.contiguous() for number, row in enumerate(found)}, job["out"])


if __name__ == "__main__":
    main()
