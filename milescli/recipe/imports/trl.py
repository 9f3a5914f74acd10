"""Implements the functions that the table of TRL (templates/imports/trl.yaml) calls."""

from __future__ import annotations

import math
import re
from typing import Any

from milescli.core.units import decimal_product
from milescli.recipe.imports.reading import ForeignConfig
from milescli.recipe.imports.tables import (
    NOTE,
    TEXTS,
    WARNS,
    RowResult,
    data_name,
    ratio,
    share,
)

_TRL_COMMAND = re.compile(r"\btrl (sft|dpo|grpo|kto|reward|rloo)\b")
"""Pattern of the `trl` command that a comment in a YAML file names."""
_KEYS = {"num_generations", "max_completion_length", "per_device_train_batch_size"}
CLIP = "vllm_importance_sampling_clip"
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


_SAMPLES = {"num_generations", "max_completion_length", "reward_funcs", "generation_batch_size"}
_REFUSED = {
    "onlinedpo": "learns from pairs that it samples and a judge orders, for which miles has none",
    "nashmd": "learns from pairs that it samples and a judge orders, for which miles has none",
    "xpo": "learns from pairs that it samples and a judge orders, for which miles has none",
    "gkd": "learns from a teacher: see docs/distillation.md",
    "gold": "learns from a teacher: see docs/distillation.md",
    "minillm": "learns from a teacher: see docs/distillation.md",
    "distillation": "learns from a teacher: see docs/distillation.md",
    "opd": "learns from a teacher: see docs/distillation.md",
    "sdft": "learns from itself with a hint: see docs/distillation.md",
    "sdpo": "learns from itself with a hint: see docs/distillation.md",
    "ssd": "learns from itself: see docs/distillation.md",
    "prm": "trains a reward model of single steps, for which miles has none",
    "bco": "learns from single responses by BCO; miles from pairs (train.preference.loss=bco)",
    "tpo": "learns from three responses of a prompt, for which miles has none",
    "ppo": "is PPO with a reward model: start from a recipe with `train.algorithm: ppo`",
}
"""Word or words of a trainer's name -> why no recipe can be made for it."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_KINDS = ("rloo", "grpo", "gspo", "sft", "dpo", "mpo", "kto", "orpo", "cpo", "reward", "_rm")
_PAIRS = ("dpo", "mpo", "kto", "orpo", "cpo")
_GROUP_LOSSES: dict[str, RowResult] = {
    "grpo": {"train.aggregation": "sequence_mean"},
    "dapo": {"train.aggregation": "token_mean"},
    "bnpo": {"train.aggregation": "token_mean"},
    "dr_grpo": {"train.aggregation": "constant"},
    "sapo": {"train.surrogate": "sapo", "train.aggregation": "sequence_mean"},
    "luspo": {"train.ratio": "sequence", "train.aggregation": "sequence_sum"},
}
_LOSSES = {
    "exo_pair": "exo",
    "nca_pair": "nca",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    **{one: one for one in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "kto")},
    **{one: one for one in ("apo_zero", "apo_down", "orpo", "simpo", "cpo")},
}


def kind(found: ForeignConfig) -> str:
    """Return the training method, one of the names above; GRPO by default."""
    trainer = found.value("trainer") or next(iter(_TRL_COMMAND.findall(found.text)), found.program)
    name = str(trainer).rpartition("/")[2]
    program = re.sub(r"config$|trainer$|\.py$", "", name.lower())
    named = next((one for one in _REFUSED if one in _words(name)), None)
    if named or program or _SAMPLES & set(found.settings):
        return named or next((one for one in _KINDS if one in program), "grpo")
    of_place = (one for place in found.places for one in _KINDS if one in place.lower().split("_"))
    return next(of_place, "grpo")  # recipes/NAME/sft/config.yaml


def _words(name: str) -> set[str]:
    """Return the words of a name in lower case, alone and joined with their neighbours: online, dpo
    and onlinedpo of `OnlineDPOTrainer` or `online_dpo.py`."""
    words = [word.lower() for word in _WORD.findall(name)]
    ends = range(len(words) + 1)
    return {"".join(words[start:end]) for end in ends for start in range(end)}


def fits(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as TRL's; empty if it was not."""
    if found.form == "python" and re.search(r"Config$|Trainer$|TrainingArg", found.program):
        return f"it calls {found.program}"
    if found.program.startswith("trl "):
        return f"the script runs {found.program}"
    is_flat = not any(name.startswith("actor") for name in found.settings)
    known = _KEYS & set(found.settings)
    if {"model_name_or_path", "dataset_name"} <= set(found.settings):
        known = known or {"model_name_or_path"}
    return f"it sets {min(known)}" if known and is_flat else ""


def is_rl(found: ForeignConfig) -> bool:
    """Return True if the trainer samples."""
    return kind(found) in ("grpo", "gspo", "rloo")


