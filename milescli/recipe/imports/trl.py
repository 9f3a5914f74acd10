"""The table of TRL: GRPOConfig and its relatives in Python, the YAML of its command line, and
scripts that run `trl grpo` or a training script of its examples."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import (
    ENGINE,
    EPOCHS,
    KERNELS,
    LOGS,
    OWN_CODE,
    PLACES,
    SAVES,
    Framework,
    Said,
    choose,
    data_name,
    gone,
    model,
    optional,
    ratio,
    same,
    scale_lora,
    to,
    trackers,
    used_by,
    when,
)

LOSSES: dict[Any, Said] = {
    "grpo": {"train.aggregation": "sequence_mean"},
    **same(("dapo", "bnpo"), {"train.aggregation": "token_mean"}),
    "dr_grpo": {"train.aggregation": "constant"},
    "cispo": {"train.surrogate": "cispo", "train.aggregation": "token_mean"},
    "sapo": {"train.surrogate": "sapo", "train.aggregation": "sequence_mean"},
    "luspo": {"train.ratio": "sequence", "train.aggregation": "sequence_sum"},
}
SCALES: dict[Any, Said] = {
    **same((True, "group"), {"train.normalize_std": "group"}),
    "batch": {"train.normalize_std": "batch"},
    **same((False, "none"), {"train.normalize_std": "none"}),
}
_KEYS = {"num_generations", "max_completion_length", "per_device_train_batch_size"}


def _is_of(found: Foreign, *names: str) -> bool:
    program = found.program.lower()
    return any(name in program for name in names)


def _is_grpo(found: Foreign) -> bool:
    return not _is_of(found, "sft", "dpo", "kto", "reward")


def _trains_rows(found: Foreign) -> Said:
    if _is_of(found, "sft"):
        return {"train.objective": "supervised"}
    if _is_of(found, "dpo"):
        beta = float(found.value("beta", 0.1))
        return {"train.objective": "preference", "train.preference.beta": beta}
    if _is_of(found, "kto"):
        return {"train.objective": "preference", "train.preference.loss": "kto"}
    return {"train.objective": "reward_model"} if _is_of(found, "reward") else {}


def _processes(found: Foreign) -> int:
    return int(found.value("num_processes", 1))


def _batch(value: Any, found: Foreign) -> Said:
    """Prompts of a step; of a run over rows their number."""
    accumulated = int(found.value("gradient_accumulation_steps", 1))
    samples = int(value) * _processes(found)
    if not _is_grpo(found):
        return {"rollout.prompts_per_step": samples * accumulated}
    steps = int(found.value("steps_per_generation", accumulated))
    whole = int(found.value("generation_batch_size", samples * steps))
    prompts = ratio(whole, int(found.value("num_generations", 8)))
    number = ratio(whole, samples * accumulated)
    if isinstance(prompts, str) or isinstance(number, str):
        return f"{prompts}; {number}"
    return {"rollout.prompts_per_step": prompts, "train.updates_per_step": max(1, number)}


def _dataset(value: Any, found: Foreign) -> Said:
    name = data_name(value)
    split = found.value("dataset_train_split")
    parts = [str(one) for one in (found.value("dataset_config"), split) if one]
    return {"data.prompts": ":".join([name, *parts]) if str(name).startswith("hf:") else name}


def _correction(value: Any, found: Foreign) -> Said:
    if not value or not found.value("use_vllm"):
        return {}
    level, _, mode = str(found.value("vllm_importance_sampling_mode")).partition("_")
    return {
        "train.correction.kind": "importance",
        "train.correction.level": level,
        "train.correction.mode": mode,
        "train.correction.high": found.value("vllm_importance_sampling_cap"),
    }


def _schedule(value: Any, found: Foreign) -> Said:
    names = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear"}
    names |= {"cosine": "cosine", "cosine_with_min_lr": "cosine"}
    if (name := names.get(str(value))) is None:
        return f"schedules the learning rate by `{value}`, which miles does not have"
    return {"train.optimizer.schedule": name}


def _strategy(key: str, steps: str) -> Any:
    def row(value: Any, found: Foreign) -> Said:
        if value in ("no", False):
            return {key: 0}
        if value == "epoch":
            return f"once an epoch; {key} counts steps"
        return {key: int(found.value(steps, 500))}

    return row


def _steps(value: Any, found: Foreign) -> Said:
    return EPOCHS if _is_grpo(found) else {"train.epochs": value}


def _lora(row: Any) -> Any:
    return when(
        lambda found: bool(found.value("use_peft") or found.value("lora_r")),
        row,
        otherwise="use_peft is not set",
    )


def _fits(found: Foreign) -> str:
    if found.form == "python" and found.program:
        return f"it calls {found.program}"
    if found.program.startswith("trl "):
        return f"the script runs {found.program}"
    if _KEYS & set(found.settings) and not any(
        name.startswith("a") and "." in name for name in found.settings
    ):
        return f"it sets {min(_KEYS & set(found.settings))}"
    return ""


TABLE = Framework(
    name="trl",
    fits=_fits,
    trains_rows=_trains_rows,
    notes=(
        "TRL multiplies per_device_train_batch_size by the number of processes, which its "
        "configuration does not hold: `miles import FILE num_processes=8` sets it",
    ),
    aliases={
        "model_name": "model_name_or_path",
        "trainer.model": "model_name_or_path",
        "trainer.reward_funcs": "reward_funcs",
        "lora_lora_alpha": "lora_alpha",
        "lora_lora_dropout": "lora_dropout",
        "lora_target_modules_": "lora_target_modules",
        "evaluation_strategy": "eval_strategy",
        "warmup_step": "warmup_steps",
    },
    defaults={
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 256,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_cap": 3.0,
    },
    rows={
        "model_name_or_path": model("model.path"),
        "model_revision": to("model.revision"),
        "dataset_name": _dataset,
        "dataset_config": used_by("dataset_name"),
        "dataset_train_split": used_by("dataset_name"),
        "dataset_test_split": gone("names the rows that are held out: see data.eval"),
        "max_prompt_length": to("data.max_prompt_tokens"),
        "max_length": to("data.max_row_tokens"),
        "max_seq_length": to("data.max_row_tokens"),
        "shuffle_dataset": to("data.shuffle"),
        "max_completion_length": to("rollout.max_response_tokens"),
        "num_generations": to("rollout.samples_per_prompt"),
        "num_generations_eval": to("eval.samples_per_prompt"),
        "per_device_train_batch_size": _batch,
        "gradient_accumulation_steps": used_by("per_device_train_batch_size"),
        "steps_per_generation": used_by("per_device_train_batch_size"),
        "generation_batch_size": used_by("per_device_train_batch_size"),
        "num_processes": used_by("per_device_train_batch_size"),
        "num_iterations": lambda value, found: (
            {} if value == 1 else f"uses each sample {value} times; miles uses it once"
        ),
        "temperature": to("rollout.temperature"),
        "top_p": to("rollout.top_p"),
        "top_k": lambda value, found: {"rollout.top_k": value if value > 0 else -1},
        "beta": optional(lambda value, found: {"train.kl_coef": value, "train.kl_in": "loss"}),
        "epsilon": to("train.clip_low", "train.clip_high"),
        "epsilon_high": to("train.clip_high"),
        "delta": to("train.dual_clip"),
        "loss_type": choose(LOSSES, what="takes the loss"),
        "scale_rewards": choose(SCALES, what="scales rewards by"),
        "importance_sampling_level": choose(
            {one: {"train.ratio": one} for one in ("token", "sequence")}, what="takes ratios of a"
        ),
        "mask_truncated_completions": lambda value, found: {
            "rollout.sample_filter": "truncated" if value else "none"
        },
        "sapo_temperature_pos": to("train.soft_clip.positive"),
        "sapo_temperature_neg": to("train.soft_clip.negative"),
        "off_policy_mask_threshold": to("train.off_policy_mask"),
        "use_bias_correction_kl": to("train.kl_unbiased"),
        "vllm_importance_sampling_correction": _correction,
        "vllm_importance_sampling_mode": used_by("vllm_importance_sampling_correction"),
        "vllm_importance_sampling_cap": used_by("vllm_importance_sampling_correction"),
        "sync_ref_model": used_by("ref_model_sync_steps"),
        "ref_model_sync_steps": when(
            lambda found: bool(found.value("sync_ref_model")),
            to("train.reference_every"),
            otherwise="sync_ref_model is false",
        ),
        "learning_rate": to("train.optimizer.lr"),
        "lr_scheduler_type": _schedule,
        "warmup_steps": to("train.optimizer.warmup_steps"),
        "warmup_ratio": gone(
            "is the share of all steps in which the learning rate rises: set "
            "train.optimizer.warmup_steps"
        ),
        "weight_decay": to("train.optimizer.weight_decay"),
        "adam_beta1": to("train.optimizer.beta1"),
        "adam_beta2": to("train.optimizer.beta2"),
        "adam_epsilon": to("train.optimizer.eps"),
        "max_grad_norm": to("train.optimizer.clip_grad"),
        "use_peft": used_by("lora_r"),
        "lora_r": _lora(to("train.lora.rank")),
        "lora_alpha": _lora(to("train.lora.alpha")),
        "lora_dropout": _lora(to("train.lora.dropout")),
        "lora_target_modules": _lora(
            lambda value, found: {"train.lora.targets": scale_lora(value)}
        ),
        "reward_funcs": gone(
            "functions that score: adapt them to miles's signature, then set rollout.reward to "
            "their import paths"
        ),
        "reward_weights": gone("weights of rewards: rollout.reward takes a mapping of names"),
        "reward_model_name_or_path": lambda value, found: {
            "rollout.reward": "reward_model",
            "rollout.reward_model.path": value,
        },
        "max_steps": optional(to("train.steps")),
        "num_train_epochs": _steps,
        "eval_strategy": _strategy("eval.every", "eval_steps"),
        "eval_steps": used_by("eval_strategy"),
        "save_strategy": _strategy("checkpoint.every", "save_steps"),
        "save_steps": lambda value, found: {"checkpoint.every": int(value)},
        "save_total_limit": to("checkpoint.keep"),
        "report_to": trackers,
        "run_name": to("run.name"),
        "seed": to("run.seed"),
        "gradient_checkpointing": lambda value, found: {
            "train.recompute": "full" if value else "none"
        },
        "vllm_gpu_memory_utilization": to("engines.memory_fraction"),
        "vllm_tensor_parallel_size": to("engines.tp"),
        "use_vllm": gone("samples by vLLM; miles samples by SGLang"),
        "output_dir": gone(SAVES),
    },
    groups={
        "vllm_": ENGINE,
        "trainer.": OWN_CODE,
        "lora_": "an option of the adapter: see train.lora",
        "logging_": LOGS,
        "log_": LOGS,
        "wandb_": LOGS,
        "push_to_hub": "uploads the model: see miles export",
        "hub_": "uploads the model: see miles export",
        **dict.fromkeys(
            (
                *("bf16", "fp16", "tf32", "torch_dtype", "dtype", "attn_implementation"),
                *("use_liger_kernel", "use_liger_loss", "optim", "load_in_4bit", "load_in_8bit"),
            ),
            KERNELS,
        ),
        **dict.fromkeys(
            (
                *("deepspeed", "distributed_type", "num_machines", "machine_rank", "fsdp"),
                *("mixed_precision", "ds3_gather_for_generation", "fsdp_config"),
                *("gradient_checkpointing_kwargs", "per_device_eval_batch_size"),
                *("deepspeed_config", "main_training_function", "config_file"),
            ),
            PLACES,
        ),
        "system_prompt": "a text before every prompt: see data.system_prompt",
    },
)
