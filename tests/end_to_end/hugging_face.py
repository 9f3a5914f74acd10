"""transformers as the independent witness of exported folders. Needs the operator stubs that torchvision lacks beside a CPU torch."""

from __future__ import annotations

from pathlib import Path

import torch


def greedy(folder: Path, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
    """Greedy answers, up to and with the end-of-sequence token."""
    _declare_torchvision_operators()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def _declare_torchvision_operators() -> None:
    if hasattr(torch.ops.torchvision, "nms"):
        return
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