def is_rloo(found: ForeignConfig) -> bool:
    """Return True for RLOO."""
    return kind(found) == "rloo"


def is_async(found: ForeignConfig) -> bool:
    """Return True for the trainer that samples asynchronously."""
    return "async" in found.program.lower()


def is_sft(found: ForeignConfig) -> bool:
    """Return True if the run trains on rows."""
    return kind(found) == "sft"


def is_reward(found: ForeignConfig) -> bool:
    """Return True if the run trains a reward model."""
    return kind(found) in ("reward", "_rm")


def learns_from_pairs(found: ForeignConfig) -> bool:
    """Return True if the run trains on pairs."""
    return kind(found) in _PAIRS


def has_lora_config(found: ForeignConfig) -> bool:
    """Return True if a Python file creates the configuration of an adapter."""
    has_keys = any(name.startswith("lora_") for name in found.settings)
    return found.form == "python" and has_keys and "use_peft" not in found.settings


def of_program(found: ForeignConfig) -> dict[str, Any]:
    """Return the keys that the trainer itself decides."""
    if not is_rloo(found):
        return {"train.old_logprobs": "engine"} if is_async(found) else {}
    return {
        "train.advantage": "rloo",
        "train.surrogate": "reinforce",
        "train.aggregation": "sequence_sum",
    }


def trains_rows(found: ForeignConfig) -> RowResult:
    """Return the recipe keys of a run without rollout; empty for RL."""
    name = kind(found)
    if name != "grpo":  # before defaults are among the keys
        found.program = found.program or name
    if name in _REFUSED:
        return f"TRL's {found.program} {_REFUSED[name]}"
    named = found.program or found.value("trainer")
    if name == "grpo" and not named and not _SAMPLES & set(found.settings):
        return "its keys do not say by which trainer: add `trainer=sft`, or grpo, dpo, reward, ..."
    if name == "sft":
        return {"train.objective": "supervised"}
    if is_reward(found):
        return {"train.objective": "reward_model"}
    if name not in _PAIRS:
        return {}
    loss = {"kto": "kto", "orpo": "orpo", "cpo": "cpo"}.get(name)
    beta = found.value("beta", 0.1)
    settings = {"train.objective": "preference", "train.preference.beta": beta}
    if name == "orpo":
        settings["train.preference.sft_weight"] = 1.0
    if name == "cpo":
        loss = "simpo" if found.value("loss_type") == "simpo" else "cpo"
        settings["train.preference.sft_weight"] = found.value("cpo_alpha", 1.0)
    if loss == "simpo":
        settings["train.preference.gamma"] = found.value("simpo_gamma", 0.5)
    return {**settings, "train.preference.loss": loss} if loss else settings


def lora(found: ForeignConfig) -> bool:
    """Return True if an adapter is trained."""
    return bool(found.value("use_peft") or has_lora_config(found) or "lora_r" in found.settings)


def batch(value: Any, found: ForeignConfig) -> RowResult:
    """Map the batch size to prompts and updates per step; for a run on rows, to rows per step."""
    accumulated = int(found.value("gradient_accumulation_steps", 1))
    samples = int(value) * int(found.value("num_processes", 1))
    note = {} if found.value("num_processes") else {NOTE: _PROCESSES}
    if not is_rl(found):
        return {"rollout.prompts_per_step": samples * accumulated, **note}
    steps = int(found.value("steps_per_generation", accumulated))
    whole = int(found.value("generation_batch_size", samples * steps))
    prompts = ratio(whole, int(found.value("num_generations", 8)))
    number = ratio(whole, samples * accumulated)
    if isinstance(prompts, str):
        return f"{whole} samples a step are no whole groups: add `num_processes=N`"
    if isinstance(number, str):
        return number
    return {"rollout.prompts_per_step": prompts, "train.updates_per_step": max(1, number), **note}


_PROCESSES = (
    "TRL multiplies per_device_train_batch_size by the number of processes, which its "
    "configuration does not hold: `miles import FILE num_processes=8` sets it"
)


def is_unbounded(found: ForeignConfig) -> bool:
    """Return True if rows are kept at any length: `max_length` is null."""
    one = found.settings.get("max_length")
    return one is not None and one.value is None


def row_tokens(value: Any, found: ForeignConfig) -> RowResult:
    """Map the bound of a row. SFT and losses of pairs cut off longer rows, reward models drop
    them."""
    if value <= 0:
        why = "TRL keeps rows of any length; miles needs a bound, and refuses longer ones"
        return {"data.long_rows": "error", NOTE: f"{why}: set data.max_row_tokens"}
    settings = {"data.max_row_tokens": value}
    return settings | ({} if is_reward(found) or is_rl(found) else {"data.long_rows": "truncate"})


