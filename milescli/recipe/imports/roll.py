"""The table of ROLL: the YAML of its RLVR and agentic pipelines."""

from __future__ import annotations

import re
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
    every,
    file,
    gone,
    model,
    optional,
    scale_lora,
    to,
    trackers,
    updates,
    used_by,
    when,
)
from milescli.recipe.imports.verl import AGGREGATIONS

TRAIN, INFER = "actor_train", "actor_infer"
ARGS, CONFIG = f"{TRAIN}.training_args", f"{TRAIN}.strategy_args.strategy_config"
SAMPLING = f"{INFER}.generating_args"
ESTIMATORS: dict[Any, Said] = {
    "grpo": {"train.advantage": "grpo"},
    "gae": {"train.advantage": "reinforce", "train.credit": "gae"},
    "gigpo": {"train.advantage": "gigpo"},
    "step_reinforce": "gives each step of an episode a return of its own: see train.credit",
    "agentic_reinforce": "gives each turn a return of its own: see train.credit",
}
REWARDS = {
    "MathRuleRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "instructions",
    "CrossThinkQARuleRewardWorker": "multiple_choice",
    "LLMJudgeRewardWorker": "judge",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
}


def _reinforce(found: Foreign) -> Said:
    """REINFORCE by returns, against the mean and by the std that norm_*_type name."""
    if found.value("norm_mean_type", found.value("reward_normalization.grouping")) in (
        "group",
        "traj_group_id",
    ):
        is_scaled = found.value("norm_std_type") or "std" in str(
            found.value("reward_normalization.method", "")
        )
        return {
            "train.advantage": "grpo",
            "train.normalize_std": "group" if is_scaled else "none",
        }
    return {"train.advantage": "reinforce", "train.credit": "to_go"}


def _estimator(value: Any, found: Foreign) -> Said:
    if value == "reinforce":
        return _reinforce(found)
    return choose(ESTIMATORS, what="estimates advantages by")(value, found)


def _is_agentic(found: Foreign) -> bool:
    return any(name.startswith("train_env_manager.") for name in found.settings)


