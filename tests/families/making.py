"""Makes tiny models with transformers and writes their logits, in a process of its own. `python -m
tests.families.making ROOT NAME...`"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.backends.transformers.logits import logits
from milescli.models import parse_facts, table
from tests.families.cases import ALL, ROWS, SERVED_TOO, Case


def randomise(named: list[tuple[str, torch.Tensor]], *, seed: int = 0) -> None:
    """Weights with which every part of the model matters: norms away from 1, routers that choose,
    biases that are not 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in named:
        if name.endswith("tid2eid"):
            experts = torch.rand(len(tensor), 6, generator=generator).argsort(dim=1)
            tensor.data.copy_(experts[:, : tensor.shape[1]])
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 1 and ("norm" in name or name.endswith(("scale", "scalar"))):
            tensor.data.copy_(tensor.data.float() + 0.1 * noise)
        elif name.endswith(("gate.weight", "router.weight")):
            tensor.data.copy_(0.3 * noise)
        elif "bias" in name or "sinks" in name:
            tensor.data.copy_(0.1 * noise)
        elif tensor.dim() > 1:
            tensor.data.copy_(0.08 * noise)


def make(folder: Path, case: Case) -> dict[str, object]:
    """A folder, and what transformers says of it."""
    folder.mkdir(parents=True)
    if not case.made_by_transformers:
        (folder / "config.json").write_text(json.dumps(case.config))
        shapes = table(parse_facts(case.config)).hf_shapes()
        tensors = {
            name: (torch.ones if "norm" in name else torch.zeros)(
                shape, dtype=torch.int64 if name.endswith("tid2eid") else torch.float32
            )
            for name, shape in shapes.items()
        }
        randomise(list(tensors.items()))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return {"num_parameters": None}
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = dict(case.config)
    made_by = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    model = made_by.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    # persistent buffers too: the router's bias is one
    saved = model.state_dict()
    randomise(
        [
            (name, tensor)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if name in saved
        ]
    )
    model.save_pretrained(folder)
    beside = table(parse_facts(case.config)).is_passthrough
    return {
        "num_parameters": sum(
            parameter.numel() for name, parameter in model.named_parameters() if not beside(name)
        )
    }


def main() -> None:
    """One process for all cases: its imports take longer than they do."""
    root, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    counted: dict[str, object] = {}
    for name in names:
        torch.manual_seed(0)
        case = {**ALL, **SERVED_TOO}[name]
        counted[name] = make(root / name, case)
        if case.logits:
            rows = logits(root / name, ROWS, dtype=torch.float32)
            save_file(
                {str(number): row.contiguous() for number, row in enumerate(rows)},
                root / name / "logits.witness",
            )
    (root / "counted.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    main()
