"""Configurations in the forms of other frameworks, written for these tests, each with what a recipe
must say: name -> (framework, files, keys and values, keys of theirs without a counterpart)."""

from __future__ import annotations

from typing import Any

from milescli.recipe.distill import Teacher
from tests.recipe.imports.launchers import MILES_PYTHON

Case = tuple[str, dict[str, str], dict[str, Any], tuple[str, ...]]

VERL_GRPO = """\
set -x
N=${GROUP:-5}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/sums/train.parquet \\
    data.train_batch_size=64 \\
    data.max_response_length=$((2 * 512)) \\
    actor_rollout_ref.model.path=Qwen/Qwen3-4B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    trainer.save_freq=-1 \\
    trainer.total_epochs=3 $@
"""
VERL_DAPO = """\
train=("data/a.parquet" 'data/b.parquet')
low=0.2
mode="token-mean"
FILES="['data/a.parquet','data/b.parquet']"
ACTOR="actor_rollout_ref.actor.clip_ratio_low=$low \\
  actor_rollout_ref.actor.clip_ratio_high=0.3"
ray job submit --working-dir . -- python3 -m recipe.dapo.main_dapo \\
    data.train_files="$FILES" data.train_batch_size=32 data.gen_batch_size=96 \\
    actor_rollout_ref.model.path=/models/base actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 algorithm.adv_estimator=grpo \\
    actor_rollout_ref.actor.loss_agg_mode=${mode} $ACTOR \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 4)) \\
    algorithm.filter_groups.enable=True trainer.total_training_steps=200
"""
VERL_YAML = """\
defaults:
  - _self_
data: {train_files: rows.parquet, train_batch_size: 8}
actor_rollout_ref:
  model: {path: /models/base}
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
    optim: {lr: 2e-6, lr_warmup_steps: 5}
  rollout: {n: 4, temperature: 0.9}
algorithm: {adv_estimator: rloo}
"""
VERL_PPO = """\
python -m verl.trainer.main_ppo data.train_files=x.jsonl data.train_batch_size=16 \\
  actor_rollout_ref.model.path=/m actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
  critic.optim.lr=2e-5 algorithm.lam=0.9 algorithm.use_kl_in_reward=True
"""
SLIME = """\
source scripts/models/some.sh
CKPT_ARGS=(
   --hf-checkpoint /root/Base
   # --load /root/other
   --save-interval 10
)
ROLLOUT=(
   --prompt-data /root/p.jsonl
   --input-key prompt --label-key label
   --rm-type deepscaler
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --global-batch-size 128
)
GRPO=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28)
ray job submit -- python3 train.py --colocate --tensor-model-parallel-size 2 \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT[@]} ${GRPO[@]} --lr 1e-6 --lr-decay-style constant
"""
SLIME_GSPO = """\
python3 train_async.py --hf-checkpoint /m --prompt-data a.jsonl@[0:100] --rollout-batch-size 4 \\
  --n-samples-per-prompt 4 --global-batch-size 16 --advantage-estimator gspo --eps-clip 4e-4 \\
  --dynamic-sampling-filter-path slime.check_reward_nonzero_std --over-sampling-batch-size 8 \\
  --eval-prompt-data one a.parquet two b.parquet --eval-interval 5 --num-layers 36 --use-tis
"""
SLIME_SFT = """\
python3 train_async.py --hf-checkpoint /m --prompt-data chats.parquet --rollout-batch-size 128 \\
  --global-batch-size 128 --loss-type sft_loss --num-epoch 3 --lr 1e-5 --lr-decay-style cosine
"""
MILES = """\
# Miles
python3 train.py --hf-checkpoint /m --prompt-data a.jsonl --rollout-batch-size 8 --lora-rank 32 \\
  --n-samples-per-prompt 8 --use-miles-router --rm-type remote_rm \\
  --rm-url http://127.0.0.1:9/score \\
  --calculate-per-token-loss --fp8-recipe blockwise --max-weight-staleness 2
"""
MILES_RF = """\
MILES_ARGS="--hf-checkpoint /m --rollout-batch-size 8 --n-samples-per-prompt 2"
python3 train.py $MILES_ARGS --prompt-data a.jsonl --kl-coef 0.01 \\
  --advantage-estimator reinforce_plus_plus --normalize-advantages --kl-loss-type k2
"""
TRL_PY = """\
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset
NAME = "Qwen/Qwen3-0.6B"
rows = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(learning_rate=5e-6, per_device_train_batch_size=8, num_generations=4,
                  gradient_accumulation_steps=2, beta=0.04, loss_type="dr_grpo",
                  scale_rewards=False, max_completion_length=512)
GRPOTrainer(model=NAME, reward_funcs=score, args=args, train_dataset=rows)
"""
TRL_YAML = """\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: org/prompts
dataset_train_split: train
learning_rate: 1.0e-5
lr_scheduler_type: cosine
num_generations: 8
per_device_train_batch_size: 8
epsilon_high: 0.28
mask_truncated_completions: true
use_peft: true
lora_r: 16
max_steps: 50
save_strategy: steps
save_steps: 25
"""
TRL_DPO = """\
trl dpo --model_name_or_path /m --dataset_name org/pairs --beta 0.05 --learning_rate 5e-7 \\
  --per_device_train_batch_size 4 --num_train_epochs 2
"""
PRIME = """\
max_steps = 100

[model]
name = "Qwen/Qwen3-1.7B"

[orchestrator]
batch_size = 512
group_size = 16

[orchestrator.train.sampling]
max_completion_tokens = 256

[[orchestrator.train.source]]
name = "sort"

[orchestrator.train.source.env.taskset]
id = "alphabet-sort"

[trainer.optim]
lr = 3e-6
"""
PRIME_OLD = """\
max_steps = 20
[model]
name = "org/model"
[orchestrator]
batch_size = 128
rollouts_per_example = 8
[[orchestrator.env]]
id = "org/env"
[trainer.scheduler]
type = "cosine"
warmup_steps = 4
[ckpt]
interval = 10
"""
PRIME_SFT = """\
max_steps = 30
[model]
name = "org/base"
[data]
batch_size = 32
seq_len = 2048
[[data.source]]
dataset = "org/chats"
[optim]
lr = 2e-5
"""
ROLL = """\
defaults:
  - ../config/zero@_here_
exp_name: try
pretrain: /models/base
max_steps: 200
rollout_batch_size: 64
num_return_sequences_in_group: 8
response_length: 2048
adv_estimator: grpo
use_kl_loss: true
kl_loss_coef: 0.01
dual_clip_loss: true
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1,
                  gradient_accumulation_steps: 64}
  data_args:
    file_name: [a.jsonl, b.jsonl]
  strategy_args:
    strategy_config: {tensor_model_parallel_size: 2}
  device_mapping: list(range(0,4))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.9}
rewards:
  math_rule: {worker_cls: roll.rewards.MathRuleRewardWorker}
"""
ROLL_REINFORCE = """\
pretrain: org/base
rollout_batch_size: 32
num_return_sequences_in_group: 4
adv_estimator: reinforce
norm_mean_type: group
whiten_advantages: true
async_generation_ratio: 1
actor_train: {data_args: {file_name: a.jsonl}, training_args: {gradient_accumulation_steps: 128}}
"""
ROLL_DISTIL = """\
student_pretrain: org/small
teacher_pretrain: org/large
kd_objective: reverse_kl
distill_loss_weight: 0.85
question_key: question_zh
student:
  training_args: {learning_rate: 2.0e-5, lr_scheduler_type: constant,
                  per_device_train_batch_size: 8, gradient_accumulation_steps: 4}
  data_args: {file_name: [rows.json]}
  device_mapping: list(range(0,4))
teacher: {model_args: {dtype: bf16}}
"""
ROLL_ON_POLICY = """\
pretrain: org/small
rollout_batch_size: 32
num_return_sequences_in_group: 1
opsd_mode: true
student_train: {data_args: {file_name: a.jsonl}}
student_infer: {generating_args: {temperature: 0.9}}
teacher: {model_args: {model_name_or_path: org/large}}
"""
OPENRLHF = """\
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path org/sft --data.prompt_dataset org/prompts --data.input_key text \\
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 512 \\
   --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 --algo.kl.use_loss \\
   --algo.kl.estimator k3 --actor.eps_clip_low_high 0.2 0.27 --actor.adam.lr 5e-7 \\
   --reward.remote_url http://127.0.0.1:5000/score --ds.zero_stage 3
"""
OPENRLHF_OLD = """\
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray \\
   --pretrain org/sft --reward_pretrain org/rm --prompt_data data/p.jsonl \\
   --rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 64 \\
   --advantage_estimator reinforce_baseline --init_kl_coef 0 --generate_max_len 512 \\
   --dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9 --l2 0.01
EOF
deepspeed --module $training_commands
"""
OPENRLHF_PPO = """\
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /m --data.prompt_dataset p.jsonl \\
  --rollout.batch_size 32 --train.batch_size 32 --critic.adam.lr 5e-6 --algo.advantage.lambd 0.95
"""

