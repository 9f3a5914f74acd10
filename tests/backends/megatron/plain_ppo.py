"""PPO with a critic by transformers and plain PyTorch, for comparison: `python -m
tests.backends.megatron.plain_ppo REQUEST.json LOSSES.json`. In a process of its own, for the
trainer's CPU shim changes torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

CLIP = 0.2
"""Of the policy's ratio."""


def main() -> None:
    """REQUEST: {"policy", "critic", "gamma", "lam", "kl_coef", "value_clip", "temperature", "lr",
    "critic_lr", "steps": [updates[rows[{"tokens", "mask", "reward"}]]]}; LOSSES: of each step
    [policy, critic], before each update, mean over the updates."""
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(losses_of(request)))


def losses_of(request: dict[str, Any]) -> list[list[float]]:
    """See `main`."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def load(kind: Any, folder: str) -> Any:
        return kind.from_pretrained(folder, dtype=torch.float32)

    policy, reference = (load(AutoModelForCausalLM, request["policy"]) for _ in range(2))
    critic = load(AutoModelForSequenceClassification, request["critic"])
    optimizers = [
        _optimizer(model, request[lr]) for model, lr in ((policy, "lr"), (critic, "critic_lr"))
    ]
    told = []
    for updates in request["steps"]:
        rows = [row for update in updates for row in update]
        with torch.no_grad():
            for row in rows:
                row["old"] = _logprobs(policy, row, request["temperature"])
                kl = row["old"] - _logprobs(reference, row, request["temperature"])
                row["values"] = _values(critic, row)
                row["advantages"] = _gae(row["reward"], request["kl_coef"] * kl, row, request)
                row["returns"] = row["advantages"] + row["values"]
            every = torch.cat([row["advantages"] for row in rows])
        for row in rows:
            row["advantages"] = (row["advantages"] - every.mean()) / every.std()
        losses = torch.zeros(2)
        for update in updates:
            count = sum(len(row["old"]) for row in update)
            sides = (
                sum(_policy_loss(policy, row, request["temperature"]) for row in update) / count,
                sum(_value_loss(critic, row, request["value_clip"]) for row in update) / count,
            )
            for model, optimizer, loss in zip((policy, critic), optimizers, sides, strict=True):
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            losses += torch.stack([loss.detach() for loss in sides]) / len(updates)
        told.append(losses.tolist())
    return told


def _optimizer(model: Any, lr: float) -> torch.optim.Optimizer:
    weights = list(model.parameters())
    groups = [
        {"params": [one for one in weights if one.dim() > 1], "weight_decay": 0.01},
        {"params": [one for one in weights if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-3)


def _logprobs(model: Any, row: dict[str, Any], temperature: float) -> torch.Tensor:
    """[K] of the trained tokens."""
    ids = torch.tensor([row["tokens"]])
    log = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return log.gather(1, ids[0, 1:, None])[:, 0][torch.tensor(row["mask"])[1:]]


def _values(critic: Any, row: dict[str, Any]) -> torch.Tensor:
    """[K] what is expected before each trained token."""
    hidden = critic.base_model(torch.tensor([row["tokens"]])).last_hidden_state
    return critic.score(hidden)[0, :-1, 0][torch.tensor(row["mask"])[1:]]


def _gae(
    reward: float, costs: torch.Tensor, row: dict[str, Any], request: dict[str, Any]
) -> torch.Tensor:
    """[K] token by token, from the last one back."""
    values, advantages, following, later = row["values"], torch.zeros_like(costs), 0.0, 0.0
    for place in reversed(range(len(costs))):
        gain = -costs[place] + (reward if place == len(costs) - 1 else 0.0)
        later = (
            gain
            + request["gamma"] * following
            - values[place]
            + request["gamma"] * request["lam"] * later
        )
        advantages[place], following = later, values[place]
    return advantages


def _policy_loss(model: Any, row: dict[str, Any], temperature: float) -> torch.Tensor:
    ratio = (_logprobs(model, row, temperature) - row["old"]).exp()
    gains = row["advantages"]
    return -torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).sum()


def _value_loss(critic: Any, row: dict[str, Any], clip: float) -> torch.Tensor:
    now, before, returns = _values(critic, row), row["values"], row["returns"]
    near = before + (now - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((now - returns) ** 2, (near - returns) ** 2).sum()


if __name__ == "__main__":
    main()
