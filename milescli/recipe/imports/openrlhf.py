"""Implements the functions that the table of OpenRLHF (templates/imports/openrlhf.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.core.units import decimal_product
from milescli.recipe.imports.reading import ForeignConfig
from milescli.recipe.imports.tables import (
    NOTE,
    WARNS,
    RowResult,
    data_name,
    path_of,
    updates,
)

LONGEST_PROMPT = 4096
"""Largest number of prompt tokens if one bound covers prompt and response together."""
_EPSILON, _UNBOUNDED = 1e-6, 1e9
KL, FIX = "algo.kl", "algo.advantage.is_correction"


def fits(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as OpenRLHF's; empty if it was not."""
    if "openrlhf" in found.program or _is_of(found, "ppo_ray"):
        return f"the script runs {found.program}"
    name = next((one for one in found.settings if one.startswith("algo.advantage.")), None)
    return "" if name is None else f"it sets {name}"


def is_sft(found: ForeignConfig) -> bool:
    """Return True if the run trains on rows."""
    return _is_of(found, "sft")


def is_dpo(found: ForeignConfig) -> bool:
    """Return True if the run trains on pairs."""
    return _is_of(found, "dpo")


def is_rm(found: ForeignConfig) -> bool:
    """Return True if the run trains a reward model."""
    return _is_of(found, "rm")


def _is_of(found: ForeignConfig, name: str) -> bool:
    return f"train_{name}" in found.program


def _is_rl(found: ForeignConfig) -> bool:
    return not any(_is_of(found, name) for name in ("sft", "dpo", "rm", "kto", "kd"))


def trains_rows(found: ForeignConfig) -> RowResult:
    """Return the recipe keys of a run without rollout; empty for RL."""
    if _is_of(found, "sft"):
        return {"train.objective": "supervised"}
    if _is_of(found, "kd"):
        teacher = path_of(str(found.value("teacher_model")))
        return {
            "train.objective": "distillation",
            "train.distill.teachers": [{"path": teacher}],
            "train.distill.kl": "forward",
        }
    if _is_of(found, "prm"):
        return "it trains a reward model of single steps, for which miles has none"
    if _is_of(found, "dpo"):
        beta = found.value("model.beta", 0.1)
        return {"train.objective": "preference", "train.preference.beta": beta}
    if _is_of(found, "kto"):
        return {"train.objective": "preference", "train.preference.loss": "kto"}
    return {"train.objective": "reward_model"} if _is_of(found, "rm") else {}


def has_critic(found: ForeignConfig) -> bool:
    """Return True if a critic is trained."""
    return found.value("algo.advantage.estimator") == "gae"


def lora(found: ForeignConfig) -> bool:
    """Return True if an adapter is trained."""
    return found.value("ds.lora.rank", 0) > 0


def kl(value: Any, found: ForeignConfig) -> RowResult:
    """Map the KL coefficient, and choose whether the loss or the reward has the KL term."""
    if not value:
        return {}
    in_loss = found.value(f"{KL}.use_loss")
    return {"train.kl_coef": value, "train.kl_in": "loss" if in_loss else "reward"}


ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"train.advantage": "reinforce", "train.credit": "gae"},
    "reinforce": {"train.advantage": "reinforce", "train.credit": "to_go"},
    "rloo": {"train.advantage": "rloo"},
    "reinforce_baseline": {"train.advantage": "grpo", "train.normalize_std": "none"},
    "group_norm": {"train.advantage": "grpo"},
    "dr_grpo": {"train.advantage": "grpo", "train.normalize_std": "none"},
}
WHITENED = ("gae", "reinforce", "reinforce_baseline")


def estimator(value: Any, found: ForeignConfig) -> RowResult:
    """Map the advantage estimator. Some estimators whiten advantages; with a KL term in the reward,
    all sum it over the later tokens."""
    settings = ESTIMATORS.get(str(value))
    if settings is None:
        return f"estimates advantages by `{value}`"
    if found.value(f"{KL}.init_coef", 0) > 0 and not found.value(f"{KL}.use_loss"):
        settings = {"train.credit": "to_go", **settings}
    if value not in WHITENED:
        return settings
    if not found.value("algo.advantage.no_std_norm"):
        return {**settings, "train.whiten": True}
    if value == "reinforce_baseline":
        return settings
    return {
        **settings,
        NOTE: "OpenRLHF centres advantages without scaling them: miles does neither",
    }