CASES: dict[str, Case] = {
    "verl grpo": (
        "verl",
        {"run.sh": VERL_GRPO},
        {
            "model.path": "Qwen/Qwen3-4B",
            "data.prompts": "~/sums/train.parquet",
            "rollout.prompts_per_step": 64,
            "rollout.samples_per_prompt": 5,
            "rollout.max_response_tokens": 1024,
            "train.updates_per_step": 4,
            "train.kl_coef": 0.002,
            "train.kl_in": "loss",
            "train.kl_estimator": "low_var",
            "train.clip_high": 0.2,
            "train.dual_clip": 3.0,
            "train.optimizer.weight_decay": 0.01,
            "checkpoint.every": 0,
        },
        ("trainer.total_epochs",),
    ),
    "verl dapo": (
        "verl",
        {"run.sh": VERL_DAPO},
        {
            "data.prompts": ["data/a.parquet", "data/b.parquet"],
            "rollout.over_sampling": 3.0,
            "rollout.filter": "zero_variance",
            "rollout.shaping": "overlong",
            "rollout.overlong_buffer": 4096,
            "train.clip_low": 0.2,
            "train.clip_high": 0.3,
            "train.aggregation": "token_mean",
            "train.steps": 200,
        },
        (),
    ),
    "verl yaml": (
        "verl",
        {"ppo.yaml": VERL_YAML},
        {
            "train.advantage": "rloo",
            "rollout.temperature": 0.9,
            "train.optimizer.lr": 2e-6,
            "train.optimizer.warmup_steps": 5,
            "train.updates_per_step": 1,
        },
        (),
    ),
    "verl ppo": (
        "verl",
        {"run.sh": VERL_PPO},
        {
            "train.credit": "gae",
            "train.lam": 0.9,
            "train.critic.lr": 2e-5,
            "train.critic.clip": 0.5,
            "train.kl_in": "reward",
            "train.kl_coef": 0.001,
            "train.kl_estimator": "k1",
            "rollout.samples_per_prompt": 1,
        },
        (),
    ),
    "slime grpo": (
        "slime",
        {"run.sh": SLIME},
        {
            "model.path": "/root/Base",
            "data.prompts": "/root/p.jsonl",
            "rollout.reward": "math",
            "train.steps": 300,
            "train.updates_per_step": 2,
            "train.aggregation": "sequence_mean",
            "train.clip_high": 0.28,
            "train.kl_coef": 0.001,
            "train.optimizer.schedule": "constant",
            "train.optimizer.weight_decay": 0.01,
            "train.optimizer.beta2": 0.999,
            "checkpoint.every": 10,
        },
        (),
    ),
    "slime gspo": (
        "slime",
        {"run.sh": SLIME_GSPO},
        {
            "data.prompts": "a.jsonl[0:100]",
            "data.eval": ["a.parquet", "b.parquet"],
            "train.ratio": "sequence",
            "train.clip_low": 0.0004,
            "rollout.filter": "zero_variance",
            "rollout.over_sampling": 2.0,
            "train.correction.kind": "importance",
            "eval.every": 5,
        },
        ("num_layers",),
    ),
    "slime sft": (
        "slime",
        {"run.sh": SLIME_SFT},
        {
            "train.objective": "supervised",
            "data.train": "chats.parquet",
            "train.batch_size": 128,
            "train.epochs": 3,
            "train.optimizer.schedule": "cosine",
        },
        (),
    ),
    "miles": (
        "miles",
        {"run.sh": MILES},
        {
            "train.lora.rank": 32,
            "rollout.reward": "remote",
            "rollout.remote_reward.url": "http://127.0.0.1:9/score",
            "train.aggregation": "token_mean",
            "train.precision": "fp8_block",
            "rollout.max_staleness": 2,
        },
        ("use_miles_router",),
    ),
    "miles python": (
        "miles",
        {"run_base.py": MILES_PYTHON},
        {
            "model.path": "/models/Base-1B",
            "rollout.prompts_per_step": 16,
            "rollout.samples_per_prompt": 8,
            "train.updates_per_step": 2,
            "rollout.filter": "zero_variance",
            "train.optimizer.lr": 2e-6,
        },
        ("save",),
    ),
    "miles reinforce++": (
        "miles",
        {"run.sh": MILES_RF},
        {
            "train.credit": "to_go",
            "train.whiten": True,
            "train.kl_in": "reward",
            "train.kl_coef": 0.01,
            "train.kl_estimator": "k2",
        },
        (),
    ),
    "trl python": (
        "trl",
        {"train.py": TRL_PY},
        {
            "model.path": "Qwen/Qwen3-0.6B",
            "data.prompts": "hf:openai/gsm8k:main:train",
            "rollout.prompts_per_step": 4,
            "train.kl_coef": 0.04,
            "train.normalize_std": "none",
            "train.aggregation": "constant",
            "train.optimizer.schedule": "linear",
        },
        ("reward_funcs",),
    ),
    "trl yaml": (
        "trl",
        {"grpo.yaml": TRL_YAML},
        {
            "data.prompts": "hf:org/prompts:train",
            "train.lora.rank": 16,
            "train.clip_low": 0.2,
            "train.clip_high": 0.28,
            "rollout.sample_filter": "truncated",
            "train.optimizer.schedule": "cosine",
            "train.steps": 50,
            "checkpoint.every": 25,
        },
        (),
    ),
    "trl dpo": (
        "trl",
        {"dpo.sh": TRL_DPO},
        {
            "train.objective": "preference",
            "train.preference.beta": 0.05,
            "data.train": "hf:org/pairs",
            "train.batch_size": 4,
            "train.epochs": 2,
        },
        (),
    ),
    "prime-rl": (
        "prime-rl",
        {"rl.toml": PRIME},
        {
            "model.path": "Qwen/Qwen3-1.7B",
            "rollout.prompts_per_step": 32,
            "rollout.samples_per_prompt": 16,
            "rollout.max_turn_tokens": 256,
            "rollout.max_response_tokens": 1024,
            "rollout.agent": "verifiers",
            "rollout.verifiers.environment": "alphabet-sort",
            "rollout.max_staleness": 8,
            "train.normalize_std": "none",
            "train.steps": 100,
            "train.optimizer.lr": 3e-6,
        },
        (),
    ),
    "prime-rl of before": (
        "prime-rl",
        {"rl.toml": PRIME_OLD},
        {
            "rollout.prompts_per_step": 16,
            "rollout.verifiers.environment": "org/env",
            "train.optimizer.schedule": "cosine",
            "train.optimizer.warmup_steps": 4,
            "checkpoint.every": 10,
        },
        (),
    ),
    "prime-rl sft": (
        "prime-rl",
        {"sft.toml": PRIME_SFT},
        {
            "train.objective": "supervised",
            "data.train": "hf:org/chats",
            "train.batch_size": 32,
            "train.optimizer.lr": 2e-5,
        },
        (),
    ),
    "roll": (
        "roll",
        {"rlvr.yaml": ROLL},
        {
            "data.prompts": ["a.jsonl", "b.jsonl"],
            "rollout.max_response_tokens": 2048,
            "rollout.temperature": 0.9,
            "train.updates_per_step": 4,
            "train.kl_coef": 0.01,
            "train.dual_clip": 1.4,
            "train.aggregation": "sequence_mean",
            "train.optimizer.schedule": "linear",
            "run.seed": 42,
        },
        ("rewards.math_rule.worker_cls",),
    ),
    "roll reinforce": (
        "roll",
        {"rlvr.yaml": ROLL_REINFORCE},
        {
            "train.advantage": "grpo",
            "train.normalize_std": "none",
            "train.whiten": True,
            "rollout.max_staleness": 1,
            "train.updates_per_step": 1,
            "train.steps": 500,
        },
        (),
    ),
    "roll distil": (
        "roll",
        {"distil.yaml": ROLL_DISTIL},
        {
            "model.path": "org/small",
            "data.train": "rows.json",
            "train.objective": "distillation",
            "train.batch_size": 128,
            "train.distill.kl": "reverse",
            "train.distill.top_k": 64,
            "train.distill.teachers": [Teacher(path="org/large")],
            "train.optimizer.schedule": "constant",
        },
        ("distill_loss_weight", "question_key"),
    ),
    "roll on policy": (
        "roll",
        {"opd.yaml": ROLL_ON_POLICY},
        {
            "data.prompts": "a.jsonl",
            "rollout.reward": "none",
            "rollout.temperature": 0.9,
            "train.objective": "policy",
            "train.distill.kl": "sampled",
            "train.distill.reward_weight": 0.0,
            "train.distill.teachers": [Teacher(path="org/large")],
            "train.credit": "sample",
        },
        ("opsd_mode",),
    ),
    "openrlhf": (
        "openrlhf",
        {"run.sh": OPENRLHF},
        {
            "data.prompts": "hf:org/prompts",
            "data.prompt_key": "text",
            "train.updates_per_step": 2,
            "train.kl_in": "loss",
            "train.kl_estimator": "low_var",
            "train.clip_high": 0.27,
            "rollout.reward": "remote",
            "train.optimizer.schedule": "cosine",
            "train.optimizer.min_lr": 5e-8,
            "train.optimizer.beta2": 0.95,
        },
        ("ds.zero_stage",),
    ),
    "openrlhf of before": (
        "openrlhf",
        {"run.sh": OPENRLHF_OLD},
        {
            "rollout.reward": "reward_model",
            "rollout.reward_model.path": "org/rm",
            "train.advantage": "grpo",
            "train.normalize_std": "none",
            "train.whiten": True,
            "rollout.filter": "pass_rate",
            "rollout.pass_rate_high": 0.899999,
            "train.updates_per_step": 4,
            "train.optimizer.weight_decay": 0.01,
        },
        (),
    ),
    "openrlhf ppo": (
        "openrlhf",
        {"run.sh": OPENRLHF_PPO},
        {
            "train.credit": "gae",
            "train.lam": 0.95,
            "train.critic.lr": 5e-6,
            "train.kl_in": "reward",
            "train.kl_coef": 0.01,
        },
        (),
    ),
}
