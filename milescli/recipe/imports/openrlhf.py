"""The table of OpenRLHF: its flags, with dots (--actor.adam.lr) and as before (--learning_rate)."""

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
    every,
    file,
    gone,
    model,
    optional,
    same,
    scale_lora,
    to,
    updates,
    used_by,
    when,
)

ADV, KL, FIX = "algo.advantage", "algo.kl", "algo.advantage.is_correction"
ESTIMATORS: dict[Any, Said] = {
    "gae": {"train.advantage": "reinforce", "train.credit": "gae", "train.whiten": True},
    "reinforce": {"train.advantage": "reinforce", "train.credit": "to_go", "train.whiten": True},
    "rloo": {"train.advantage": "rloo", "train.whiten": True},
    "reinforce_baseline": {
        "train.advantage": "grpo",
        "train.normalize_std": "none",
        "train.whiten": True,
    },
    "group_norm": {"train.advantage": "grpo"},
    "dr_grpo": {"train.advantage": "grpo", "train.normalize_std": "none"},
}
SCHEDULES: dict[Any, Said] = {
    "constant": {"train.optimizer.schedule": "constant"},
    "constant_with_warmup": {"train.optimizer.schedule": "constant"},
    "linear": {"train.optimizer.schedule": "linear"},
    **same(("cosine", "cosine_with_min_lr"), {"train.optimizer.schedule": "cosine"}),
}
_OLD = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "learning_rate": "actor.adam.lr",
    "adam.lr": "actor.adam.lr",
    "model.model_name_or_path": "actor.model_name_or_path",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "init_kl_coef": f"{KL}.init_coef",
    "use_kl_loss": f"{KL}.use_loss",
    "kl_estimator": f"{KL}.estimator",
    "advantage_estimator": f"{ADV}.estimator",
    "gamma": f"{ADV}.gamma",
    "lambd": f"{ADV}.lambd",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "entropy_loss_coef": "actor.entropy_coef",
    "policy_loss_type": "actor.policy_loss_type",
    "freezing_actor_steps": "critic.freezing_steps",
    "train_batch_size": "train.batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "max_len": "data.max_len",
    "prompt_data": "data.prompt_dataset",
    "dataset": "data.dataset",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "eval_dataset": "eval.dataset",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "save_steps": "ckpt.save_steps",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "max_ckpt_num": "ckpt.max_num",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "enable_vllm_is_correction": f"{FIX}_enable",
    "vllm_enable_is_correction": f"{FIX}_enable",
    "vllm_is_truncated_threshold": f"{FIX}_threshold",
    "use_icepop": f"{FIX}_type",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "actor_num_nodes": "actor.num_nodes",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "seed": "train.seed",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "adam_offload": "ds.adam_offload",
    "async_train": "train.async_enable",
    "beta": "model.beta",
}


def _is_of(found: Foreign, name: str) -> bool:
    return f"train_{name}" in found.program


def _is_rl(found: Foreign) -> bool:
    return not any(_is_of(found, name) for name in ("sft", "dpo", "rm", "kto"))


def _trains_rows(found: Foreign) -> Said:
    if _is_of(found, "sft"):
        return {"train.objective": "supervised"}
    if _is_of(found, "dpo"):
        beta = float(found.value("model.beta", 0.1))
        return {"train.objective": "preference", "train.preference.beta": beta}
    if _is_of(found, "kto"):
        return {"train.objective": "preference", "train.preference.loss": "kto"}
    return {"train.objective": "reward_model"} if _is_of(found, "rm") else {}


def _in_loss(found: Foreign) -> bool:
    return bool(found.value(f"{KL}.use_loss"))


def _kl(value: Any, found: Foreign) -> Said:
    if not value:
        return {}
    return {"train.kl_coef": value, "train.kl_in": "loss" if _in_loss(found) else "reward"}


def _estimate(value: Any, found: Foreign) -> Said:
    return {"train.kl_estimator": value} if found.value(f"{KL}.init_coef") else {}


