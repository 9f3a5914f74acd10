"""What transformers says of rows of tokens: log-probs, and the experts that it chose. In a process of its own:
`python -m tests.backends.sglang.witness REQUEST.json`, with {"jobs": [{"folder", "rows", "out"}]}."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.backends.transformers.logits import logits

_chosen: list[torch.Tensor] = []


def note_experts(module: torch.nn.Module, arguments: tuple) -> None:
    """Every implementation of experts in transformers is called with (hidden states, chosen experts, weights)."""
    if type(module).__name__.endswith("Experts"):
        _chosen.append(arguments[1])


def main() -> None:
    """`out`: a safetensors file with `logprobs.I` [tokens - 1] and `experts.I` [tokens, MoE layers, topk] of row I."""
    torch.set_num_threads(1)
    torch.nn.modules.module.register_module_forward_pre_hook(note_experts)
    for job in json.loads(Path(sys.argv[1]).read_text())["jobs"]:
        _chosen.clear()
        found = logits(Path(job["folder"]), job["rows"], dtype=torch.float32)
        layers = len(_chosen) // len(found)
        tensors = {}
        for index, (row, ids) in enumerate(zip(found, job["rows"], strict=True)):
            logprobs = row[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            tensors[f"logprobs.{index}"] = logprobs.contiguous()
            if layers:
                chosen = [layer.view(len(ids), -1) for layer in _chosen[index * layers : (index + 1) * layers]]
                tensors[f"experts.{index}"] = torch.stack(chosen, dim=1).to(torch.int32)
        save_file(tensors, job["out"])


if __name__ == "__main__":
    main()
