"""The tables of slime and of Miles, which share most flags: shell scripts that run train.py with
Megatron-LM's flags, SGLang's as --sglang-..., and their own."""

from __future__ import annotations

from dataclasses import replace
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
    SHAPE,
    Framework,
    Said,
    choose,
    data_name,
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

ESTIMATORS: dict[Any, Said] = {
    "grpo": {"train.advantage": "grpo"},
    "gspo": {"train.advantage": "grpo", "train.ratio": "sequence"},
    "ppo": {"train.advantage": "reinforce", "train.credit": "gae"},
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
    "on_policy_distillation": "learns from a teacher: see train.distill and docs/distillation.md",
}
REWARDS: dict[Any, Said] = {
    **same(("math", "deepscaler", "dapo", "boxed_math", "gemma_math"), {"rollout.reward": "math"}),
    "f1": {"rollout.reward": "f1"},
    "gpqa": {"rollout.reward": "multiple_choice"},
    "ifbench": {"rollout.reward": "instructions"},
    "remote_rm": {"rollout.reward": "remote"},
}
ESTIMATES: dict[Any, Said] = {
    **{one: {"train.kl_estimator": one} for one in ("k1", "k2", "k3")},
    "low_var_kl": {"train.kl_estimator": "low_var"},
    "kl": {"train.kl_estimator": "k1"},
}
NO_KL = "--use-kl-loss is not given, so the loss has no KL term"
ONE_KL = "the loss has a KL term already"


def _in_loss(found: Foreign) -> bool:
    return bool(found.value("use_kl_loss"))


def _corrects(found: Foreign) -> bool:
    return bool(found.value("use_tis"))


def _is_sft(found: Foreign) -> bool:
    return found.value("loss_type") == "sft_loss"


def _trains_rows(found: Foreign) -> Said:
    return {"train.objective": "supervised"} if _is_sft(found) else {}


def _batch(value: Any, found: Foreign) -> Said:
    if _is_sft(found):
        return {"rollout.prompts_per_step": value}
    samples = found.value("rollout_batch_size", 0) * found.value("n_samples_per_prompt", 1)
    return updates(float(samples), float(value))


def _evaluated(value: Any, found: Foreign) -> Said:
    """`name path name path ...`"""
    files = value[1::2] if isinstance(value, list) else [value]
    return {"data.eval": data_name(files)} if files else {}


def _filter(value: Any, found: Foreign) -> Said:
    known = str(value).endswith("check_reward_nonzero_std")
    return {"rollout.filter": "zero_variance"} if known else OWN_CODE


def _over_sampled(value: Any, found: Foreign) -> Said:
    return {"rollout.over_sampling": max(1.0, value / found.value("rollout_batch_size", value))}


def _no_std(value: Any, found: Foreign) -> Said:
    return {"train.normalize_std": "none"} if value else {}


def _fp8(value: Any, found: Foreign) -> Said:
    return {"train.precision": "mxfp8" if value == "mxfp8" else "fp8_block"}


def _is_slime(found: Foreign) -> bool:
    return {"hf_checkpoint", "rollout_batch_size"} <= set(found.settings)


def _fits(found: Foreign) -> str:
    return f"the script runs {found.program} with --hf-checkpoint" if _is_slime(found) else ""


def _fits_miles(found: Foreign) -> str:
    if not _is_slime(found) or "miles" not in found.text.lower():
        return ""
    return f"the script runs {found.program} with --hf-checkpoint, and names Miles"