def _updates(found: ForeignConfig) -> int:
    """Return the optimizer updates per step."""
    result = batch(found.value("per_device_train_batch_size", 8), found) if is_rl(found) else {}
    return int(result.get("train.updates_per_step", 1)) if isinstance(result, dict) else 1


def kl(value: Any, found: ForeignConfig) -> RowResult:
    """Map beta: a KL coefficient in the loss; for RLOO in the reward. For pairs beta has another
    meaning."""
    if not is_rl(found) or value <= 0:
        return {}
    if not is_rloo(found):
        return {"train.kl_coef": value, "train.kl_in": "loss"}
    return {
        "train.kl_coef": value,
        "train.kl_in": "reward",
        "train.kl_estimator": "k1",
        "train.credit": "to_go",
        NOTE: "TRL's RLOO takes the KL of the whole response from the reward, before the baseline",
    }


def unbiased(value: Any, found: ForeignConfig) -> RowResult:
    """Map the KL term's weight by the ratio, which only a KL term in the loss has."""
    in_loss = is_rl(found) and not is_rloo(found) and found.value("beta", 0.0) > 0
    return {"train.kl_unbiased": value} if in_loss else {}


def mixed_reference(value: Any, found: ForeignConfig) -> RowResult:
    """Note that the policy is mixed into the reference, which miles replaces."""
    why = f"TRL mixes {value:g} of the policy into the reference; miles replaces it by the policy"
    return {} if value == 1 else {NOTE: why}


def divergence(value: Any, found: ForeignConfig) -> RowResult:
    """Note a divergence of pairs other than the reverse KL."""
    name = str(value).lower().rpartition(".")[2]
    why = f"measures the distance to the reference by `{value}`; miles, by the reverse KL"
    return {} if name == "reverse_kl" else f"{WARNS}{why}"


def top_entropy(value: Any, found: ForeignConfig) -> RowResult:
    """Note that only tokens of high entropy are trained on."""
    return {} if value == 1 else f"{WARNS}trains on the share {value:g} of tokens, of most entropy"


def clip_high(value: Any, found: ForeignConfig) -> RowResult:
    """Map the upper clip bound; that of CISPO is mapped with the loss."""
    return {} if found.value("loss_type") == "cispo" else {"train.clip_high": value}


def _cispo(found: ForeignConfig) -> dict[str, Any]:
    """Map CISPO, whose bound is that of the ratio itself, not its distance from 1."""
    high = found.value("epsilon_high")
    bound = float(found.value("epsilon", 0.2) if high is None else high)
    settings = {
        "train.surrogate": "cispo",
        "train.clip_low": 1.0,
        "train.clip_high": max(round(bound - 1.0, 9), 0.0),
        "train.aggregation": "token_mean",
    }
    if bound >= 1.0:
        return settings
    why = (
        f"TRL's CISPO multiplies each token by at most {bound:g} (epsilon_high, or else epsilon), "
        "miles by at most 1: its gradients are larger. TRL's documentation recommends "
        "epsilon_high: 5.0"
    )
    return {**settings, NOTE: why}


def loss(value: Any, found: ForeignConfig) -> RowResult:
    """Map the loss of groups or of pairs."""
    if is_rloo(found) and _updates(found) > 1:
        return {NOTE: "TRL's RLOO clips the ratio of the whole response, a product"}
    if is_rloo(found) or is_sft(found) or is_reward(found) or kind(found) == "cpo":
        return {}
    if value == "cispo":
        return _cispo(found)
    if not learns_from_pairs(found):
        return _GROUP_LOSSES.get(str(value), f"{WARNS}takes the loss {value}: see train.surrogate")
    names = [str(one) for one in (value if isinstance(value, list) else [value])]
    weights = dict(zip(names, found.value("loss_weights") or [1.0] * len(names), strict=False))
    beside = [one for one in names if one != "sft"]
    if len(beside) != 1 or beside[0] not in _LOSSES or weights.get(beside[0]) != 1:
        more = f" with weights {[*weights.values()]}" if len(names) > 1 else ""
        return f"{WARNS}takes the loss {value}{more}: see train.preference.loss"
    settings = {"train.preference.loss": _LOSSES[beside[0]]}
    return settings | ({"train.preference.sft_weight": weights["sft"]} if "sft" in names else {})


def iterations(value: Any, found: ForeignConfig) -> RowResult:
    """Check that each sample is used once."""
    return {} if value == 1 else f"uses each sample {value} times; miles uses it once"


def dataset(value: Any, found: ForeignConfig) -> RowResult:
    """Map a file, or a data set on the hub with subset and split."""
    name = data_name(value)
    split = found.value("dataset_train_split")
    parts = [str(one) for one in (found.value("dataset_config"), split) if one]
    if not str(name).startswith("hf:"):
        return {"data.prompts": name}
    settings = {"data.prompts": ":".join([name, *parts])}
    if found.value("eval_strategy", "no") != "no" and not is_rl(found):
        test = found.value("dataset_test_split", "test")
        settings["data.eval"] = ":".join([name, *parts[: -1 if split else None], test])
    return settings


