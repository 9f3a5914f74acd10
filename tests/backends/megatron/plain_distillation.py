"""Distillation by transformers and plain PyTorch, for comparison: `python -m
tests.backends.megatron.plain_distillation REQUEST.json LOSSES.json`. In a process of its own, for
the trainer's CPU shim changes torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """REQUEST: [{"student", "teachers", "kl", "coef", "reward_weight", "top_k", "temperature",
    "lr", "steps": [[{"tokens", "mask", "teacher", "advantage"}]]}]; LOSSES: a list for each."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([losses_of(job) for job in jobs]))


def losses_of(job: dict[str, Any]) -> list[float]:
    """Of each step, before its update."""
    from transformers import AutoModelForCausalLM

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    student, teachers = load(job["student"]), [load(folder) for folder in job["teachers"]]
    weights = list(student.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in weights if one.dim() > 1], "weight_decay": 0.01},
            {"params": [one for one in weights if one.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=job["lr"],
        betas=(0.9, 0.98),
        eps=1e-3,
    )
    losses = []
    for rows in job["steps"]:
        count = sum(sum(row["mask"]) for row in rows)
        loss = sum(_loss(job, row, student, teachers[row["teacher"]]) for row in rows) / count
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return losses


def _loss(job: dict[str, Any], row: dict[str, Any], student: Any, teacher: Any) -> torch.Tensor:
    """Sum over the trained tokens of a row."""
    ids, mask = torch.tensor([row["tokens"]]), torch.tensor(row["mask"])[1:]

    def distribution(model: Any) -> torch.Tensor:
        return (model(ids).logits[0, :-1] / job["temperature"]).log_softmax(-1)[mask]

    own = distribution(student)
    with torch.no_grad():
        other = distribution(teacher)
    said = ids[0, 1:][mask][:, None]
    own_said, other_said = own.gather(1, said)[:, 0], other.gather(1, said)[:, 0]
    advantage = torch.full_like(own_said, job["reward_weight"] * row["advantage"])
    if job["kl"] == "sampled":
        advantage = advantage - job["coef"] * (own_said.detach() - other_said)
    ratio = (own_said - own_said.detach()).exp()
    loss = -(advantage * ratio).sum()
    if job["kl"] == "sampled":
        return loss
    best = other.topk(job["top_k"], dim=1).indices
    p, q = (_with_rest(log.gather(1, best).exp()) for log in (own, other))
    first, second = (p, q) if job["kl"] == "reverse" else (q, p)
    return loss + job["coef"] * (first * (first / second).log()).sum()


def _with_rest(chances: torch.Tensor) -> torch.Tensor:
    rest = (1 - chances.sum(1, keepdim=True)).clamp(min=1e-7)
    return torch.cat([chances, rest], dim=1)


if __name__ == "__main__":
    main()