TABLE = Framework(
    name="slime",
    fits=_fits,
    trains_rows=_trains_rows,
    notes=(
        "slime's --rm-type compares answers by its own rules; miles's rewards may judge a few "
        "responses otherwise (miles rewards try)",
    ),
    aliases={"num_train_gpus": "actor_num_gpus_per_node"},
    defaults={
        "n_samples_per_prompt": 1,
        "rollout_temperature": 1.0,
        "eps_clip": 0.2,
        "advantage_estimator": "grpo",
        "use_kl_loss": False,
        "kl_loss_type": "k1",
        "calculate_per_token_loss": False,
        "lr": 1e-6,
        "lr_decay_style": "linear",
        "weight_decay": 0.01,
        "adam_beta2": 0.999,
        "clip_grad": 1.0,
        "eval_interval": 0,
        "save_interval": 0,
    },
    rows={
        "hf_checkpoint": model("model.path"),
        "prompt_data": file("data.prompts"),
        "eval_prompt_data": _evaluated,
        "input_key": to("data.prompt_key"),
        "label_key": to("data.label_key"),
        "rollout_shuffle": to("data.shuffle"),
        "rollout_seed": to("run.seed"),
        "rollout_max_prompt_len": to("data.max_prompt_tokens"),
        "rollout_max_response_len": to("rollout.max_response_tokens"),
        "rollout_batch_size": to("rollout.prompts_per_step"),
        "n_samples_per_prompt": to("rollout.samples_per_prompt"),
        "global_batch_size": _batch,
        "num_steps_per_rollout": to("train.updates_per_step"),
        "over_sampling_batch_size": _over_sampled,
        "dynamic_sampling_filter_path": _filter,
        "num_rollout": to("train.steps"),
        "num_epoch": lambda value, found: {"train.epochs": value} if _is_sft(found) else EPOCHS,
        "rollout_temperature": to("rollout.temperature"),
        "rollout_top_p": to("rollout.top_p"),
        "rollout_top_k": lambda value, found: {"rollout.top_k": value if value > 0 else -1},
        "rollout_stop": lambda value, found: {
            "rollout.stop": value if isinstance(value, list) else [value]
        },
        "max_weight_staleness": to("rollout.max_staleness"),
        "rm_type": choose(REWARDS, what="scores by"),
        "rm_url": to("rollout.remote_reward.url"),
        "custom_rm_path": gone(
            "a reward of its own: adapt it to miles's signature, then set rollout.reward to its "
            "import path"
        ),
        "eval_interval": every("eval.every"),
        "n_samples_per_eval_prompt": to("eval.samples_per_prompt"),
        "eval_max_response_len": to("eval.max_response_tokens"),
        "eval_temperature": to("eval.temperature"),
        "eval_top_p": to("eval.top_p"),
        "advantage_estimator": choose(ESTIMATORS, what="estimates advantages by"),
        "disable_grpo_std_normalization": _no_std,
        "normalize_advantages": to("train.whiten"),
        "gamma": to("train.gamma"),
        "lambd": to("train.lam"),
        "kl_coef": when(
            lambda found: not _in_loss(found),
            optional(lambda value, found: {"train.kl_coef": value, "train.kl_in": "reward"}),
            otherwise=ONE_KL,
        ),
        "use_kl_loss": used_by("kl_loss_coef"),
        "kl_loss_coef": when(
            _in_loss,
            lambda value, found: {"train.kl_coef": value, "train.kl_in": "loss"},
            otherwise=NO_KL,
        ),
        "kl_loss_type": when(
            lambda found: _in_loss(found) or found.value("kl_coef", 0) > 0,
            choose(ESTIMATES, what="estimates the KL by"),
            otherwise=NO_KL,
        ),
        "use_unbiased_kl": to("train.kl_unbiased"),
        "ref_update_interval": optional(to("train.reference_every")),
        "entropy_coef": to("train.entropy_coef"),
        "eps_clip": to("train.clip_low", "train.clip_high"),
        "eps_clip_high": to("train.clip_high"),
        "eps_clip_c": to("train.dual_clip"),
        "value_clip": to("train.critic.clip"),
        "critic_lr": to("train.critic.lr"),
        "num_critic_only_steps": to("train.critic.warmup_steps"),
        "calculate_per_token_loss": lambda value, found: {
            "train.aggregation": "token_mean" if value else "sequence_mean"
        },
        "use_tis": lambda value, found: {"train.correction.kind": "importance"} if value else {},
        "tis_clip": when(
            _corrects, to("train.correction.high"), otherwise="--use-tis is not given"
        ),
        "tis_clip_low": when(
            _corrects, to("train.correction.low"), otherwise="--use-tis is not given"
        ),
        "tis_level": when(
            _corrects, to("train.correction.level"), otherwise="--use-tis is not given"
        ),
        "use_rollout_logprobs": lambda value, found: (
            {"train.old_logprobs": "engine"} if value else {}
        ),
        "use_opsm": used_by("opsm_delta"),
        "opsm_delta": to("train.off_policy_mask"),
        "use_rollout_routing_replay": to("train.routing_replay"),
        "use_routing_replay": to("train.routing_replay"),
        "optimizer": choose(
            {"adam": {"train.optimizer.rule": "adamw"}, "sgd": {"train.optimizer.rule": "sgd"}},
            what="optimises by",
        ),
        "lr": to("train.optimizer.lr"),
        "min_lr": to("train.optimizer.min_lr"),
        "lr_decay_style": choose(
            {one: {"train.optimizer.schedule": one} for one in ("constant", "linear", "cosine")},
            what="schedules the learning rate by",
        ),
        "lr_warmup_iters": to("train.optimizer.warmup_steps"),
        "lr_warmup_fraction": gone(
            "is the share of all steps in which the learning rate rises: set "
            "train.optimizer.warmup_steps"
        ),
        "weight_decay": to("train.optimizer.weight_decay"),
        "adam_beta1": to("train.optimizer.beta1"),
        "adam_beta2": to("train.optimizer.beta2"),
        "adam_eps": to("train.optimizer.eps"),
        "clip_grad": to("train.optimizer.clip_grad"),
        "optimizer_cpu_offload": to("train.optimizer.offload"),
        "lora_rank": optional(to("train.lora.rank")),
        "lora_alpha": to("train.lora.alpha"),
        "lora_dropout": to("train.lora.dropout"),
        "target_modules": lambda value, found: {"train.lora.targets": scale_lora(value)},
        "fp8_recipe": _fp8,
        "save_interval": every("checkpoint.every"),
        "seed": to("run.seed"),
        "use_wandb": lambda value, found: {"run.trackers": ["wandb"]} if value else {},
        "wandb_project": to("run.project"),
        "tensor_model_parallel_size": to("parallel.tp"),
        "pipeline_model_parallel_size": to("parallel.pp"),
        "context_parallel_size": to("parallel.cp"),
        "expert_model_parallel_size": to("parallel.ep"),
        "expert_tensor_parallel_size": to("parallel.etp"),
        "sequence_parallel": to("parallel.sequence_parallel"),
        "decoder_first_pipeline_num_layers": to("parallel.first_stage_layers"),
        "decoder_last_pipeline_num_layers": to("parallel.last_stage_layers"),
        "recompute_granularity": lambda value, found: (
            {"train.recompute": "full"} if value == "full" else KERNELS
        ),
        "max_tokens_per_gpu": to("train.max_tokens_per_microbatch"),
        "actor_num_gpus_per_node": to("machine.gpus"),
        "actor_num_nodes": to("machine.nodes"),
        "colocate": lambda value, found: {"engines.placement": "colocated"} if value else {},
        "rollout_num_gpus_per_engine": to("engines.tp"),
        "sglang_mem_fraction_static": to("engines.memory_fraction"),
        "sglang_max_running_requests": to("engines.max_running_requests"),
        "sglang_ep_size": to("engines.ep"),
        "sglang_expert_parallel_size": to("engines.ep"),
        "apply_chat_template": gone("miles applies the chat template: data.chat_template"),
        "ref_load": gone(
            "the weights of the reference: miles keeps those that the run begins with"
        ),
        "load": gone("what to go on from: see miles resume and model.path"),
        "save": gone(SAVES),
        "partial_rollout": gone("goes on with unfinished responses: see rollout.on_update"),
        "rollout_num_gpus": gone(PLACES),
        "rollout_function_path": gone(OWN_CODE),
        "loss_type": used_by("trains_rows"),
    },
    groups={
        "sglang_": ENGINE,
        "wandb_": LOGS,
        "custom_": OWN_CODE,
        "opd_": "learns from a teacher: see train.distill and docs/distillation.md",
        "use_opd": "learns from a teacher: see train.distill and docs/distillation.md",
        "moe_": KERNELS,
        "recompute_": KERNELS,
        "update_weight_": "how weights travel to the engines: see weights.channel",
        "mtp_": "multi-token prediction: see train.mtp",
        "enable_mtp_training": "multi-token prediction: see train.mtp",
        "fp8_": "a number format: see train.precision",
        "debug_": "parts of a run for debugging",
        "save_debug_": "parts of a run for debugging",
        "eval_": "an option of evaluations: see eval",
        "rollout_": "an option of its rollout: see rollout",
        "router_": PLACES,
        "use_miles_router": PLACES,
        "use_slime_router": PLACES,
        **dict.fromkeys(
            (
                *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
                *("num_query_groups", "group_query_attention", "kv_channels", "swiglu"),
                *("normalization", "norm_epsilon", "rotary_base", "rotary_percent"),
                *("vocab_size", "untie_embeddings_and_output_weights", "qk_layernorm"),
                *("disable_bias_linear", "add_qkv_bias", "position_embedding_type", "num_experts"),
                *("use_rotary_position_embeddings", "attention_output_gate", "spec"),
                *("use_gated_attention", "apply_layernorm_1p", "make_vocab_size_divisible_by"),
            ),
            SHAPE,
        ),
        **dict.fromkeys(
            (
                *("attention_dropout", "hidden_dropout", "accumulate_allreduce_grads_in_fp32"),
                *("attention_softmax_in_fp32", "attention_backend", "bf16", "fp16"),
                *("transformer_impl", "overlap_cpu_optimizer_d2h_h2d", "model_name"),
                *("use_precision_aware_optimizer", "no_gradient_accumulation_fusion"),
                *("log_probs_chunk_size", "no_check_for_nan_in_loss_and_grad", "qkv_format"),
            ),
            KERNELS,
        ),
        **dict.fromkeys(
            (
                *("use_dynamic_batch_size", "micro_batch_size", "balance_data", "balance_by_flops"),
                *("use_distributed_optimizer", "data_pad_size_multiplier", "train_backend"),
                *("megatron_to_hf_mode", "train_env_vars", "use_dynamic_global_batch_size"),
            ),
            PLACES,
        ),
        "disable_compute_advantages_and_returns": "learns from rows: see train.objective",
        "use_fault_tolerance": "replaces dead engines: miles always does",
        "use_tensorboard": LOGS,
        "tb_": LOGS,
        "check_weight_update_equal": "checks weights of engines: see weights.verify",
        "deterministic_mode": "computes deterministically: see train.on_policy",
        "multimodal_keys": "the column of images: see docs/vision.md",
        "metadata_key": "a column of metadata",
        "tool_key": "a column of tools",
        "no_save_optim": "saves without the optimizer's state; miles needs it to resume",
        "group_rm": OWN_CODE,
        "reward_key": "which figure of a reward's dictionary counts",
    },
)
MILES = replace(
    TABLE,
    name="miles",
    fits=_fits_miles,
    notes=(TABLE.notes[0].replace("slime's", "Miles's"),),
)
