"""Steps of a policy with a draft model that learns what it says. Called by `world.py` through
`cases`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.backends.megatron.harness import policy_shard, trainer

if TYPE_CHECKING:
    from milescli.backends.megatron.trained_model import TrainedModel

NUM_STEPS = 4
TRAIN: dict[str, Any] = {"updates_per_step": 2}
LEARNS: dict[str, Any] = {**TRAIN, "draft": {"lr": 2e-2}}
WITHOUT = "draft none"
"""A case without a draft model."""
LAYOUTS = {
    "one": {"draft": {}, WITHOUT: {}},
    "two": {"draft tp2": {"tp": 2}},
}
"""By world: a case's name, and its layout."""


def draft_cases(which: str, *, policy: str, draft: str, folder: Path) -> list[dict[str, Any]]:
    """Those of a world; both models: folders. One process saves in `folder`, others load it."""
    return [
        {
            "name": name,
            "call": "draft_steps",
            "model": policy,
            "draft": None if name == WITHOUT else draft,
            "layout": layout,
            "folder": str(folder),
        }
        for name, layout in LAYOUTS[which].items()
    ]


def checksums(model: TrainedModel) -> dict[str, str]:
    """Of its weights, whole; collective."""
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for bucket in model.buckets()
        for name, tensor in bucket
    }


def draft_steps(
    *, rank: int, size: int, port: int, model: str, draft: str | None, layout: dict, folder: str
) -> dict[str, Any]:
    """What a batch of a policy that stays as it is teaches, again and again; then a checkpoint,
    written by the one process; then a step of the policy. `draft` None: that step alone."""
    world = {"rank": rank, "size": size, "port": port, "model": model, "layout": layout}
    made = trainer(train=dict(LEARNS if draft else TRAIN), draft=draft, **world)
    shard, seen = policy_shard(made, 0, updates=2), dict[str, Any]()
    if made.draft is not None:
        seen["reports"] = [made.step(shard, None).report for _ in range(NUM_STEPS)]
        seen["learned"] = checksums(made.draft)
        if size == 1:
            made.save(folder, False)
            made.finish_save()
        made.step(shard, None)
        seen["later"] = checksums(made.draft)
        made.load(folder)
        seen["loaded"] = checksums(made.draft)
    made.step(shard, 1e-2)
    seen["policy"] = made.parameter_checksums()
    made.close()
    return seen
