"""What transformers says of rows of tokens: log-probs, how much they move when every weight does by
one rounding, and the experts that it chose. In a process of its own: `python -m
tests.backends.sglang.witness REQUEST.json`, with {"jobs": [{"folder", "rows", "out"}]}."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from milescli.backends.transformers.logits import logits

_chosen: list[torch.Tensor] = []


def note_experts(module: torch.nn.Module, arguments: tuple) -> None:
    """Every implementation of experts in transformers is called with (hidden states, chosen
    experts, weights)."""
    if type(module).__name__.endswith("Experts"):
        _chosen.append(arguments[1])


def chosen_logprobs(
    logits_of_rows: list[torch.Tensor], rows: list[list[int]]
) -> list[torch.Tensor]:
    """[tokens - 1] of each row."""
    return [
        row[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        for row, ids in zip(logits_of_rows, rows, strict=True)
    ]


def moved_by_one_rounding(folder: Path, target: Path) -> None:
    """The same folder, each weight a unit in its last place higher or lower."""
    target.mkdir()
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.safetensors"):
        signs = {
            name: torch.randn(tensor.shape, generator=generator).sign()
            for name, tensor in load_file(path).items()
        }
        tensors = {
            name: tensor * (1 + 6e-8 * signs[name]) for name, tensor in load_file(path).items()
        }
        save_file(tensors, target / path.name, metadata={"format": "pt"})


def main() -> None:
    """`out`: a safetensors file with `logprobs.I`, `moved.I` [tokens - 1] and `experts.I` [tokens,
    MoE layers, topk] of row I."""
    torch.set_num_threads(1)
    torch.nn.modules.module.register_module_forward_pre_hook(note_experts)
    for job in json.loads(Path(sys.argv[1]).read_text())["jobs"]:
        _chosen.clear()
        logits_of_rows = logits(Path(job["folder"]), job["rows"], dtype=torch.float32)
        layers = len(_chosen) // len(logits_of_rows)
        tensors = {
            f"logprobs.{index}": row
            for index, row in enumerate(chosen_logprobs(logits_of_rows, job["rows"]))
        }
        for index, ids in enumerate(job["rows"] if layers else ()):
            chosen = [
                layer.view(len(ids), -1) for layer in _chosen[index * layers : (index + 1) * layers]
            ]
            tensors[f"experts.{index}"] = torch.stack(chosen, dim=1).to(torch.int32)
        near = Path(f"{job['out']} moved")
        moved_by_one_rounding(Path(job["folder"]), near)
        moved = logits(near, job["rows"], dtype=torch.float32)
        tensors |= {
            f"moved.{index}": row for index, row in enumerate(chosen_logprobs(moved, job["rows"]))
        }
        save_file(tensors, job["out"])


if __name__ == "__main__":
    main()
