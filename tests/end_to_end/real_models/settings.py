"""What runs of real models in tests set: little work, by full-grown weights."""

from __future__ import annotations

from pathlib import Path

SAMPLED: dict[str, object] = {
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.max_response_tokens": 12,
    # an instruction that no sample follows teaches nothing
    "rollout.reward": "tests.end_to_end.rewards:variety",
    "eval.num_prompts": 2,
}
"""Of runs that sample, beside templates/smollm2-135m.yaml."""
ROWS: dict[str, object] = {
    "model.scratch": "null",
    "data.eval": "null",
    "train.batch_size": 8,
    "train.optimizer.warmup_steps": 0,
    "eval.num_prompts": 8,
}
"""Of runs that learn from rows, beside the recipes of the quickstart."""


def words(model: Path, *settings: dict[str, object]) -> list[str]:
    """As the command line has them; later ones count."""
    merged = {"model.path": model}
    for some in settings:
        merged |= some
    return [word for key, value in merged.items() for word in ("--set", f"{key}={value}")]
