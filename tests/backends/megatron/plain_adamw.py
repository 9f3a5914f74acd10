"""Three optimizer steps by transformers and plain PyTorch, for comparison: `python -m
tests.backends.megatron.plain_adamw FOLDER SETTINGS.json OUT`. In a process of its own,
for the trainer's CPU shim changes torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid

from tests.backends.megatron.plain_rounding import rounding
from tests.forked import run_module


def plain_losses(settings: dict, model: Path, folder: Path) -> list[float]:
    """The losses of the steps, in another process; weights go to `out` in the folder."""
    asked = folder / "settings.json"
    asked.write_text(json.dumps(settings))
    said = run_module(__name__, model, asked, folder / "out")
    return json.loads(said.splitlines()[-1])


def main() -> None:
    """SETTINGS: {"steps", "lr", "weight_decay", "eps", "betas", "clip_grad"}; each step is a list
    of rows of tokens, of which all but the first are trained on, their losses averaged. With "dpo",
    DPO's beta, it is a list of (prompt, chosen response, rejected one). With "form", of weights
    that are rounded to it. With "muon", its momentum, torch's Muon takes the matrices of layers.
    Prints the losses."""
    from transformers import AutoModelForCausalLM

    folder, settings = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    plain = [weight for weight in model.parameters() if weight.dim() <= 1]
    matrices = _matrices(model) if settings.get("muon") else []
    of_muon = {id(weight) for _, weight, _ in matrices}
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [weight for weight in decayed if id(weight) not in of_muon],
                "weight_decay": settings["weight_decay"],
            },
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=settings["lr"],
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
    )
    muon = _muon(matrices, settings)
    beta, losses = settings.get("dpo"), []
    with torch.no_grad():
        before = [_margins(model, pairs) for pairs in settings["steps"]] if beta else []
    for number, rows in enumerate(settings["steps"]):
        with rounding(model, settings.get("form")):
            if beta:
                loss = -logsigmoid(beta * (_margins(model, rows) - before[number])).mean()
            else:
                count = sum(len(row) - 1 for row in rows)
                logprobs = [_log_prob(model, row[:1], row[1:]) for row in rows]
                loss = -torch.stack(logprobs).sum() / count
            losses.append(loss.item())
            model.zero_grad()
            loss.backward()
        for weight in optimizer.state:
            # of entries of several positions, which short rows do not have: its momentum goes on
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"])
        optimizer.step()
        for name, weight, views in matrices:
            for view, grad in zip(views, _cut(name, weight.grad), strict=True):
                view.grad = grad
        if muon is not None:
            muon.step()
    model.save_pretrained(sys.argv[3])
    print(json.dumps(losses))


Matrices = list[tuple[str, torch.nn.Parameter, list[torch.nn.Parameter]]]
"""Each weight of a layer that is a matrix, or holds those of experts; and its matrices."""


def _matrices(model: torch.nn.Module) -> Matrices:
    return [
        (name, weight, [torch.nn.Parameter(view) for view in _cut(name, weight.data)])
        for name, weight in model.named_parameters()
        if ".layers." in name and weight.dim() > 1
    ]


def _cut(name: str, weight: torch.Tensor) -> list[torch.Tensor]:
    if weight.dim() == 2:
        return [weight]
    halves = 2 if name.endswith("gate_up_proj") else 1
    return [half for expert in weight for half in expert.chunk(halves)]


def _muon(matrices: Matrices, settings: dict) -> torch.optim.Muon | None:
    views = [view for _, _, own in matrices for view in own]
    if not views:
        return None
    return torch.optim.Muon(
        views,
        lr=settings["lr"],
        weight_decay=settings["weight_decay"],
        momentum=settings["muon"],
        adjust_lr_fn="match_rms_adamw",
    )


def _log_prob(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + response])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return logprobs[len(prompt) - 1 :].sum()


def _margins(model: torch.nn.Module, pairs: list) -> torch.Tensor:
    """Log-prob of the chosen response less that of the rejected one, of each pair."""
    return torch.stack([_log_prob(model, p, c) - _log_prob(model, p, r) for p, c, r in pairs])


if __name__ == "__main__":
    main()
