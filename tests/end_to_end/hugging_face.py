"""transformers as the independent witness of exported folders."""

from __future__ import annotations

from pathlib import Path

import torch


def greedy(folder: Path, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
    """Greedy responses, up to and with the end-of-sequence token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    responses = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False
            )
        responses.append(out[0, len(prompt) :].tolist())
    return responses
