"""The table of verl (Hydra YAML and overrides): its trainers of PPO, their relatives, and SFT."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import (
    ENGINE,
    EPOCHS,
    KERNELS,
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
    trackers,
    updates,
    used_by,
    when,
)

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
FIX = "algorithm.rollout_correction"
ESTIMATORS: dict[Any, Said] = {
    "grpo": {"train.advantage": "grpo"},
    "grpo_vectorized": {"train.advantage": "grpo"},
    "gae": {"train.advantage": "reinforce", "train.credit": "gae", "train.whiten": True},
    "reinforce_plus_plus": {
        "train.advantage": "reinforce",
        "train.credit": "to_go",
        "train.whiten": True,
    },
    "reinforce_plus_plus_baseline": {
        "train.advantage": "grpo",
        "train.normalize_std": "none",
        "train.whiten": True,
    },
    "rloo": {"train.advantage": "rloo"},
    "rloo_vectorized": {"train.advantage": "rloo"},
    "remax": {"train.advantage": "remax"},
    "opo": {"train.advantage": "opo"},
    "gpg": {"train.advantage": "gpg"},
    "grpo_passk": {"train.advantage": "best_of_n"},
}
ESTIMATORS |= {f"advantageestimator.{name}": said for name, said in ESTIMATORS.items()}
SURROGATES: dict[Any, Said] = {
    "vanilla": {"train.surrogate": "clip"},
    "gspo": {"train.surrogate": "clip", "train.ratio": "sequence"},
    "cispo": {"train.surrogate": "cispo"},
    "sapo": {"train.surrogate": "sapo"},
    "geo_mean": {"train.surrogate": "gmpo"},
    "gpg": {"train.surrogate": "reinforce"},
    "clip_cov": {"train.surrogate": "clip_cov"},
    "kl_cov": {"train.surrogate": "kl_cov"},
    "dppo_tv": {"train.surrogate": "dppo_tv"},
    "dppo_kl": {"train.surrogate": "dppo_kl"},
}
AGGREGATIONS: dict[Any, Said] = {
    "token_mean": {"train.aggregation": "token_mean"},
    "seq_mean_token_sum": {"train.aggregation": "sequence_sum"},
    "seq_mean_token_mean": {"train.aggregation": "sequence_mean"},
    "seq_mean_token_sum_norm": {"train.aggregation": "constant"},
}
ESTIMATES: dict[Any, Said] = {
    **same(("kl", "k1"), {"train.kl_estimator": "k1"}),
    **same(("mse", "k2"), {"train.kl_estimator": "k2"}),
    **same(("low_var_kl", "k3"), {"train.kl_estimator": "low_var"}),
}
_LEVELS = ("token", "sequence", "geometric")


def _in_loss(found: Foreign) -> bool:
    return bool(found.value(f"{A}.use_kl_loss"))


def _in_reward(found: Foreign) -> bool:
    return bool(found.value("algorithm.use_kl_in_reward")) and not _in_loss(found)


def _has_critic(found: Foreign) -> bool:
    return str(found.value("algorithm.adv_estimator")).endswith("gae")


def _is_overlong(found: Foreign) -> bool:
    return bool(found.value(f"{OVERLONG}.enable"))


def _minibatch(value: Any, found: Foreign) -> Said:
    epochs = found.value(f"{A}.ppo_epochs", 1)
    if epochs != 1:
        return f"with ppo_epochs={epochs}, each sample is used {epochs} times; miles uses it once"
    return updates(float(found.value("data.train_batch_size")), float(value))


def _generated(value: Any, found: Foreign) -> Said:
    return {"rollout.over_sampling": max(1.0, value / found.value("data.train_batch_size"))}


def _group_std(value: Any, found: Foreign) -> Said:
    if str(found.value("algorithm.adv_estimator")).rpartition(".")[2].lower() != "grpo":
        return {}
    return {"train.normalize_std": "group" if value else "none"}


def _correction(value: Any, found: Foreign) -> Said:
    if found.value(f"{FIX}.bypass_mode"):
        return "in bypass mode the ratio of the loss corrects already"
    if value not in _LEVELS:
        return {} if value in ("null", False) else f"weights at the level `{value}`"
    return {"train.correction.kind": "importance", "train.correction.level": value}


def _rejection(value: Any, found: Foreign) -> Said:
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


def _reward(value: Any, found: Foreign) -> Said:
    return {"rollout.reward": "reward_model"} if value else {}


def _reward_path(value: Any, found: Foreign) -> Said:
    if not found.value("reward_model.enable"):
        return "reward_model.enable is false"
    return {"rollout.reward_model.path": value}


def _val_temperature(value: Any, found: Foreign) -> Said:
    return {"eval.temperature": value if found.value(f"{R}.val_kwargs.do_sample") else 0.0}


def _is_sft(found: Foreign) -> bool:
    return "sft" in found.program or "model.partial_pretrain" in found.settings


def _trains_rows(found: Foreign) -> Said:
    return {"train.objective": "supervised"} if _is_sft(found) else {}


def _fits(found: Foreign) -> str:
    if "verl" in found.program or "main_dapo" in found.program or "main_ppo" in found.program:
        return f"the script runs {found.program}"
    name = next((n for n in found.settings if n.startswith("actor_rollout_ref.")), None)
    if name is None and {"data.train_files", "trainer.total_epochs"} <= set(found.settings):
        name = "data.train_files"
    return "" if name is None else f"it sets {name}"


NO_KL_LOSS = f"{A}.use_kl_loss is false, so the loss has no KL term"
NO_KL_REWARD = "the reward has no KL term: algorithm.use_kl_in_reward is false, or the loss has one"
NO_CRITIC = "there is no critic: algorithm.adv_estimator is not gae"

TABLE = Framework(
    name="verl",
    fits=_fits,
    trains_rows=_trains_rows,
    notes=(
        "verl chooses the reward by the `data_source` of each row; here rollout.reward decides it",
    ),
    aliases={
        "custom_reward_function.overlong_buffer.enable": f"{OVERLONG}.enable",
        "custom_reward_function.overlong_buffer.len": f"{OVERLONG}.len",
        "custom_reward_function.overlong_buffer.penalty_factor": f"{OVERLONG}.penalty_factor",
        f"{A}.optim.clip_grad": f"{A}.grad_clip",
        "model.partial_pretrain": f"{M}.path",
        "optim.lr": f"{A}.optim.lr",
        "optim.lr_scheduler": f"{A}.optim.lr_scheduler_type",
        "model.lora_rank": f"{M}.lora_rank",
        "model.lora_alpha": f"{M}.lora_alpha",
        "model.target_modules": f"{M}.target_modules",
    },
    defaults={
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{R}.n": 1,
        f"{R}.temperature": 1.0,
        f"{R}.val_kwargs.n": 1,
        f"{R}.val_kwargs.temperature": 0,
        f"{A}.ppo_mini_batch_size": 256,
        "algorithm.adv_estimator": "gae",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_penalty": "kl",
        f"{A}.use_kl_loss": False,
        f"{A}.kl_loss_coef": 0.001,
        f"{A}.kl_loss_type": "low_var_kl",
        f"{A}.clip_ratio": 0.2,
        f"{A}.clip_ratio_c": 3.0,
        f"{A}.loss_agg_mode": "token-mean",
        f"{A}.entropy_coeff": 0,
        f"{A}.grad_clip": 1.0,
        f"{A}.optim.lr": 1e-6,
        f"{A}.optim.weight_decay": 0.01,
        f"{A}.optim.betas": [0.9, 0.999],
        f"{A}.optim.lr_scheduler_type": "constant",
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    },
    rows={
        f"{M}.path": model("model.path"),
        f"{M}.lora_rank": optional(to("train.lora.rank")),
        f"{M}.lora_alpha": when(
            lambda found: found.value(f"{M}.lora_rank", 0) > 0,
            to("train.lora.alpha"),
            otherwise="model.lora_rank is 0",
        ),
        f"{M}.target_modules": when(
            lambda found: found.value(f"{M}.lora_rank", 0) > 0,
            lambda value, found: {"train.lora.targets": scale_lora(value)},
            otherwise="model.lora_rank is 0",
        ),
        "data.train_files": file("data.prompts"),
        "data.val_files": file("data.eval"),
        "data.prompt_key": to("data.prompt_key"),
        "data.reward_fn_key": gone("names the column by which verl chooses the reward"),
        "data.max_prompt_length": to("data.max_prompt_tokens"),
        "data.max_length": to("data.max_row_tokens"),
        "data.max_response_length": to("rollout.max_response_tokens"),
        "data.train_batch_size": to("rollout.prompts_per_step"),
        "data.gen_batch_size": _generated,
        "data.val_max_samples": optional(to("eval.num_prompts")),
        "data.shuffle": to("data.shuffle"),
        "data.seed": to("run.seed"),
        "data.filter_overlong_prompts": lambda value, found: (
            {"data.long_prompts": "drop"} if value else {}
        ),
        "data.truncation": gone("says what becomes of longer prompts: see data.long_prompts"),
        f"{R}.n": to("rollout.samples_per_prompt"),
        f"{R}.temperature": to("rollout.temperature"),
        f"{R}.top_p": to("rollout.top_p"),
        f"{R}.top_k": lambda value, found: {"rollout.top_k": value if value > 0 else -1},
        f"{R}.val_kwargs.n": to("eval.samples_per_prompt"),
        f"{R}.val_kwargs.temperature": _val_temperature,
        f"{R}.val_kwargs.do_sample": used_by(f"{R}.val_kwargs.temperature"),
        f"{R}.val_kwargs.top_p": to("eval.top_p"),
        f"{R}.tensor_model_parallel_size": to("engines.tp"),
        f"{R}.gpu_memory_utilization": to("engines.memory_fraction"),
        f"{R}.max_num_seqs": to("engines.max_running_requests"),
        f"{R}.multi_turn.max_assistant_turns": to("rollout.max_turns"),
        f"{A}.ppo_mini_batch_size": _minibatch,
        f"{A}.ppo_epochs": used_by(f"{A}.ppo_mini_batch_size"),
        f"{A}.ppo_max_token_len_per_gpu": to("train.max_tokens_per_microbatch"),
        "algorithm.adv_estimator": choose(ESTIMATORS, what="estimates advantages by"),
        "algorithm.norm_adv_by_std_in_grpo": _group_std,
        "algorithm.gamma": to("train.gamma"),
        "algorithm.lam": when(_has_critic, to("train.lam"), otherwise=NO_CRITIC),
        "algorithm.use_kl_in_reward": used_by("algorithm.kl_ctrl.kl_coef"),
        "algorithm.kl_ctrl.kl_coef": when(
            _in_reward,
            lambda value, found: {"train.kl_coef": value, "train.kl_in": "reward"},
            otherwise=NO_KL_REWARD,
        ),
        "algorithm.kl_penalty": when(
            _in_reward, choose(ESTIMATES, what="estimates the KL by"), otherwise=NO_KL_REWARD
        ),
        f"{A}.use_kl_loss": used_by(f"{A}.kl_loss_coef"),
        f"{A}.kl_loss_coef": when(
            _in_loss,
            lambda value, found: {"train.kl_coef": value, "train.kl_in": "loss"},
            otherwise=NO_KL_LOSS,
        ),
        f"{A}.kl_loss_type": when(
            _in_loss, choose(ESTIMATES, what="estimates the KL by"), otherwise=NO_KL_LOSS
        ),
        f"{A}.policy_loss.loss_mode": choose(SURROGATES, what="takes the loss"),
        f"{A}.clip_ratio": to("train.clip_low", "train.clip_high"),
        f"{A}.clip_ratio_low": to("train.clip_low"),
        f"{A}.clip_ratio_high": to("train.clip_high"),
        f"{A}.clip_ratio_c": to("train.dual_clip"),
        f"{A}.loss_agg_mode": choose(AGGREGATIONS, what="aggregates the loss by"),
        f"{A}.use_token_level_loss": lambda value, found: {
            "train.aggregation": "token_mean" if value else "sequence_mean"
        },
        f"{A}.entropy_coeff": to("train.entropy_coef"),
        f"{A}.grad_clip": to("train.optimizer.clip_grad"),
        f"{A}.optim.lr": to("train.optimizer.lr"),
        f"{A}.optim.weight_decay": to("train.optimizer.weight_decay"),
        f"{A}.optim.betas": lambda value, found: {
            "train.optimizer.beta1": value[0],
            "train.optimizer.beta2": value[1],
        },
        f"{A}.optim.lr_warmup_steps": lambda value, found: {
            "train.optimizer.warmup_steps": max(0, value)
        },
        f"{A}.optim.lr_warmup_steps_ratio": gone(
            "is the share of all steps in which the learning rate rises: set "
            "train.optimizer.warmup_steps"
        ),
        f"{A}.optim.lr_scheduler_type": choose(
            {one: {"train.optimizer.schedule": one} for one in ("constant", "cosine", "linear")},
            what="schedules the learning rate by",
        ),
        f"{A}.optim.warmup_style": choose(
            {one: {"train.optimizer.schedule": one} for one in ("constant", "cosine")},
            what="schedules the learning rate by",
        ),
        "critic.optim.lr": when(_has_critic, to("train.critic.lr"), otherwise=NO_CRITIC),
        "critic.cliprange_value": when(_has_critic, to("train.critic.clip"), otherwise=NO_CRITIC),
        "critic.model.path": when(_has_critic, model("train.critic.path"), otherwise=NO_CRITIC),
        "trainer.critic_warmup": when(
            _has_critic, to("train.critic.warmup_steps"), otherwise=NO_CRITIC
        ),
        "algorithm.filter_groups.enable": lambda value, found: (
            {"rollout.filter": "zero_variance"} if value else {}
        ),
        "algorithm.filter_groups.max_num_gen_batches": optional(to("rollout.max_filter_rounds")),
        "algorithm.filter_groups.metric": gone(
            "names the figure whose groups are compared: miles compares rewards"
        ),
        f"{FIX}.rollout_is": _correction,
        f"{FIX}.rollout_is_threshold": to("train.correction.high"),
        f"{FIX}.rollout_rs": _rejection,
        f"{FIX}.rollout_rs_threshold": to("train.correction.reject_high"),
        f"{FIX}.rollout_rs_threshold_lower": to("train.correction.reject_low"),
        f"{FIX}.bypass_mode": lambda value, found: (
            {"train.old_logprobs": "engine"} if value else {}
        ),
        f"{OVERLONG}.enable": lambda value, found: {
            "rollout.shaping": "overlong" if value else "none"
        },
        f"{OVERLONG}.len": when(
            _is_overlong, to("rollout.overlong_buffer"), otherwise="overlong_buffer_cfg is off"
        ),
        f"{OVERLONG}.penalty_factor": when(
            _is_overlong, to("rollout.overlong_penalty"), otherwise="overlong_buffer_cfg is off"
        ),
        "reward_model.enable": _reward,
        "reward_model.model.path": _reward_path,
        "reward_model.reward_manager": gone(
            "chooses how verl calls rewards; here rollout.reward names one"
        ),
        f"{A}.megatron.tensor_model_parallel_size": to("parallel.tp"),
        f"{A}.megatron.pipeline_model_parallel_size": to("parallel.pp"),
        f"{A}.megatron.context_parallel_size": to("parallel.cp"),
        f"{A}.megatron.expert_model_parallel_size": to("parallel.ep"),
        f"{A}.megatron.expert_tensor_parallel_size": to("parallel.etp"),
        f"{A}.ulysses_sequence_parallel_size": to("parallel.cp"),
        "trainer.n_gpus_per_node": to("machine.gpus"),
        "trainer.nnodes": to("machine.nodes"),
        "trainer.total_training_steps": optional(to("train.steps")),
        "trainer.total_epochs": lambda value, found: (
            {"train.epochs": value} if _is_sft(found) else EPOCHS
        ),
        "trainer.test_freq": every("eval.every"),
        "trainer.save_freq": every("checkpoint.every"),
        "trainer.max_actor_ckpt_to_keep": optional(to("checkpoint.keep")),
        "trainer.logger": trackers,
        "trainer.project_name": to("run.project"),
        "trainer.experiment_name": to("run.name"),
        "trainer.default_local_dir": gone(SAVES),
        "trainer.val_before_train": gone("miles evaluates before the first step if it evaluates"),
    },
    groups={
        "custom_reward_function": OWN_CODE,
        f"{A}.megatron": PLACES,
        f"{A}.fsdp_config": PLACES,
        f"{A}.optim": "an option of verl's optimizer",
        f"{A}.ppo_micro_batch_size": PLACES,
        f"{A}.ppo_micro_batch_size_per_gpu": PLACES,
        f"{A}.use_dynamic_bsz": PLACES,
        f"{A}.policy_loss": "an option of another loss",
        A: KERNELS,
        f"{R}.multi_turn": "agents and tools: see rollout.agent, rollout.tools and docs/agents.md",
        f"{R}.agent": "agents and tools: see rollout.agent, rollout.tools and docs/agents.md",
        R: ENGINE,
        "actor_rollout_ref.ref": PLACES,
        M: KERNELS,
        "actor_rollout_ref": PLACES,
        "critic": PLACES,
        "reward_model": "how verl runs reward models and rewards: see rollout.reward",
        "global_profiler": "profiling: see miles profile",
        "algorithm": "an option of verl's algorithms",
        "data": "how verl reads rows: see docs/data.md",
        "trainer": "how verl runs its trainer, saves and logs",
        "ray_kwargs": PLACES,
        "ray_init": PLACES,
        "transfer_queue": PLACES,
        "model": KERNELS,
        "optim": "an option of verl's optimizer",
        "engine": PLACES,
        "ulysses_sequence_parallel_size": PLACES,
        "use_remove_padding": KERNELS,
        "config_path": "names verl's own files",
        "config_name": "names verl's own files",
    },
)
