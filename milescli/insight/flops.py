"""Model FLOPs utilisation of training: what the model's arithmetic needs over what the devices can
do at most. Known where the manifest has the model's costs and the device is in our table."""

from __future__ import annotations

from milescli.insight import series
from milescli.insight.facts import RunFacts
from milescli.insight.history import History
from milescli.models.costs import TokenFlops
from milescli.plan.devices import DEVICES

FORWARD_AND_BACKWARD = 3
"""Passes that a trained token costs, in forward passes: Chowdhery et al. (PaLM), arXiv 2204.02311,
appendix B; recomputation does not count."""


def mfu_of(history: History, facts: RunFacts) -> float | None:
    """Of the newest steps, 0 to 1; None where it is not known."""
    costs, device = facts.manifest.get("token_flops"), facts.plan.get("forecast") or {}
    spec = next(
        (one for one in DEVICES.values() if one.name in str(device.get("device", ""))), None
    )
    if not isinstance(costs, dict) or spec is None:
        return None
    columns = history.columns
    tokens = series.mean(series.recent(columns.get("train/num_tokens")))
    seconds = series.mean(series.recent(columns.get("time/train_s")))
    length = _mean_length(history)
    if not (tokens > 0 and seconds > 0 and length > 0):
        return None
    try:
        of_token = TokenFlops(**costs)
    except TypeError:  # another version of miles wrote them
        return None
    flops = FORWARD_AND_BACKWARD * of_token.forward_mean(max(1, round(length)))
    can_do = spec.bf16_flops * facts.num_trainer_devices
    return tokens * flops / (seconds * can_do)


def _mean_length(history: History) -> float:
    """Of a sequence, prompt and response."""
    parts = ("rollout/prompt_tokens_mean", "rollout/response_tokens_mean")
    return sum(series.mean(series.recent(history.columns.get(part))) for part in parts)
