"""OpenRLHF: what its table (templates/imports/openrlhf.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import Said, updates

KL, FIX = "algo.kl", "algo.advantage.is_correction"


def fits(found: Foreign) -> str:
    """Return by what a configuration of OpenRLHF is known."""
    return f"the script runs {found.program}" if "openrlhf" in found.program else ""


def _is_of(found: Foreign, name: str) -> bool:
    return f"train_{name}" in found.program


def _is_rl(found: Foreign) -> bool:
    return not any(_is_of(found, name) for name in ("sft", "dpo", "rm", "kto"))


def trains_rows(found: Foreign) -> Said:
    """Return the keys of a run without rollout."""
    if _is_of(found, "sft"):
        return {"train.objective": "supervised"}
    if _is_of(found, "dpo"):
        beta = float(found.value("model.beta", 0.1))
        return {"train.objective": "preference", "train.preference.beta": beta}
    if _is_of(found, "kto"):
        return {"train.objective": "preference", "train.preference.loss": "kto"}
    return {"train.objective": "reward_model"} if _is_of(found, "rm") else {}


def has_critic(found: Foreign) -> bool:
    """Return True if a critic is trained."""
    return found.value("algo.advantage.estimator") == "gae"


def lora(found: Foreign) -> bool:
    """Return True if an adapter is trained."""
    return found.value("ds.lora.rank", 0) > 0


def kl(value: Any, found: Foreign) -> Said:
    """In the loss or in the reward."""
    if not value:
        return {}
    in_loss = found.value(f"{KL}.use_loss")
    return {"train.kl_coef": value, "train.kl_in": "loss" if in_loss else "reward"}


def estimate(value: Any, found: Foreign) -> Said:
    """Of the KL term, if there is one."""
    return {"train.kl_estimator": value} if found.value(f"{KL}.init_coef") else {}


def row_tokens(value: Any, found: Foreign) -> Said:
    """Of RL it bounds prompt and response together."""
    if not _is_rl(found):
        return {"data.max_row_tokens": value}
    left = int(value) - int(found.value("rollout.max_new_tokens"))
    return {"data.max_prompt_tokens": left} if left > 0 else "bounds prompt and response together"


def epochs(value: Any, found: Foreign) -> Said:
    """Of rows they are the length."""
    return {} if _is_rl(found) else {"train.epochs": value}


def batch(value: Any, found: Foreign) -> Said:
    """Count updates: theirs are of samples."""
    if not _is_rl(found):
        return {"rollout.prompts_per_step": value}
    if found.value("train.max_epochs", 1) != 1:
        return f"with max_epochs={found.value('train.max_epochs')}, miles would use samples once"
    prompts = float(found.value("rollout.batch_size"))
    return updates(prompts * float(found.value("rollout.n_samples_per_prompt")), float(value))


def remote(value: Any, found: Foreign) -> Said:
    """A server, or a file of Python."""
    if not str(value).startswith("http"):
        return "a Python file that scores: adapt it to miles's signature, then set rollout.reward"
    return {"rollout.reward": "remote", "rollout.remote_reward.url": value}


def reward_model(value: Any, found: Foreign) -> Said:
    """A model that scores, unless something else does."""
    if found.value("reward.remote_url"):
        return "reward.remote_url scores"
    return {"rollout.reward": "reward_model", "rollout.reward_model.path": value}


def filter(value: Any, found: Foreign) -> Said:
    """Groups within bounds."""
    if not value:
        return {}
    low, high = found.value("algo.dynamic_filtering_range", [0, 1])
    return {
        "rollout.filter": "pass_rate",
        "rollout.pass_rate_low": float(low),
        "rollout.pass_rate_high": float(high),
    }


def correction(value: Any, found: Foreign) -> Said:
    """Weights between trainer and engine."""
    if not value:
        return {}
    kind = found.value(f"{FIX}_type", "tis")
    bounds = found.value(f"{FIX}_threshold", [0.5, 5.0])
    low, high = bounds if isinstance(bounds, list) else [0.0, bounds]
    level = "geometric" if "seq" in str(kind) else "token"
    is_mask = kind is True or kind == "icepop" or level != "token"
    return {
        "train.correction.kind": "importance",
        "train.correction.level": level,
        "train.correction.mode": "mask" if is_mask else "clip",
        "train.correction.low": float(low),
        "train.correction.high": float(high),
    }


def overlong(value: Any, found: Foreign) -> Said:
    """Long responses are punished."""
    return {"rollout.shaping": "overlong", "rollout.overlong_buffer": int(value)}


def min_lr(value: Any, found: Foreign) -> Said:
    """A share of the learning rate."""
    if not str(found.value("actor.lr_scheduler")).startswith("cosine"):
        return {}
    return {"train.optimizer.min_lr": float(value) * float(found.value("actor.adam.lr"))}
