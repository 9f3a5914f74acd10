"""Steps of PPO with a critic, under the layouts that `test_ppo` compares. Called by `world.py`
through `cases`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from milescli.core.types import StepReport
from milescli.weights.base import Bucket
from tests.backends.megatron.harness import policy_shard, rows_shard, trainer

NUM_STEPS, LR, CRITIC_LR = 5, 1e-2, 2e-2
TRAIN: dict[str, Any] = {
    "advantage": "reinforce",
    "credit": "gae",
    "gamma": 0.99,
    "lam": 0.9,
    "whiten": True,
    "aggregation": "token_mean",
    "kl_coef": 0.05,
    "kl_in": "reward",
    "kl_estimator": "k1",
    "updates_per_step": 2,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "critic": {"lr": CRITIC_LR, "clip": 0.05},
}
LAYOUTS = {
    "one": {"ppo": {}},
    "two": {
        "ppo tp2 sp": {"tp": 2, "sequence_parallel": True},
        "ppo dp2": {"dp": 2},
        "ppo pp2": {"pp": 2},
        "ppo cp2": {"cp": 2},
    },
}
"""By world: a case's name, and its layout."""


def ppo_cases(which: str, *, policy: str, critic: str) -> list[dict[str, Any]]:
    """Those of a world; both: folders."""
    return [
        {
            "name": name,
            "call": "ppo_steps",
            "model": policy,
            "critic": critic,
            "layout": layout,
        }
        for name, layout in LAYOUTS[which].items()
    ]


def critic_of_adapter(
    *, rank: int, size: int, port: int, model: str, critic: str, layout: dict[str, Any]
) -> dict[str, list[str]]:
    """Names of the critic's tensors that differ from those that engines hold of the policy, once
    the critic started from a policy with a trained adapter; and of those that changed with it."""
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={**TRAIN, "kl_coef": 0.0, "lora": {"rank": 4}},
        critic=critic,
    )
    chance = np.random.default_rng(0)
    rows = [chance.integers(0, made.facts.vocab_size, 20).tolist() for _ in range(4)]
    for _ in range(3):
        made.step(rows_shard(made, rows), LR)

    def held(buckets: Iterable[Bucket]) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

    assert made.critic is not None
    before = held(made.critic.buckets())
    made.start_critic()
    after = held(made.critic.buckets())
    made.policy.merges_adapter = True
    merged = held(made.policy.buckets_for_engines())
    made.close()
    return {
        "differs": [n for n in after if n in merged and not torch.equal(after[n], merged[n])],
        "changed": [n for n in after if not torch.equal(after[n], before[n])],
        "apart": sorted(after.keys() - merged.keys()),
    }


def ppo_steps(
    *, rank: int, size: int, port: int, model: str, critic: str, layout: dict[str, Any]
) -> list[StepReport]:
    """A few steps of two updates each."""
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train=TRAIN, critic=critic
    )
    made.freeze_reference()
    reports = [
        made.step(policy_shard(made, step, updates=2), LR, CRITIC_LR).report
        for step in range(NUM_STEPS)
    ]
    made.close()
    return reports
