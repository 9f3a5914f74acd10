"""Results of evaluations made by hand, for tests of what shows, keeps or compares them."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.rollout.evaluation.scores import DomainScore
from milescli.rollout.evaluation.statistics import Estimate
from milescli.runtime.evaluation.results import SetResult


def make_result(
    *,
    step: int = 0,
    accuracy: float = 0.5,
    rewards: Sequence[float] = (1.0, 0.0),
    data: str = "d" * 64,
    **changes: object,
) -> SetResult:
    """Of two prompts in one domain, unless told otherwise."""
    estimate = Estimate(value=accuracy, low=accuracy - 0.1, high=accuracy + 0.1)
    fields: dict[str, object] = {
        "model": "mine",
        "step": step,
        "set": "few",
        "accuracy": accuracy,
        "num_prompts": len(rewards),
        "samples_per_prompt": 1,
        "estimates": {"avg@1": estimate},
        "domains": {"odd": DomainScore(num_prompts=len(rewards), accuracy=estimate)},
        "truncated_fraction": 0.0,
        "response_tokens_mean": 12.0,
        "seconds": 1.0,
        "path": f"eval/few/step_{step}.jsonl",
        "data_sha256": data,
        "settings": {"eval.temperature": 0.0},
        "rewards": list(rewards),
    }
    return SetResult(**{**fields, **changes})  # type: ignore[arg-type]