def _prompts(value: Any, found: Foreign) -> Said:
    if not _is_agentic(found):
        return {"rollout.prompts_per_step": value}
    size = int(found.value("train_env_manager.group_size", 1))
    return {"rollout.prompts_per_step": max(1, int(value) // size)}


def _ranks(found: Foreign) -> int:
    mapping = str(found.value(f"{TRAIN}.device_mapping", "list(range(0,1))"))
    if match := re.fullmatch(r"list\(range\((\d+),\s*(\d+)\)\)", mapping.replace(" ", "")):
        devices = int(match[2]) - int(match[1])
    else:
        devices = len(re.findall(r"\d+", mapping)) or 1
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    parts = 1
    for name in names:
        parts *= int(found.value(f"{CONFIG}.{name}", 1))
    return max(1, devices // parts)


def _accumulated(value: Any, found: Foreign) -> Said:
    if found.value("ppo_epochs", 1) != 1:
        return f"with ppo_epochs={found.value('ppo_epochs')}, miles would use each sample once"
    update = int(value) * int(found.value(f"{ARGS}.per_device_train_batch_size", 1)) * _ranks(found)
    prompts = int(found.value("rollout_batch_size", 128))
    whole = prompts * (
        1 if _is_agentic(found) else int(found.value("num_return_sequences_in_group", 1))
    )
    said = updates(float(whole), float(update))
    return {"train.updates_per_step": 1} if isinstance(said, str) and update > whole else said


def _in_loss(found: Foreign) -> bool:
    return bool(found.value("use_kl_loss"))


def _in_reward(found: Foreign) -> bool:
    return bool(found.value("add_token_level_kl"))


def _rewards(value: Any, found: Foreign) -> Said:
    """Of all domains; a mix has one for each source."""
    names = [
        REWARDS.get(str(one.value).rpartition(".")[2], "")
        for name, one in found.settings.items()
        if re.fullmatch(r"rewards\.\w+\.worker_cls", name)
    ]
    known = list(dict.fromkeys(name for name in names if name))
    if len(known) == 1 and len(names) == 1:
        return {"rollout.reward": known[0]}
    domains = ", ".join(known) or "its own"
    return f"one reward for each domain ({domains}): see data.mix, whose sources have a reward each"


def _trains_rows(found: Foreign) -> Said:
    if "student_train.model_args.dtype" in found.settings or found.value("student_train"):
        return "it distils by a pipeline of its own: see docs/distillation.md"
    if any(name.startswith("sft_train.") for name in found.settings):
        return {"train.objective": "supervised"}
    if "beta" in found.settings and "rollout_batch_size" not in found.settings:
        return {"train.objective": "preference"}
    return {}


def _fits(found: Foreign) -> str:
    name = next(
        (one for one in found.settings if one.startswith((f"{TRAIN}.", f"{INFER}.", "sft_train."))),
        None,
    )
    return f"it sets {name}" if name and "pretrain" in found.settings else ""


NO_LOSS = "use_kl_loss is not set, so the loss has no KL term"
NO_TOKEN_KL = "add_token_level_kl is not set, so the reward has no KL term"

TABLE = Framework(
    name="roll",
    fits=_fits,
    trains_rows=_trains_rows,
    notes=(
        "ROLL scores each domain by a worker of its own; here rollout.reward or a source of "
        "data.mix names the reward",
    ),
    aliases={
        "sft_train.training_args.learning_rate": f"{ARGS}.learning_rate",
        "sft_train.data_args.file_name": f"{TRAIN}.data_args.file_name",
    },
    defaults={
        "max_steps": 500,
        "save_steps": 50,
        "eval_steps": 10,
        "rollout_batch_size": 128,
        "prompt_length": 1024,
        "adv_estimator": "gae",
        "whiten_advantages": False,
        "gamma": 1.0,
        "lambd": 0.95,
        "pg_clip": 0.2,
        "loss_agg_mode": "seq-mean-token-mean",
        "max_grad_norm": 1.0,
        "dual_clip_loss": False,
        "use_kl_loss": False,
        "add_token_level_kl": False,
        "kl_loss_coef": 0.0,
        "init_kl_coef": 0.2,
        "entropy_loss_coef": 0.0,
        "async_generation_ratio": 0,
        f"{ARGS}.learning_rate": 5e-5,
        f"{ARGS}.lr_scheduler_type": "linear",
        f"{ARGS}.adam_beta2": 0.999,
        "seed": 42,
    },
    rows={
        "pretrain": model("model.path"),
        f"{TRAIN}.data_args.file_name": file("data.prompts"),
        "validation.data_args.file_name": file("data.eval"),
        f"{TRAIN}.data_args.messages": to("data.prompt_key"),
        f"{TRAIN}.data_args.prompt": to("data.prompt_key"),
        "prompt_length": to("data.max_prompt_tokens"),
        "response_length": to("rollout.max_response_tokens"),
        "sequence_length": gone("bounds prompt and response together"),
        f"{SAMPLING}.max_new_tokens": lambda value, found: (
            {"rollout.max_response_tokens": value} if isinstance(value, int) else {}
        ),
        "rollout_batch_size": _prompts,
        "num_return_sequences_in_group": to("rollout.samples_per_prompt"),
        "train_env_manager.group_size": to("rollout.samples_per_prompt"),
        f"{SAMPLING}.temperature": to("rollout.temperature"),
        f"{SAMPLING}.top_p": to("rollout.top_p"),
        f"{SAMPLING}.top_k": lambda value, found: {"rollout.top_k": value if value > 0 else -1},
        f"{SAMPLING}.num_return_sequences": used_by("num_return_sequences_in_group"),
        f"{SAMPLING}.num_beams": used_by("temperature"),
        "validation.generating_args.temperature": to("eval.temperature"),
        "validation.generating_args.top_p": to("eval.top_p"),
        "validation.generating_args.num_return_sequences": to("eval.samples_per_prompt"),
        "validation.generating_args.max_new_tokens": lambda value, found: (
            {"eval.max_response_tokens": value} if isinstance(value, int) else {}
        ),
        "async_generation_ratio": lambda value, found: {
            "rollout.max_staleness": int(-(-value // 1))
        },
        "adv_estimator": _estimator,
        "norm_mean_type": used_by("adv_estimator"),
        "norm_std_type": used_by("adv_estimator"),
        "reward_normalization.grouping": used_by("adv_estimator"),
        "reward_normalization.method": used_by("adv_estimator"),
        "whiten_advantages": to("train.whiten"),
        "gamma": to("train.gamma"),
        "lambd": when(
            lambda found: found.value("adv_estimator") == "gae",
            to("train.lam"),
            otherwise="there is no critic",
        ),
        "pg_clip": to("train.clip_low", "train.clip_high"),
        "use_pg_clip_range": used_by("pg_clip_low"),
        "pg_clip_low": when(
            lambda found: bool(found.value("use_pg_clip_range")),
            to("train.clip_low"),
            otherwise="use_pg_clip_range is not set",
        ),
        "pg_clip_high": when(
            lambda found: bool(found.value("use_pg_clip_range")),
            to("train.clip_high"),
            otherwise="use_pg_clip_range is not set",
        ),
        "dual_clip_loss": lambda value, found: {"train.dual_clip": 3.0} if value else {},
        "value_clip": when(
            lambda found: found.value("adv_estimator") == "gae",
            to("train.critic.clip"),
            otherwise="there is no critic",
        ),
        "critic_warmup": used_by("adv_estimator"),
        "ppo_epochs": used_by("gradient_accumulation_steps"),
        "importance_sampling": choose(
            {"token": {"train.ratio": "token"}, "seq": {"train.ratio": "sequence"}},
            what="takes ratios of a",
        ),
        "loss_agg_mode": choose(AGGREGATIONS, what="aggregates the loss by"),
        "entropy_loss_coef": to("train.entropy_coef"),
        "use_kl_loss": used_by("kl_loss_coef"),
        "add_token_level_kl": used_by("init_kl_coef"),
        "kl_loss_coef": when(
            _in_loss,
            lambda value, found: {"train.kl_coef": value, "train.kl_in": "loss"},
            otherwise=NO_LOSS,
        ),
        "init_kl_coef": when(
            lambda found: _in_reward(found) and not _in_loss(found),
            lambda value, found: {"train.kl_coef": value, "train.kl_in": "reward"},
            otherwise=NO_TOKEN_KL,
        ),
        "kl_penalty": gone("chooses the estimate of the KL term: see train.kl_estimator"),
        "max_grad_norm": to("train.optimizer.clip_grad"),
        f"{ARGS}.learning_rate": to("train.optimizer.lr"),
        f"{ARGS}.weight_decay": to("train.optimizer.weight_decay"),
        f"{ARGS}.warmup_steps": to("train.optimizer.warmup_steps"),
        f"{ARGS}.warmup_ratio": gone("is a share of all steps: see train.optimizer.warmup_steps"),
        f"{ARGS}.adam_beta2": to("train.optimizer.beta2"),
        f"{ARGS}.lr_scheduler_type": choose(
            {one: {"train.optimizer.schedule": one} for one in ("constant", "linear", "cosine")},
            what="schedules the learning rate by",
        ),
        f"{ARGS}.gradient_accumulation_steps": _accumulated,
        f"{ARGS}.per_device_train_batch_size": used_by("gradient_accumulation_steps"),
        f"{ARGS}.num_train_epochs": gone("counts passes over the data: max_steps ends the run"),
        f"{TRAIN}.model_args.lora_rank": optional(to("train.lora.rank")),
        f"{TRAIN}.model_args.lora_alpha": to("train.lora.alpha"),
        f"{TRAIN}.model_args.lora_target": lambda value, found: {
            "train.lora.targets": scale_lora(value)
        },
        "lora_rank": optional(to("train.lora.rank")),
        "lora_alpha": to("train.lora.alpha"),
        "lora_target": lambda value, found: {"train.lora.targets": scale_lora(value)},
        f"{CONFIG}.tensor_model_parallel_size": to("parallel.tp"),
        f"{CONFIG}.pipeline_model_parallel_size": to("parallel.pp"),
        f"{CONFIG}.context_parallel_size": to("parallel.cp"),
        f"{CONFIG}.expert_model_parallel_size": to("parallel.ep"),
        f"{CONFIG}.sequence_parallel": to("parallel.sequence_parallel"),
        f"{CONFIG}.recompute_granularity": lambda value, found: (
            {"train.recompute": "full"} if value == "full" else KERNELS
        ),
        f"{INFER}.num_gpus_per_worker": to("engines.tp"),
        f"{INFER}.strategy_args.strategy_config.mem_fraction_static": to("engines.memory_fraction"),
        f"{INFER}.strategy_args.strategy_config.gpu_memory_utilization": to(
            "engines.memory_fraction"
        ),
        "num_gpus_per_node": to("machine.gpus"),
        "num_nodes": to("machine.nodes"),
        "max_steps": to("train.steps"),
        "save_steps": every("checkpoint.every"),
        "eval_steps": every("eval.every"),
        "max_ckpt_to_keep": optional(to("checkpoint.keep")),
        "seed": to("run.seed"),
        "track_with": trackers,
        "exp_name": to("run.name"),
        "reward_clip": gone("bounds rewards: write it into the reward"),
        "advantage_clip": gone("bounds advantages: see train.advantage for code of your own"),
        "max_len_mask": lambda value, found: {
            "rollout.sample_filter": "truncated" if value else "none"
        },
        "difficulty_mask": gone("weights prompts by how often they are solved: see rollout.filter"),
    },
    groups={
        "rewards": "workers that score: see rollout.reward and data.mix",
        "custom_envs": "environments: see rollout.environment and docs/environments.md",
        "train_env_manager": "environments: see rollout.environment and docs/environments.md",
        "val_env_manager": "environments: see rollout.environment and docs/environments.md",
        f"{TRAIN}.data_args": "how ROLL reads rows: see docs/data.md",
        TRAIN: PLACES,
        INFER: ENGINE,
        "reference": PLACES,
        "critic": PLACES,
        "reward": PLACES,
        "validation": "an option of its evaluations: see eval",
        "tracker_kwargs": LOGS,
        "system_envs": PLACES,
        "checkpoint_config": SAVES,
        "sft_train": PLACES,
        **dict.fromkeys(("logging_dir", "output_dir", "rollout_dump_dir"), SAVES),
        "difficulty_": "weights prompts by how often they are solved: see rollout.filter",
        "reward_": "rewards: see rollout.reward and rollout.shaping",
        "teacher": "learns from a teacher: see train.distill and docs/distillation.md",
        "generate_opt_level": ENGINE,
        "train_infer_correction": "weights by trainer and engine: see train.correction",
        "user_defined_rollout_loop_cls": OWN_CODE,
    },
)
