"""TRL: what its table (templates/imports/trl.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import TEXTS, Said, data_name, ratio

_KEYS = {"num_generations", "max_completion_length", "per_device_train_batch_size"}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def fits(found: Foreign) -> str:
    """Return by what a configuration of TRL is known."""
    if found.form == "python" and found.program:
        return f"it calls {found.program}"
    if found.program.startswith("trl "):
        return f"the script runs {found.program}"
    is_flat = not any(name.startswith("actor") for name in found.settings)
    known = _KEYS & set(found.settings)
    return f"it sets {min(known)}" if known and is_flat else ""


def _is_of(found: Foreign, *names: str) -> bool:
    program = found.program.lower()
    return any(name in program for name in names)


def _is_rl(found: Foreign) -> bool:
    return not _is_of(found, "sft", "dpo", "kto", "reward")


def trains_rows(found: Foreign) -> Said:
    """Return the keys of a run without rollout."""
    if _is_of(found, "sft"):
        return {"train.objective": "supervised"}
    if _is_of(found, "dpo"):
        beta = float(found.value("beta", 0.1))
        return {"train.objective": "preference", "train.preference.beta": beta}
    if _is_of(found, "kto"):
        return {"train.objective": "preference", "train.preference.loss": "kto"}
    return {"train.objective": "reward_model"} if _is_of(found, "reward") else {}


def lora(found: Foreign) -> bool:
    """Return True if an adapter is trained."""
    return bool(found.value("use_peft") or found.value("lora_r"))


def batch(value: Any, found: Foreign) -> Said:
    """Prompts and updates of a step; of a run over rows their number."""
    accumulated = int(found.value("gradient_accumulation_steps", 1))
    samples = int(value) * int(found.value("num_processes", 1))
    if not _is_rl(found):
        return {"rollout.prompts_per_step": samples * accumulated}
    steps = int(found.value("steps_per_generation", accumulated))
    whole = int(found.value("generation_batch_size", samples * steps))
    prompts = ratio(whole, int(found.value("num_generations", 8)))
    number = ratio(whole, samples * accumulated)
    if isinstance(prompts, str) or isinstance(number, str):
        return f"{prompts}; {number}"
    return {"rollout.prompts_per_step": prompts, "train.updates_per_step": max(1, number)}


def iterations(value: Any, found: Foreign) -> Said:
    """How often a sample is used."""
    return {} if value == 1 else f"uses each sample {value} times; miles uses it once"


def dataset(value: Any, found: Foreign) -> Said:
    """A data set of the hub with subset and split, or a file."""
    name = data_name(value)
    split = found.value("dataset_train_split")
    parts = [str(one) for one in (found.value("dataset_config"), split) if one]
    return {"data.prompts": ":".join([name, *parts]) if str(name).startswith("hf:") else name}


def correction(value: Any, found: Foreign) -> Said:
    """Weights between trainer and engine, which it has with vLLM alone."""
    if not value or not found.value("use_vllm"):
        return {}
    level, _, mode = str(found.value("vllm_importance_sampling_mode")).partition("_")
    return {
        "train.correction.kind": "importance",
        "train.correction.level": level,
        "train.correction.mode": mode,
        "train.correction.high": found.value("vllm_importance_sampling_cap"),
    }


def schedule(value: Any, found: Foreign) -> Said:
    """Of the learning rate."""
    if (name := _SCHEDULES.get(str(value))) is None:
        return f"schedules the learning rate by `{value}`, which miles does not have"
    return {"train.optimizer.schedule": name}


def steps(value: Any, found: Foreign) -> Said:
    """Of rows they are the length; of RL the number of rows decides."""
    return TEXTS["EPOCHS"] if _is_rl(found) else {"train.epochs": value}


def evaluates(value: Any, found: Foreign) -> Said:
    """When it evaluates."""
    return _interval("eval.every", value, found.value("eval_steps", 500))


def saves(value: Any, found: Foreign) -> Said:
    """When it saves."""
    return _interval("checkpoint.every", value, found.value("save_steps", 500))


def _interval(key: str, value: Any, steps: Any) -> Said:
    if value in ("no", False):
        return {key: 0}
    return f"once an epoch; {key} counts steps" if value == "epoch" else {key: int(steps)}