def _batch(value: Any, found: Foreign) -> Said:
    if not _is_rl(found):
        return {"rollout.prompts_per_step": value}
    if found.value("train.max_epochs", 1) != 1:
        return f"with max_epochs={found.value('train.max_epochs')}, miles would use samples once"
    prompts = float(found.value("rollout.batch_size"))
    return updates(prompts * float(found.value("rollout.n_samples_per_prompt")), float(value))


def _has_critic(found: Foreign) -> bool:
    return found.value(f"{ADV}.estimator") == "gae"


def _remote(value: Any, found: Foreign) -> Said:
    if not str(value).startswith("http"):
        return "a Python file that scores: adapt it to miles's signature, then set rollout.reward"
    return {"rollout.reward": "remote", "rollout.remote_reward.url": value}


def _reward_model(value: Any, found: Foreign) -> Said:
    if found.value("reward.remote_url"):
        return "reward.remote_url scores"
    return {"rollout.reward": "reward_model", "rollout.reward_model.path": value}


def _filter(value: Any, found: Foreign) -> Said:
    if not value:
        return {}
    low, high = found.value("algo.dynamic_filtering_range", [0, 1])
    return {
        "rollout.filter": "pass_rate",
        "rollout.pass_rate_low": float(low),
        "rollout.pass_rate_high": float(high),
    }


def _correction(value: Any, found: Foreign) -> Said:
    if not value:
        return {}
    kind = found.value(f"{FIX}_type", "tis")
    bounds = found.value(f"{FIX}_threshold", [0.5, 5.0])
    low, high = bounds if isinstance(bounds, list) else [0.0, bounds]
    is_mask = kind is True or kind == "icepop"
    level = "geometric" if "seq" in str(kind) else "token"
    return {
        "train.correction.kind": "importance",
        "train.correction.level": level,
        "train.correction.mode": "mask" if is_mask or level != "token" else "clip",
        "train.correction.low": float(low),
        "train.correction.high": float(high),
    }


def _overlong(value: Any, found: Foreign) -> Said:
    return {"rollout.shaping": "overlong", "rollout.overlong_buffer": int(value)}


def _min_lr(value: Any, found: Foreign) -> Said:
    if not str(found.value("actor.lr_scheduler")).startswith("cosine"):
        return {}
    return {"train.optimizer.min_lr": float(value) * float(found.value("actor.adam.lr"))}


def _fits(found: Foreign) -> str:
    return f"the script runs {found.program}" if "openrlhf" in found.program else ""


AGENT = "an agent of its own: see rollout.agent and docs/own-agent.md"
NO_CRITIC = "there is no critic: the advantage estimator is not gae"

