"""A step over sequences that share their prompts in a row, beside one in which each has its own.
Called by `world.py` through `cases`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.backends.megatron.harness import policy_shard, trainer
from tests.backends.megatron.measuring import SavedBytes, unpack

SHARING = ("dense", "tied", "llama", "sandwich", "mistral")
"""Models that allow it."""


def shared_prompts(
    *, rank: int, size: int, port: int, model: str, layout: dict, longest_prompt: int = 24
) -> dict[str, Any]:
    """Of the same batch with prompts apart and shared: positions that the model computes, the
    report, log-probs, and how far the gradients are from those of the former, relative to the
    largest of each weight."""
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train={"entropy_coef": 0.01}
    )
    shard = policy_shard(
        made, 0, longest_prompt=longest_prompt, cap=10 * longest_prompt, shares_prompts=True
    )
    shard = replace(shard, logprob_ids=tuple(range(len(shard.sequence_ids))))
    seen, gradients = {}, {}
    for shares in (False, True):
        made.learner.shares_prompts = shares
        own = made.learner._on_rank(shard, in_update=True)
        saved = SavedBytes({each.untyped_storage().data_ptr() for each in made.model.parameters()})
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
            stepped = made.step(shard, None)
        seen["shared" if shares else "apart"] = {
            "positions": sum(len(microbatch.source) for microbatch in own.microbatches),
            "longest_row": max(len(microbatch.source) for microbatch in own.microbatches),
            "kept_bytes": saved.peak,
            "report": stepped.report,
            "logprobs": {number: row.tolist() for number, row in stepped.logprobs.items()},
        }
        gradients[shares] = {
            name: parameter.main_grad.clone()
            for name, parameter in made.model.module.named_parameters()
        }
    scores = {shares: _scores(made, shard, shares) for shares in (False, True)}
    made.close()
    return {
        **seen,
        "gradients": max(
            float((gradients[True][name] - whole).abs().max() / whole.abs().max())
            for name, whole in gradients[False].items()
            if whole.abs().max() > 0
        ),
        "scores": all(map(np.array_equal, scores[False], scores[True])),
        "has_gradients": all(bool(torch.any(whole)) for whole in gradients[True].values()),
    }


def _scores(made, shard, shares: bool) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    made.learner.shares_prompts = shares
    return made.score(shard)