def mixer(value: Any, found: ForeignConfig) -> RowResult:
    """Map several data sets, each with its first split; `dataset_mixer` names them."""
    names = [f"{data_name(name)}:{value[0]}" for name in found.settings_below("dataset_mixer")]
    return {"data.prompts": names[0] if len(names) == 1 else names} if names else {}


def min_lr(value: Any, found: ForeignConfig) -> RowResult:
    """Map the minimum of the learning rate: a number, or a share of the peak."""
    options = value if isinstance(value, dict) else {"min_lr_rate": value}
    if "min_lr_rate" in options:
        lr, rate = float(found.value("learning_rate")), float(options["min_lr_rate"])
        return {"train.optimizer.min_lr": decimal_product(lr, rate)}
    return {"train.optimizer.min_lr": options["min_lr"]} if "min_lr" in options else {}


def mixture(value: Any, found: ForeignConfig) -> RowResult:
    """Map data sets with subset and split; note that weights belong in data.mix."""
    names = [
        ":".join(
            [str(data_name(one["id"])), *(str(one[k]) for k in ("config", "split") if k in one)]
        )
        for one in value
    ]
    settings: dict[str, Any] = {"data.prompts": names[0] if len(names) == 1 else names}
    if any(one.get("weight", 1.0) != 1.0 for one in value):
        settings[NOTE] = "the data sets have weights: see data.mix"
    return settings


def correction(value: Any, found: ForeignConfig) -> RowResult:
    """Map the importance weights between trainer and engine, which TRL has only with vLLM."""
    if not value or not found.value("use_vllm") or is_rloo(found):
        return {}
    low = found.value(f"{CLIP}_min")
    level, _, mode = str(found.value("vllm_importance_sampling_mode")).partition("_")
    return {
        "train.correction.kind": "importance",
        "train.correction.level": level,
        "train.correction.mode": "clip" if mode == "truncate" and low else mode,
        "train.correction.low": low or 0.0,
        "train.correction.high": found.value(f"{CLIP}_max"),
    }


def schedule(value: Any, found: ForeignConfig) -> RowResult:
    """Map the schedule of the learning rate."""
    if (name := _SCHEDULES.get(str(value))) is None:
        return f"schedules the learning rate by `{value}`, which miles does not have"
    return {"train.optimizer.schedule": name}


def smoothing(value: Any, found: ForeignConfig) -> RowResult:
    """Map the label smoothing of a loss over pairs."""
    return {"train.preference.label_smoothing": value} if learns_from_pairs(found) else {}


def warmup(value: Any, found: ForeignConfig) -> RowResult:
    """Map the warm-up: a number of updates, or below 1 a share of them."""
    updates = _updates(found)
    if value >= 1 or not value:
        return {"train.optimizer.warmup_steps": math.ceil(value / updates)}
    total = found.value("max_steps", 0)
    return share(value, total / updates, "train.optimizer.warmup_steps")


def optimizer(value: Any, found: ForeignConfig) -> RowResult:
    """Map the optimizer: any form of AdamW, Lion or SGD."""
    name = re.sub(r"^(paged|ademamix|bnb)_", "", str(value)).partition("_")[0]
    rules = {"adamw": "adamw", "lion": "lion", "sgd": "sgd"}
    known = {"train.optimizer.rule": rules[name]} if name in rules else None
    return known or f"{WARNS}optimises by `{value}`: see train.optimizer.rule"


def steps(value: Any, found: ForeignConfig) -> RowResult:
    """Map the number of updates to steps."""
    return {"train.steps": math.ceil(value / _updates(found))}


def epochs(value: Any, found: ForeignConfig) -> RowResult:
    """Map the epochs of a run on rows; in RL the number of rows decides, so a note replaces
    them."""
    if found.value("max_steps", 0) > 0:
        return {}
    return TEXTS["EPOCHS"] if is_rl(found) else {"train.epochs": value}


def evaluates(value: Any, found: ForeignConfig) -> RowResult:
    """Map the evaluation interval."""
    return _interval("eval.every", value, found.value("eval_steps", 500), found)


def saves(value: Any, found: ForeignConfig) -> RowResult:
    """Map the checkpoint interval."""
    return _interval("checkpoint.every", value, found.value("save_steps", 500), found)


def _interval(key: str, value: Any, steps: Any, found: ForeignConfig) -> RowResult:
    if value in ("no", False):
        return {key: 0}
    every = max(1, math.ceil(steps / _updates(found))) if steps >= 1 else 0
    return f"once an epoch; {key} counts steps" if value == "epoch" else {key: every}
