"""Three optimizer steps by transformers and plain PyTorch, for comparison: `python -m
tests.backends.megatron.plain_adamw FOLDER SETTINGS.json OUT`. In a process of its own,
for the trainer's CPU shim changes torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.backends.megatron.plain_rounding import rounding


def main() -> None:
    """SETTINGS: {"steps", "lr", "weight_decay", "eps", "betas", "clip_grad"}; each step is a list
    of rows of tokens, of which all but the first are trained on, their losses averaged. With
    "form", of weights that are rounded to it."""
    from transformers import AutoModelForCausalLM

    folder, settings = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    plain = [weight for weight in model.parameters() if weight.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings["weight_decay"]},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=settings["lr"],
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
    )
    for rows in settings["steps"]:
        count = sum(len(row) - 1 for row in rows)
        loss = torch.zeros(())
        with rounding(model, settings.get("form")):
            for row in rows:
                ids = torch.tensor([row])
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
                loss = loss - logprobs.gather(-1, ids[0, 1:, None]).sum() / count
            optimizer.zero_grad()
            loss.backward()
        for weight in optimizer.state:
            # of entries of several positions, which short rows do not have: its momentum goes on
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"])
        optimizer.step()
    model.save_pretrained(sys.argv[3])


if __name__ == "__main__":
    main()
