"""Implements the functions that the table of verl (templates/imports/verl.yaml) calls."""

from __future__ import annotations

import math
from typing import Any

from milescli.core.units import decimal_product
from milescli.recipe.imports.reading import ForeignConfig
from milescli.recipe.imports.tables import (
    NOTE,
    TEXTS,
    WARNS,
    RowResult,
    path_of,
    share,
    updates,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FIX = "algorithm.rollout_correction"
_OWN_CONFIGS = ("_trainer", "sft_trainer_engine")
_OF_GROUPS = ("grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo")
_LEVELS = ("token", "sequence", "geometric")
_REJECTS = {level: level for level in _LEVELS} | {
    "token_k1": "token",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
    "seq": "sequence",
    "geo": "geometric",
}


def fits(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as verl's; empty if it was not."""
    if "verl" in found.program or "main_dapo" in found.program or "main_ppo" in found.program:
        return f"the script runs {found.program}"
    begins = ("actor_rollout_ref.", "algorithm.filter_groups", "data.gen_batch_size")
    name = next((n for n in found.settings if n.startswith(begins)), None)
    if name is None and "data.train_files" in found.settings and _has(found, "trainer."):
        name = "data.train_files"
    return "" if name is None else f"it sets {name}"


def _has(found: ForeignConfig, *begins: str) -> bool:
    return any(name.startswith(begins) for name in found.settings)


def _is_sft(found: ForeignConfig) -> bool:
    return "sft" in found.program or not (
        "main" in found.program or _has(found, f"{ROLLOUT}.", "algorithm.", f"{ACTOR}.ppo_")
    )


def is_fsdp_sft(found: ForeignConfig) -> bool:
    """Return True for the older of verl's SFT trainers."""
    return _is_sft(found) and not is_engine_sft(found)


def is_engine_sft(found: ForeignConfig) -> bool:
    """Return True for the newer of verl's SFT trainers."""
    newer = ("engine", "data.max_token_len_per_gpu", "data.pad_mode")
    is_named = found.program.endswith((".sft_trainer", "/sft_trainer.py", "sft_trainer_ray"))
    return _is_sft(found) and (is_named or _has(found, *newer))


def trains_rows(found: ForeignConfig) -> RowResult:
    """Return the recipe keys of a run without rollout; empty for RL."""
    return {"train.objective": "supervised"} if _is_sft(found) else {}


def is_asynchronous(found: ForeignConfig) -> bool:
    """Return True for verl's fully asynchronous trainer."""
    return _has(found, "async_training.")


def is_synchronous(found: ForeignConfig) -> bool:
    """Return True unless the trainer is the fully asynchronous one."""
    return not is_asynchronous(found)


def has_null_clip(found: ForeignConfig) -> bool:
    """Return True if clip_ratio applies, because both bounds, which verl's defaults set, are
    null."""
    bounds = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    return all(one in found.settings and found.settings[one].value is None for one in bounds)


def _loss(found: ForeignConfig) -> str:
    return str(found.value(f"{ACTOR}.policy_loss.loss_mode", "vanilla")).lower().replace("-", "_")


def is_clipped_twice(found: ForeignConfig) -> bool:
    """Return True if the loss has the second bound of dual-clip PPO."""
    return _loss(found) == "vanilla"


def is_clip_cov(found: ForeignConfig) -> bool:
    """Return True for Clip-Cov."""
    return _loss(found) == "clip_cov"


def is_kl_cov(found: ForeignConfig) -> bool:
    """Return True for KL-Cov."""
    return _loss(found) == "kl_cov"


def is_sapo(found: ForeignConfig) -> bool:
    """Return True for SAPO."""
    return _loss(found) == "sapo"


def is_constant(found: ForeignConfig) -> bool:
    """Return True if the loss is divided by a constant."""
    return found.value(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm"


def has_correction(found: ForeignConfig) -> bool:
    """Return True if importance weights correct for the difference between trainer and engine."""
    return found.value(f"{FIX}.rollout_is") in _LEVELS


def in_loss(found: ForeignConfig) -> bool:
    """Return True if the loss has a KL term."""
    return bool(found.value(f"{ACTOR}.use_kl_loss"))


def in_reward(found: ForeignConfig) -> bool:
    """Return True if the reward has a KL term."""
    return bool(found.value("algorithm.use_kl_in_reward")) and not in_loss(found)


def has_critic(found: ForeignConfig) -> bool:
    """Return True if a critic is trained."""
    return str(found.value("algorithm.adv_estimator")).lower().endswith("gae")


def lora(found: ForeignConfig) -> bool:
    """Return True if an adapter is trained."""
    return found.value("actor_rollout_ref.model.lora_rank", 0) > 0


def epochs(value: Any, found: ForeignConfig) -> RowResult:
    """Map the epochs of SFT; in RL the number of rows decides, so a note replaces them."""
    if found.value("trainer.total_training_steps"):
        return {}
    return {"train.epochs": value} if found.objective else TEXTS["EPOCHS"]


def minibatch(value: Any, found: ForeignConfig) -> RowResult:
    """Map the minibatch, which counts prompts as the batch does, to updates per step."""
    times = found.value(f"{ACTOR}.ppo_epochs", 1)
    if times != 1:
        return f"with ppo_epochs={times}, each sample is used {times} times; miles uses it once"
    if is_asynchronous(found):
        times = _batches(found)
        return {"rollout.prompts_per_step": int(value) * times, "train.updates_per_step": times}
    return updates(float(found.value("data.train_batch_size")), float(value))


def _batches(found: ForeignConfig) -> int:
    """Return the number of minibatches between two updates of the engines."""
    parts = ("require_batches", "trigger_parameter_sync_step")
    return math.prod(int(found.value(f"async_training.{one}", 1)) for one in parts)


def staleness(value: Any, found: ForeignConfig) -> RowResult:
    """Map the staleness threshold, a share of the samples between two updates of the engines."""
    return {"rollout.max_staleness": math.ceil(value)}


def rollouts(value: Any, found: ForeignConfig) -> RowResult:
    """Map the number of prompts of the whole run to steps."""
    prompts = int(found.value(f"{ACTOR}.ppo_mini_batch_size")) * _batches(found)
    return {"train.steps": max(1, int(value) // prompts)}


def of_program(found: ForeignConfig) -> dict[str, Any]:
    """Return the keys that the program itself decides: one of verl's trainers samples a step
    ahead."""
    if "one_step_off" not in found.program:
        return {}
    is_engines = bool(found.value(f"{FIX}.bypass_mode"))
    old = "engine" if is_engines else "trainer"
    return {"rollout.max_staleness": 1, "train.old_logprobs": old}


def old_logprobs(value: Any, found: ForeignConfig) -> RowResult:
    """Choose the engine's log-probs as old ones, unless the trainer computes them."""
    is_engines = value and not found.value("async_training.compute_prox_log_prob")
    return {"train.old_logprobs": "engine" if is_engines else "trainer"}


def clip_low(value: Any, found: ForeignConfig) -> RowResult:
    """Map the lower clip bound; for CISPO at most 1, as a ratio is never negative."""
    return {"train.clip_low": min(value, 1.0) if _loss(found) == "cispo" else value}


def warmup_share(value: Any, found: ForeignConfig) -> RowResult:
    """Map the share of the steps that warm up, unless a number of steps is set."""
    if found.value(f"{ACTOR}.optim.lr_warmup_steps", -1) > 0:
        return {}
    return share(value, found.value("trainer.total_training_steps"), "train.optimizer.warmup_steps")


def min_lr(value: Any, found: ForeignConfig) -> RowResult:
    """Map the minimum of the learning rate, a share of its peak."""
    lr = found.value(f"{ACTOR}.optim.lr")
    return {"train.optimizer.min_lr": decimal_product(lr, value)} if value else {}


def kl_in_reward(value: Any, found: ForeignConfig) -> RowResult:
    """Map the KL coefficient of the reward. With groups, verl subtracts the KL before the group's
    mean."""
    settings: dict[str, Any] = {"train.kl_coef": value, "train.kl_in": "reward"}
    name = str(found.value("algorithm.adv_estimator")).rpartition(".")[2].lower()
    if name not in ("gae", "reinforce_plus_plus"):
        settings[NOTE] = (
            "verl takes the KL of a whole response from its reward; miles, that of a token"
        )
    return settings


def warmup(value: Any, found: ForeignConfig) -> RowResult:
    """Map the warm-up from updates to steps, as engines may be updated only after several
    updates."""
    each = int(found.value("async_training.trigger_parameter_sync_step", 1))
    return {"train.optimizer.warmup_steps": math.ceil(value / each)}


def replay(value: Any, found: ForeignConfig) -> RowResult:
    """Map the replay of the engine's routing (R3)."""
    if value in ("disabled", False):
        return {}
    return {"train.routing_replay": True} if value == "R3" else "replays the trainer's own routing"


def trainer_mode(value: Any, found: ForeignConfig) -> RowResult:
    """Note a mode in which engines sample while the trainer trains."""
    why = "samples while it trains: see rollout.max_staleness and docs/asynchronous.md"
    return {} if value == "sync" else f"{WARNS}{why}"


def adaptive(value: Any, found: ForeignConfig) -> RowResult:
    """Check that the KL coefficient is fixed."""
    return {} if value == "fixed" else "adapts the KL coefficient to a target"


def turns(value: Any, found: ForeignConfig) -> RowResult:
    """Note that the run takes turns with tools or users."""
    why = "takes turns with tools or users: see rollout.agent, rollout.tools and docs/agents.md"
    return f"{WARNS}{why}" if value else {}


def config(value: Any, found: ForeignConfig) -> RowResult:
    """Note a further configuration file that was not read, unless verl ships it."""
    stem = str(value).removesuffix(".yaml")
    is_read = any(one.where.startswith(f"{stem}.yaml:") for one in found.settings.values())
    if is_read or stem.endswith(_OWN_CONFIGS):
        return {}
    return f"{WARNS}is a configuration that was not read: name its file before the script"


def bypassed(value: Any, found: ForeignConfig) -> RowResult:
    """Note a loss in bypass mode that is not the clipped one."""
    if not found.value(f"{FIX}.bypass_mode") or value == "ppo_clip":
        return {}
    return f"{WARNS}is REINFORCE with weights, without a clip: see train.surrogate"


def prompt_field(value: Any, found: ForeignConfig) -> RowResult:
    """Map the field of the prompt within its column."""
    return _field("prompt", value, found)


def response_field(value: Any, found: ForeignConfig) -> RowResult:
    """Map the field of the response within its column."""
    return _field("response", value, found)


def _field(name: str, value: Any, found: ForeignConfig) -> RowResult:
    column, fields = found.value(f"data.{name}_key"), value if isinstance(value, list) else [value]
    if not column or len(fields) != 1:
        return f"joins several fields: data.{name}_key takes one"
    return {f"data.{name}_key": f"{column}.{fields[0]}"}


def generated(value: Any, found: ForeignConfig) -> RowResult:
    """Map the prompts sampled per batch to a ratio of over-sampling."""
    return {"rollout.over_sampling": max(1.0, value / found.value("data.train_batch_size"))}


def samples(value: Any, found: ForeignConfig) -> RowResult:
    """Map the samples per prompt; with one sample and a group estimator, the advantage is the
    reward."""
    settings = {"rollout.samples_per_prompt": value}
    name = str(found.value("algorithm.adv_estimator")).rpartition(".")[2].lower()
    return (
        {**settings, "train.advantage": "reinforce"}
        if value == 1 and name in _OF_GROUPS
        else settings
    )


def group_std(value: Any, found: ForeignConfig) -> RowResult:
    """Map the division by the group's std, which only some estimators read."""
    name = str(found.value("algorithm.adv_estimator")).rpartition(".")[2].lower()
    if name not in ("grpo", "grpo_vectorized", "grpo_passk"):
        return {}
    return {"train.normalize_std": "group" if value else "none"}


def correction(value: Any, found: ForeignConfig) -> RowResult:
    """Map the importance weights between trainer and engine."""
    if found.value(f"{FIX}.bypass_mode"):
        return "in bypass mode the ratio of the loss corrects already"
    if value not in _LEVELS:
        return {} if value in ("null", False) else f"weights at the level `{value}`"
    return {"train.correction.kind": "importance", "train.correction.level": value}


def threshold(value: Any, found: ForeignConfig) -> RowResult:
    """Map the bound of the weights; two, as `0.5_5.0`, leave out tokens outside of them."""
    lower, joint, upper = str(value).rpartition("_")
    settings: dict[str, Any] = {"train.correction.high": float(upper)}
    if joint:
        settings |= {"train.correction.mode": "mask", "train.correction.low": float(lower)}
    return settings


def truncation(value: Any, found: ForeignConfig) -> RowResult:
    """Map what becomes of rows that are too long; in RL, of prompts."""
    if not found.objective:
        return "says what becomes of longer prompts: see data.long_prompts"
    kept = {"right": "truncate", "error": "error"}.get(str(value))
    why = f"cuts longer rows on the {value}: miles cuts off their end, data.long_rows=truncate"
    return {"data.long_rows": kept} if kept else f"{WARNS}{why}"


def has_megatron_lora(found: ForeignConfig) -> bool:
    """Return True if the rank is that of Megatron's adapter, whose alpha has another default."""
    one = found.settings.get("actor_rollout_ref.model.lora_rank")
    return one is not None and one.where.endswith(".lora.rank")


def rejection(value: Any, found: ForeignConfig) -> RowResult:
    """Map the rejection of samples or tokens by the ratio between trainer and engine (k1). A single
    threshold is the upper bound, and its inverse the lower one."""
    if found.value(f"{FIX}.bypass_mode"):
        return "miles does not reject samples where the ratio of the loss is to the engine's"
    if value in ("null", False):
        return {}
    level = _REJECTS.get(str(value))
    if level is None:
        return f"{WARNS}rejects samples by `{value}`: miles does by their ratio, reject_level"
    bound = str(found.value(f"{FIX}.rollout_rs_threshold"))
    lower, joint, upper = bound.rpartition("_")
    low = found.value(f"{FIX}.rollout_rs_threshold_lower", lower if joint else 1.0 / float(upper))
    settings: dict[str, Any] = {
        "train.correction.reject_level": level,
        "train.correction.reject_low": float(low),
        "train.correction.reject_high": float(upper),
    }
    if not found.value(f"{FIX}.rollout_is"):
        settings |= {"train.correction.kind": "importance", "train.correction.mode": "none"}
    return settings


def reward_path(value: Any, found: ForeignConfig) -> RowResult:
    """Map the path of the reward model."""
    if not found.value("reward_model.enable"):
        return "reward_model.enable is false"
    return {"rollout.reward_model.path": path_of(str(value))}


def val_temperature(value: Any, found: ForeignConfig) -> RowResult:
    """Map the temperature of evaluation; without do_sample, evaluation is greedy."""
    return {"eval.temperature": value if found.value(f"{ROLLOUT}.val_kwargs.do_sample") else 0.0}
