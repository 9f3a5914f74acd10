"""verl: what its table (templates/imports/verl.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import TEXTS, Said, updates

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FIX = "algorithm.rollout_correction"
_LEVELS = ("token", "sequence", "geometric")


def fits(found: Foreign) -> str:
    """Return by what a configuration of verl is known."""
    if "verl" in found.program or "main_dapo" in found.program or "main_ppo" in found.program:
        return f"the script runs {found.program}"
    name = next((n for n in found.settings if n.startswith("actor_rollout_ref.")), None)
    if name is None and {"data.train_files", "trainer.total_epochs"} <= set(found.settings):
        name = "data.train_files"
    return "" if name is None else f"it sets {name}"


def _is_sft(found: Foreign) -> bool:
    return "sft" in found.program or "model.partial_pretrain" in found.settings


def trains_rows(found: Foreign) -> Said:
    """Return the keys of a run without rollout."""
    return {"train.objective": "supervised"} if _is_sft(found) else {}


def in_loss(found: Foreign) -> bool:
    """Return True if the loss has a KL term."""
    return bool(found.value(f"{ACTOR}.use_kl_loss"))


def in_reward(found: Foreign) -> bool:
    """Return True if the reward has a KL term."""
    return bool(found.value("algorithm.use_kl_in_reward")) and not in_loss(found)


def has_critic(found: Foreign) -> bool:
    """Return True if a critic is trained."""
    return str(found.value("algorithm.adv_estimator")).lower().endswith("gae")


def lora(found: Foreign) -> bool:
    """Return True if an adapter is trained."""
    return found.value("actor_rollout_ref.model.lora_rank", 0) > 0


def epochs(value: Any, found: Foreign) -> Said:
    """Of SFT they are the length; of RL the number of rows decides."""
    return {"train.epochs": value} if _is_sft(found) else TEXTS["EPOCHS"]


def minibatch(value: Any, found: Foreign) -> Said:
    """Count updates: both batches are prompts."""
    times = found.value(f"{ACTOR}.ppo_epochs", 1)
    if times != 1:
        return f"with ppo_epochs={times}, each sample is used {times} times; miles uses it once"
    return updates(float(found.value("data.train_batch_size")), float(value))


def generated(value: Any, found: Foreign) -> Said:
    """Prompts that are sampled for a batch."""
    return {"rollout.over_sampling": max(1.0, value / found.value("data.train_batch_size"))}


def group_std(value: Any, found: Foreign) -> Said:
    """Only GRPO's estimator reads it."""
    if str(found.value("algorithm.adv_estimator")).rpartition(".")[2].lower() != "grpo":
        return {}
    return {"train.normalize_std": "group" if value else "none"}


def correction(value: Any, found: Foreign) -> Said:
    """Weights between trainer and engine."""
    if found.value(f"{FIX}.bypass_mode"):
        return "in bypass mode the ratio of the loss corrects already"
    if value not in _LEVELS:
        return {} if value in ("null", False) else f"weights at the level `{value}`"
    return {"train.correction.kind": "importance", "train.correction.level": value}


def rejection(value: Any, found: Foreign) -> Said:
    """Samples or tokens that are left out where trainer and engine differ."""
    if found.value(f"{FIX}.bypass_mode"):
        return "miles does not reject samples where the ratio of the loss is to the engine's"
    names = {"seq": "sequence", "geo": "geometric"}
    level = str(value).partition("_")[0]
    level = names.get(level, level)
    if level not in _LEVELS:
        return f"rejects samples by `{value}`"
    said: dict[str, Any] = {"train.correction.reject_level": level}
    if not found.value(f"{FIX}.rollout_is"):
        said |= {"train.correction.kind": "importance", "train.correction.mode": "none"}
    return said


def reward_path(value: Any, found: Foreign) -> Said:
    """Its weights."""
    if not found.value("reward_model.enable"):
        return "reward_model.enable is false"
    return {"rollout.reward_model.path": value}


def val_temperature(value: Any, found: Foreign) -> Said:
    """Without do_sample evaluations are greedy."""
    return {"eval.temperature": value if found.value(f"{ROLLOUT}.val_kwargs.do_sample") else 0.0}