def row_tokens(value: Any, found: ForeignConfig) -> RowResult:
    """Map `data.max_len`, which in RL bounds prompt and response together."""
    if not _is_rl(found):
        return {"data.max_row_tokens": value, "data.long_rows": "truncate"}
    new = found.value("rollout.max_new_tokens")
    if new is None:
        prompt = min(LONGEST_PROMPT, int(value) // 2)
        return {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": value - prompt}
    left = int(value) - int(new)
    return {"data.max_prompt_tokens": left} if left > 0 else "bounds prompt and response together"


def chat_template(value: Any, found: ForeignConfig) -> RowResult:
    """Turn the chat template off if prompts are plain text."""
    return {} if value else {"data.chat_template": "none"}


def split(value: Any, found: ForeignConfig) -> RowResult:
    """Map the split of a data set on the hub; a file has no split."""
    for name in ("data.prompt_dataset", "data.dataset"):
        data = data_name(found.value(name, ""))
        if isinstance(data, str) and data.startswith("hf:"):
            return {"data.prompts": f"{data}:{value}"}
    return {}


def asynchronous(value: Any, found: ForeignConfig) -> RowResult:
    """Map asynchronous training: rollout runs ahead by the queue's size, and the trainer computes
    the old log-probs."""
    ahead = int(found.value("train.async_queue_size", 1))
    return {"rollout.max_staleness": ahead, "train.old_logprobs": "trainer"} if value else {}


def clip(value: Any, found: ForeignConfig) -> RowResult:
    """Map the symmetric bounds of a reward model's score."""
    low, high = value
    if -low != high:
        return "bounds rewards on two sides that differ: see rollout.reward_model.clip"
    return {"rollout.reward_model.clip": high} if found.value("reward.model_name_or_path") else {}


def pairs(value: Any, found: ForeignConfig) -> RowResult:
    """Check that the loss of a reward model is the sigmoid loss."""
    return {} if value == "sigmoid" else f"takes the loss `{value}`: miles takes -log sigmoid"


def epochs(value: Any, found: ForeignConfig) -> RowResult:
    """Map the epochs of a run on rows; in RL they repeat samples, and `batch` checks them."""
    return {} if _is_rl(found) else {"train.epochs": value}


def batch(value: Any, found: ForeignConfig) -> RowResult:
    """Map the updates per step, which OpenRLHF counts in samples."""
    if not _is_rl(found):
        return {"rollout.prompts_per_step": value}
    if found.value("train.max_epochs", 1) != 1:
        return f"with max_epochs={found.value('train.max_epochs')}, miles would use samples once"
    prompts = float(found.value("rollout.batch_size"))
    return updates(prompts * float(found.value("rollout.n_samples_per_prompt")), float(value))


def remote(value: Any, found: ForeignConfig) -> RowResult:
    """Map a reward server; a Python file gives a note only."""
    if not str(value).startswith("http"):
        return f"{WARNS}scores by a file of Python: adapt it to miles's signature, and set " + (
            "rollout.reward to its import path"
        )
    return {"rollout.reward": "remote", "rollout.remote_reward.url": value}


def reward_model(value: Any, found: ForeignConfig) -> RowResult:
    """Map the path of a reward model, unless another reward is set."""
    if found.value("reward.remote_url"):
        return "reward.remote_url scores"
    return {"rollout.reward": "reward_model", "rollout.reward_model.path": path_of(str(value))}


def filter(value: Any, found: ForeignConfig) -> RowResult:
    """Map dynamic filtering, which keeps groups whose mean reward lies strictly between two
    bounds."""
    if not value:
        return {}
    low, high = found.value("algo.dynamic_filtering_range", [0, 1])
    return {
        "rollout.filter": "pass_rate",
        "rollout.pass_rate_low": round(float(low) + _EPSILON, 9),
        "rollout.pass_rate_high": round(float(high) - _EPSILON, 9),
    }


def correction(value: Any, found: ForeignConfig) -> RowResult:
    """Map the importance weights between trainer and engine, as a switch and a type."""
    if not value:
        return {}
    kind = found.value(f"{FIX}_type", "tis")
    is_mask = kind is True or kind == "icepop"
    return _corrected(found, by_sequence="seq" in str(kind), is_mask=is_mask)


def correction_level(value: Any, found: ForeignConfig) -> RowResult:
    """Map the importance weights between trainer and engine, as a level, a mode and a statistic."""
    if value == "off":
        return {}
    gate = found.value(f"{FIX}_gating", "ratio")
    if gate != "ratio" and found.value("actor.policy_loss_type") != "gspo":
        why = f"leaves out tokens by `{gate}` between trainer and engine"
        return f"{WARNS}{why}: see train.correction and train.surrogate"
    is_mask = found.value(f"{FIX}_mode", "mask") == "mask"
    return _corrected(found, by_sequence=value == "seq", is_mask=is_mask)


def _corrected(found: ForeignConfig, *, by_sequence: bool, is_mask: bool) -> RowResult:
    bounds = found.value(f"{FIX}_threshold", [0.5, 5.0])
    *lower, high = bounds if isinstance(bounds, list) else [bounds]
    low = lower[0] if lower else 0.0
    if found.value("actor.policy_loss_type") == "gspo":  # its ratio is to the engine's instead
        return {"train.old_logprobs": "engine"}
    settings: dict[str, Any] = {
        "train.correction.kind": "importance",
        "train.correction.level": "token",
    }
    if by_sequence:
        return settings | {
            "train.correction.high": _UNBOUNDED,
            "train.correction.reject_level": "geometric",
            "train.correction.reject_low": float(low),
            "train.correction.reject_high": float(high),
        }
    return settings | {
        "train.correction.mode": "mask" if is_mask else "clip",
        "train.correction.low": float(low),
        "train.correction.high": float(high),
    }


def overlong(value: Any, found: ForeignConfig) -> RowResult:
    """Map the penalty on long responses."""
    return {"rollout.shaping": "overlong", "rollout.overlong_buffer": int(value)}


def min_lr(value: Any, found: ForeignConfig) -> RowResult:
    """Map the minimum of the learning rate, a share of its peak."""
    if not str(found.value("actor.lr_scheduler")).startswith("cosine"):
        return {}
    lr = float(found.value("actor.adam.lr"))
    return {"train.optimizer.min_lr": decimal_product(lr, float(value))}
