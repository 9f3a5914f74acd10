"""The table of prime-rl: one TOML file, or those of its trainer and orchestrator."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import (
    ENGINE,
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
    scale_lora,
    to,
    used_by,
)

ORCH, TRAIN = "orchestrator", "trainer"
ENVIRONMENT = "an environment of verifiers: see rollout.verifiers and docs/environments.md"
_OLD = {
    f"{ORCH}.rollouts_per_example": f"{ORCH}.group_size",
    f"{ORCH}.sampling.max_tokens": f"{ORCH}.train.sampling.max_completion_tokens",
    f"{ORCH}.sampling.temperature": f"{ORCH}.train.sampling.temperature",
    f"{ORCH}.env.0.id": f"{ORCH}.train.source.0.env.taskset.id",
    f"{ORCH}.train.env.0.taskset.id": f"{ORCH}.train.source.0.env.taskset.id",
    f"{ORCH}.train.env.0.id": f"{ORCH}.train.source.0.env.taskset.id",
    "wandb.project": "monitors.wandb.project",
    "wandb.name": "monitors.wandb.name",
    f"{TRAIN}.ckpt.interval": "ckpt.interval",
    f"{TRAIN}.model.name": "model.name",
    f"{ORCH}.model.name": "model.name",
    "rollouts_per_example": f"{ORCH}.group_size",
    "batch_size": f"{ORCH}.batch_size",
    "group_size": f"{ORCH}.group_size",
    "optim.lr": f"{TRAIN}.optim.lr",
    "optim.weight_decay": f"{TRAIN}.optim.weight_decay",
    "scheduler.type": f"{TRAIN}.scheduler.type",
    "scheduler.warmup_steps": f"{TRAIN}.scheduler.warmup_steps",
    f"{TRAIN}.max_steps": "max_steps",
    f"{ORCH}.max_steps": "max_steps",
    "max_async_level": f"{ORCH}.max_off_policy_steps",
    "env.0.id": f"{ORCH}.train.source.0.env.taskset.id",
    "sampling.max_tokens": f"{ORCH}.train.sampling.max_completion_tokens",
    "data.name": "data.source.0.dataset",
}
ESTIMATORS: dict[Any, Said] = {
    "grpo": {"train.advantage": "grpo", "train.normalize_std": "none"},
    "max_rl": {"train.advantage": "max_rl"},
    "opd": "learns from a teacher: see train.distill and docs/distillation.md",
    "sft": "learns from a teacher's samples: see docs/distillation.md",
}


def _is_sft(found: Foreign) -> bool:
    begins = tuple(f"{name}." for name in (ORCH, TRAIN))
    return "data.batch_size" in found.settings and not any(
        name.startswith(begins) and "default" not in one.where
        for name, one in found.settings.items()
    )


def _trains_rows(found: Foreign) -> Said:
    return {"train.objective": "supervised"} if _is_sft(found) else {}


def _batch(value: Any, found: Foreign) -> Said:
    """Their batch counts samples."""
    prompts = ratio(float(value), float(found.value(f"{ORCH}.group_size", 1)))
    return prompts if isinstance(prompts, str) else {"rollout.prompts_per_step": prompts}


def _environment(value: Any, found: Foreign) -> Said:
    return {
        "rollout.agent": "verifiers",
        "rollout.verifiers.environment": value,
        "data.prompts": "task:verifiers",
        "data.eval": "task:verifiers-heldout",
    }


def _filter(value: Any, found: Foreign) -> Said:
    return {"rollout.filter": "zero_variance" if value else "none"}


def _mask(key: str) -> Any:
    return lambda value, found: {"train.surrogate": "dppo_tv", key: value}


def _fits(found: Foreign) -> str:
    begins = (f"{ORCH}.", f"{TRAIN}.", "inference", "deployment.")
    name = next((one for one in found.settings if one.startswith(begins)), None)
    if found.form == "toml" and (name or "max_steps" in found.settings):
        return f"it is TOML and sets {name or 'max_steps'}"
    return ""


TABLE = Framework(
    name="prime-rl",
    fits=_fits,
    trains_rows=_trains_rows,
    notes=(
        "prime-rl's loss masks tokens whose probability moved away and adds a squared KL to the "
        "sampling policy (kl_tau); train.surrogate=dppo_tv is the mask alone",
        "prime-rl takes data and rewards from an environment of verifiers",
    ),
    aliases=_OLD,
    defaults={
        f"{ORCH}.group_size": 1,
        f"{ORCH}.max_off_policy_steps": 8,
        f"{ORCH}.train.sampling.temperature": 1.0,
        f"{ORCH}.algo.type": "grpo",
        f"{ORCH}.train.filter_zero_advantages": True,
        f"{TRAIN}.loss.dppo_mask_low": 0.2,
        f"{TRAIN}.loss.dppo_mask_high": 0.2,
        f"{TRAIN}.optim.lr": 1e-6,
        f"{TRAIN}.optim.weight_decay": 0.01,
        f"{TRAIN}.optim.max_norm": 1.0,
        f"{TRAIN}.optim.betas1": 0.9,
        f"{TRAIN}.optim.betas2": 0.999,
        "ckpt.interval": 0,
    },
    rows={
        "model.name": model("model.path"),
        "max_steps": optional(to("train.steps")),
        "seed": to("run.seed"),
        "seq_len": gone(
            "bounds prompt and response together: see data.max_prompt_tokens and "
            "rollout.max_response_tokens"
        ),
        f"{ORCH}.seq_len": gone(
            "bounds prompt and response together: see rollout.max_response_tokens"
        ),
        f"{ORCH}.batch_size": _batch,
        f"{ORCH}.group_size": to("rollout.samples_per_prompt"),
        f"{ORCH}.train.sampling.max_completion_tokens": to("rollout.max_response_tokens"),
        f"{ORCH}.train.sampling.temperature": to("rollout.temperature"),
        f"{ORCH}.max_off_policy_steps": to("rollout.max_staleness"),
        f"{ORCH}.algo.type": choose(ESTIMATORS, what="learns by"),
        f"{ORCH}.train.filter_zero_advantages": _filter,
        f"{ORCH}.train.source.0.env.taskset.id": _environment,
        f"{ORCH}.train.source.0.name": used_by("id"),
        f"{ORCH}.eval.interval": to("eval.every"),
        f"{ORCH}.eval.num_examples": optional(to("eval.num_prompts")),
        f"{ORCH}.eval.group_size": to("eval.samples_per_prompt"),
        f"{ORCH}.eval.sampling.max_completion_tokens": to("eval.max_response_tokens"),
        f"{ORCH}.eval.sampling.temperature": to("eval.temperature"),
        f"{ORCH}.oversampling_factor": to("rollout.over_sampling"),
        f"{TRAIN}.loss.dppo_mask_low": _mask("train.clip_low"),
        f"{TRAIN}.loss.dppo_mask_high": _mask("train.clip_high"),
        f"{TRAIN}.optim.lr": to("train.optimizer.lr"),
        f"{TRAIN}.optim.weight_decay": to("train.optimizer.weight_decay"),
        f"{TRAIN}.optim.max_norm": to("train.optimizer.clip_grad"),
        f"{TRAIN}.optim.betas1": to("train.optimizer.beta1"),
        f"{TRAIN}.optim.betas2": to("train.optimizer.beta2"),
        f"{TRAIN}.optim.type": choose(
            {"adamw": {"train.optimizer.rule": "adamw"}, "sgd": {"train.optimizer.rule": "sgd"}},
            what="optimises by",
        ),
        f"{TRAIN}.scheduler.type": choose(
            {one: {"train.optimizer.schedule": one} for one in ("constant", "linear", "cosine")},
            what="schedules the learning rate by",
        ),
        f"{TRAIN}.scheduler.warmup_steps": to("train.optimizer.warmup_steps"),
        f"{TRAIN}.scheduler.min_lr": to("train.optimizer.min_lr"),
        f"{TRAIN}.model.lora.rank": optional(to("train.lora.rank")),
        f"{TRAIN}.model.lora.alpha": to("train.lora.alpha"),
        f"{TRAIN}.model.lora.dropout": to("train.lora.dropout"),
        f"{TRAIN}.model.lora.target_modules": lambda value, found: {
            "train.lora.targets": scale_lora(value)
        },
        f"{TRAIN}.enable_router_replay": to("train.routing_replay"),
        f"{TRAIN}.model.ep": to("parallel.ep"),
        f"{TRAIN}.model.cp": to("parallel.cp"),
        f"{TRAIN}.model.ac.freq": lambda value, found: {"train.recompute": "full"},
        "inference.vllm.tensor_parallel_size": to("engines.tp"),
        "inference.parallel.tp": to("engines.tp"),
        "inference.vllm.gpu_memory_utilization": to("engines.memory_fraction"),
        "ckpt.interval": lambda value, found: {"checkpoint.every": value},
        "ckpt.keep_last": to("checkpoint.keep"),
        "ckpt": gone("saves at the end: miles always does"),
        "monitors.wandb.project": lambda value, found: {
            "run.trackers": ["wandb"],
            "run.project": value,
        },
        "monitors.wandb.name": to("run.name"),
        "data.source.0.dataset": lambda value, found: {"data.prompts": data_name(value)},
        "data.batch_size": to("rollout.prompts_per_step"),
        "data.seq_len": to("data.max_row_tokens"),
        "output_dir": gone(SAVES),
    },
    groups={
        f"{ORCH}.train.source": ENVIRONMENT,
        f"{ORCH}.train.env": ENVIRONMENT,
        f"{ORCH}.env": ENVIRONMENT,
        f"{ORCH}.eval": ENVIRONMENT,
        "eval": ENVIRONMENT,
        f"{ORCH}.renderer": "how chats become tokens: see data.chat_template",
        f"{ORCH}.concurrency": ENGINE,
        f"{ORCH}.algo": OWN_CODE,
        ORCH: "how its orchestrator runs: miles plans rollout",
        f"{TRAIN}.loss": "an option of its loss",
        TRAIN: KERNELS,
        "inference": ENGINE,
        "deployment": PLACES,
        "slurm": "runs it as a job: see miles launch --emit slurm",
        "weight_broadcast": "how weights travel to the engines: see weights.channel",
        "ckpt": "how its checkpoints are written",
        "monitors": LOGS,
        "wandb": LOGS,
        "log": LOGS,
        "model": KERNELS,
        "data": "how it reads rows: see docs/data.md",
        "optim": "an option of its optimizer",
        "env_vars": PLACES,
        "resume": "what to go on from: see miles resume",
        "vllm": ENGINE,
        "renderer": "how chats become tokens: see data.chat_template",
    },
)