TABLE = Framework(
    name="openrlhf",
    fits=_fits,
    trains_rows=_trains_rows,
    notes=("OpenRLHF's learning rate rises over a share of all steps (lr_warmup_ratio, 0.03)",),
    aliases=_OLD,
    defaults={
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": 1024,
        "rollout.temperature": 1.0,
        "train.batch_size": 128,
        f"{ADV}.estimator": "gae",
        f"{ADV}.gamma": 1.0,
        f"{ADV}.lambd": 1.0,
        f"{KL}.init_coef": 0.01,
        f"{KL}.use_loss": False,
        f"{KL}.estimator": "k1",
        "actor.eps_clip": 0.2,
        "actor.adam.lr": 1e-6,
        "actor.adam.betas": [0.9, 0.95],
        "actor.adam.weight_decay": 0.0,
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.min_lr_ratio": 0.1,
        "actor.max_norm": 1.0,
        "critic.adam.lr": 9e-6,
        "critic.value_clip": 0.5,
        "eval.temperature": 0.6,
        "eval.n_samples_per_prompt": 4,
        "data.input_key": "input",
        "train.seed": 42,
        "ckpt.save_steps": -1,
        "eval.steps": -1,
    },
    rows={
        "actor.model_name_or_path": model("model.path"),
        "data.prompt_dataset": file("data.prompts"),
        "data.dataset": file("data.prompts"),
        "data.input_key": to("data.prompt_key"),
        "data.label_key": to("data.label_key"),
        "data.prompt_max_len": to("data.max_prompt_tokens"),
        "data.max_len": lambda value, found: (
            {"data.max_row_tokens": value}
            if not _is_rl(found)
            else "bounds prompt and response together: see data.max_prompt_tokens"
        ),
        "data.max_samples": gone("reads only the first rows: data.prompts takes a range, [0:1000]"),
        "eval.dataset": file("data.eval"),
        "eval.steps": every("eval.every"),
        "eval.temperature": to("eval.temperature"),
        "eval.n_samples_per_prompt": to("eval.samples_per_prompt"),
        "rollout.batch_size": to("rollout.prompts_per_step"),
        "rollout.n_samples_per_prompt": to("rollout.samples_per_prompt"),
        "rollout.max_new_tokens": to("rollout.max_response_tokens"),
        "rollout.temperature": to("rollout.temperature"),
        "rollout.top_p": to("rollout.top_p"),
        "train.batch_size": _batch,
        "train.max_epochs": lambda value, found: {} if _is_rl(found) else {"train.epochs": value},
        "train.num_episodes": gone(EPOCHS),
        "train.async_enable": lambda value, found: {"rollout.max_staleness": 1} if value else {},
        "reward.model_name_or_path": _reward_model,
        "reward.remote_url": _remote,
        "reward.overlong_buffer_len": _overlong,
        "reward.overlong_penalty_factor": to("rollout.overlong_penalty"),
        "reward.normalize_enable": gone("scales rewards by their running mean and std"),
        "reward.clip_range": gone("bounds rewards: see rollout.reward_model.clip"),
        f"{ADV}.estimator": choose(ESTIMATORS, what="estimates advantages by"),
        f"{ADV}.no_std_norm": lambda value, found: {"train.normalize_std": "none"} if value else {},
        f"{ADV}.gamma": to("train.gamma"),
        f"{ADV}.lambd": when(_has_critic, to("train.lam"), otherwise=NO_CRITIC),
        f"{KL}.init_coef": _kl,
        f"{KL}.use_loss": used_by(f"{KL}.init_coef"),
        f"{KL}.estimator": _estimate,
        f"{KL}.target": gone("adapts the KL coefficient to a target"),
        "actor.eps_clip": to("train.clip_low", "train.clip_high"),
        "actor.eps_clip_low_high": lambda value, found: {
            "train.clip_low": value[0],
            "train.clip_high": value[1],
        },
        "actor.dual_clip": to("train.dual_clip"),
        "actor.policy_loss_type": choose(
            {"ppo": {"train.ratio": "token"}, "gspo": {"train.ratio": "sequence"}},
            what="takes the loss",
        ),
        "actor.entropy_coef": to("train.entropy_coef"),
        f"{FIX}_enable": _correction,
        f"{FIX}_threshold": used_by(f"{FIX}_enable"),
        f"{FIX}_type": used_by(f"{FIX}_enable"),
        "algo.dynamic_filtering_enable": _filter,
        "algo.dynamic_filtering_range": used_by("algo.dynamic_filtering_enable"),
        "actor.adam.lr": to("train.optimizer.lr"),
        "actor.adam.betas": lambda value, found: {
            "train.optimizer.beta1": value[0],
            "train.optimizer.beta2": value[1],
        },
        "actor.adam.eps": to("train.optimizer.eps"),
        "actor.adam.weight_decay": to("train.optimizer.weight_decay"),
        "actor.max_norm": to("train.optimizer.clip_grad"),
        "actor.lr_scheduler": choose(SCHEDULES, what="schedules the learning rate by"),
        "actor.min_lr_ratio": _min_lr,
        "actor.lr_warmup_ratio": gone(
            "is the share of all steps in which the learning rate rises: set "
            "train.optimizer.warmup_steps"
        ),
        "critic.adam.lr": when(_has_critic, to("train.critic.lr"), otherwise=NO_CRITIC),
        "critic.value_clip": when(_has_critic, to("train.critic.clip"), otherwise=NO_CRITIC),
        "critic.freezing_steps": when(
            _has_critic, to("train.critic.warmup_steps"), otherwise=NO_CRITIC
        ),
        "critic.model_name_or_path": when(
            _has_critic, model("train.critic.path"), otherwise=NO_CRITIC
        ),
        "model.beta": used_by("train.preference.beta"),
        "ds.lora.rank": optional(to("train.lora.rank")),
        "ds.lora.alpha": when(
            lambda found: found.value("ds.lora.rank", 0) > 0,
            to("train.lora.alpha"),
            otherwise="lora.rank is 0",
        ),
        "ds.lora.target_modules": lambda value, found: {"train.lora.targets": scale_lora(value)},
        "actor.gradient_checkpointing_enable": lambda value, found: (
            {"train.recompute": "full"} if value else {}
        ),
        "ds.adam_offload": to("train.optimizer.offload"),
        "train.max_tokens_per_gpu": to("train.max_tokens_per_microbatch"),
        "vllm.num_engines": to("engines.num"),
        "vllm.tensor_parallel_size": to("engines.tp"),
        "vllm.gpu_memory_utilization": to("engines.memory_fraction"),
        "actor.num_gpus_per_node": to("machine.gpus"),
        "actor.num_nodes": to("machine.nodes"),
        "ckpt.save_steps": every("checkpoint.every"),
        "ckpt.max_num": to("checkpoint.keep"),
        "ckpt.output_dir": gone(SAVES),
        "ckpt.path": gone(SAVES),
        "ckpt.save_hf": gone("also saves a Hugging Face folder: see miles export"),
        "ckpt.load_enable": gone("goes on from its checkpoint: see miles resume"),
        "train.seed": to("run.seed"),
        "logger.wandb.key": lambda value, found: {"run.trackers": ["wandb"]},
        "logger.wandb.project": to("run.project"),
        "logger.tensorboard_dir": gone(LOGS),
        "train.agent_func_path": gone(
            "an agent of its own: see rollout.agent and docs/own-agent.md"
        ),
        "data.apply_chat_template": gone("miles applies the model's chat template"),
    },
    groups={
        **dict.fromkeys(("vllm", "enforce_eager", "vllm_", "enable_prefix_caching"), ENGINE),
        "ds": PLACES,
        "logger": LOGS,
        "wandb_": LOGS,
        "ref": PLACES,
        "ref_": PLACES,
        "reward": PLACES,
        "reward_": PLACES,
        "critic": PLACES,
        "critic_": PLACES,
        "actor": KERNELS,
        "actor_": PLACES,
        "colocate_": PLACES,
        "deepspeed_": PLACES,
        "train": "how it runs its trainer",
        "rollout": ENGINE,
        "data": "how it reads rows: see docs/data.md",
        "algo": OWN_CODE,
        "ckpt": SAVES,
        "model": KERNELS,
        "max_samples": "reads only the first rows: data.prompts takes a range, [0:1000]",
        "normalize_reward": "scales rewards by their running mean and std",
        "save_": "also saves a Hugging Face folder: see miles export",
        "micro_": PLACES,
        "use_kl_estimator_k3": "the estimate of the KL term: see train.kl_estimator",
        **dict.fromkeys(
            (
                *("zero_stage", "bf16", "packing_samples", "flash_attn", "param_dtype"),
                *("use_dynamic_batch", "train_max_tokens_per_gpu", "attn_implementation"),
                *("gradient_checkpointing_use_reentrant", "load_checkpoint", "logging_steps"),
                *("ring_attn_size", "ring_head_stride", "rollout_max_tokens_per_gpu"),
            ),
            PLACES,
        ),
        "agent_func_path": AGENT,
        "stop_properly_penalty_coef": "scales the reward of truncated responses",
    },
)
