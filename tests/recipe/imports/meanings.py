"""Configurations whose words mean something else there than they seem to, written for these tests:
name -> (file, text, keys and values that the recipe must have)."""

from __future__ import annotations

from typing import Any

Meaning = tuple[str, str, dict[str, Any]]
_VERL = "python -m verl.trainer.main_ppo data.train_files=a.jsonl actor_rollout_ref.model.path=/m "
_VERL += "data.train_batch_size=64 actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo "
_ACTOR, _FIX = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_SLIME = "python train.py --hf-checkpoint /m --prompt-data a.jsonl --rollout-batch-size 16 "
_SLIME += "--n-samples-per-prompt 4 --global-batch-size 32 --num-rollout 100 "
_PRIME = (
    '[orchestrator]\nbatch_size = 32\ngroup_size = 4\n[[orchestrator.train.source]]\nname="x"\n'
)
_PRIME += '[orchestrator.train.source.env.taskset]\nid = "t"\n'
_ROLL = "pretrain: /m\nrollout_batch_size: 8\nnum_return_sequences_in_group: 4\n"
_ROLL += "actor_train: {data_args: {file_name: a.jsonl}}\n"
_RLHF = "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /m "
_RLHF += "--data.prompt_dataset a.jsonl --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 "
_RLHF += "--train.batch_size 128 --algo.advantage.estimator "
_BRANCHES = """\
backend=fsdp
ROOT=${ROOT:-$PWD}
ENTRY=${ENTRY:-"-m verl.trainer.sft_trainer"}
if [ "$backend" = "megatron" ]; then
    OPTIM="optim.lr=1e-3"
elif [[ -z $CLUSTER ]]; then
    OPTIM="optim.lr=2e-5"
else
    OPTIM="optim.lr=3e-5"
fi
torchrun $ENTRY data.train_files=$ROOT/a.parquet model.path=/m $OPTIM data.train_batch_size=96
"""
_QUOTED = """\
srun bash -c \\
"pip install x \\
&& ray job submit -- python3 -m openrlhf.cli.train_rm \\
    --model.model_name_or_path /m --data.dataset rows.jsonl"
"""
_JOB = """\
resources: {accelerators: "H100:8"}
run: |
  python -m verl.trainer.main_ppo \\
    data.train_files=a.jsonl actor_rollout_ref.model.path=/m data.train_batch_size=512
"""
_USAGE = '''"""
accelerate launch --config_file x.yaml sft_it.py \\
    --model_name_or_path org/base --dataset_name org/chats --use_peft

python sft_it.py --model_name_or_path org/other
"""
SFTTrainer(model=model_args.model_name_or_path, args=training_args)
'''
_PARSED = """\
parser.add_argument("--dataset-id", default="org/prompts")
parser.add_argument("--num-generations", type=int, default=4)
model_id, out = "org/base", "runs"
rows = load_dataset(args.dataset_id)
config = GRPOConfig(num_generations=args.num_generations, gradient_accumulation_steps=2,
                    steps_per_generation=4, max_steps=100, warmup_ratio=0.1, save_steps=20,
                    per_device_train_batch_size=4, loss_type="cispo", epsilon_high=5.0)
GRPOTrainer(model=AutoModel.from_pretrained(model_id), args=config, reward_funcs=[f])
"""
_NOTEBOOK = """{"cells": [
 {"cell_type": "markdown", "source": ["# DPO"]},
 {"cell_type": "code", "source": ["!pip install trl\\n", "name = 'org/m'"]},
 {"cell_type": "code", "source": ["this is no Python"]},
 {"cell_type": "code", "source": ["DPOTrainer(model=name, args=DPOConfig(beta=0.2,\\n",
  " loss_type=['ipo']), peft_config=LoraConfig(r=4))"]}]}"""

_DECIDES = r"""
SIZE=${1:-4B}
while [ $# -gt 0 ]; do case "$1" in --size) SIZE="$2"; shift 2 ;; *) echo no; exit 1 ;; esac; done
[ $# -ge 1 ] && SIZE=1B
case "$SIZE" in
  1B | 2B) BATCH=8 ;;
  4B) BATCH=64
      ;;
  *) BATCH=1; exit 1 ;;
esac
[ -z "$LR" ] && LR=2e-6 || LR=9e-6
[[ $SIZE == 7* ]] && LR=8e-6
if [ "$BATCH" -gt 8 ] && [ "$SIZE" = 7B ]; then N=2
elif [ ! "$SIZE" = 4B ] || test "$BATCH" -eq 64; then N=16
else N=4
fi
ARGS=(--prompt-data a.jsonl)
[ "$N" = 4 ] && ARGS+=(--seed 7)
ARGS+=(--n-samples-per-prompt $N)
for steps in 300 400; do
train() {
  python train.py --hf-checkpoint /m --rollout-batch-size $BATCH ${ARGS[@]} --lr $LR \
    --num-rollout $steps "$@"
}
train --rollout-max-response-len 77
done
"""
_WRITES = """
cat > rl.toml <<'EOF'
max_steps = 20
[orchestrator]
batch_size = 64
group_size = 16
EOF
uv run rl @ rl.toml --trainer.optim.lr 2e-6 --model.name M
"""
_PLACES = """
import os
MODEL = os.environ.get("MODEL", "Q/q")
MORE = dict(num_generations=4, max_completion_length=2 * 128)
def args(lr=3e-6, steps: int = 7):
    return GRPOConfig(learning_rate=lr, max_steps=steps, per_device_train_batch_size=8, **MORE)
model, tokenizer = Fast.from_pretrained(model_name=MODEL)
model = Fast.get_peft_model(model, r=8)
GRPOTrainer(model, score, args=args(), train_dataset=load_dataset("a/b"))
"""
MEANINGS: dict[str, Meaning] = {
    "verl: clip_ratio alone changes nothing": (
        "run.sh",
        f"{_VERL} {_ACTOR}.clip_ratio=0.1",
        {"train.clip_low": 0.2, "train.clip_high": 0.2, "train.dual_clip": 3.0},
    ),
    "verl: gspo has its own mean and one bound": (
        "run.sh",
        f"{_VERL} {_ACTOR}.policy_loss.loss_mode=gspo {_ACTOR}.loss_agg_mode=token-mean",
        {
            "train.ratio": "sequence_token",
            "train.aggregation": "sequence_mean",
            "train.dual_clip": None,
        },
    ),
    "verl: rejection by the mean of log ratios, a share of warm-up": (
        "run.sh",
        f"{_VERL} {_FIX}.rollout_rs=seq_mean_k1 {_FIX}.rollout_rs_threshold=0.5_4.0 "
        f"{_ACTOR}.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=50",
        {
            "train.correction.reject_level": "geometric",
            "train.correction.reject_low": 0.5,
            "train.correction.reject_high": 4.0,
            "train.correction.mode": "none",
            "train.optimizer.warmup_steps": 5,
        },
    ),
    "verl: one step off-policy": (
        "run.sh",
        _VERL.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo"),
        {"rollout.max_staleness": 1, "train.old_logprobs": "trainer"},
    ),
    "verl: fully asynchronous": (
        "run.sh",
        f"{_VERL} data.gen_batch_size=1 {_ACTOR}.ppo_mini_batch_size=32 "
        "async_training.require_batches=2 async_training.trigger_parameter_sync_step=4 "
        "async_training.staleness_threshold=0.5 rollout.total_rollout_steps=2560",
        {
            "rollout.prompts_per_step": 256,
            "train.updates_per_step": 8,
            "rollout.max_staleness": 1,
            "rollout.over_sampling": 1.0,
            "train.steps": 10,
        },
    ),
    "verl: a branch of the script, and SFT's defaults": (
        "run.sh",
        _BRANCHES,
        {
            "train.objective": "supervised",
            "data.train": "a.parquet",
            "train.optimizer.lr": 2e-5,
            "train.optimizer.schedule": "constant",
            "data.max_row_tokens": 1024,
            "train.epochs": 4,
        },
    ),
    "verl: overrides behind a flag": (
        "run.sh",
        _VERL.replace("main_ppo ", "main_ppo --config-name ppo_trainer.yaml "),
        {"rollout.prompts_per_step": 64, "rollout.samples_per_prompt": 8},
    ),
    "verl: a script within a job": ("job.yaml", _JOB, {"rollout.prompts_per_step": 512}),
    "slime: rollout ahead, updates, and texts": (
        "run.sh",
        _SLIME.replace("train.py", "train_async.py") + "--lr-warmup-fraction 0.1 --use-tis "
        "--tis-clip-low 0.5 --eval-interval 5 --eval-prompt-data x b.jsonl --use-opsm",
        {
            "rollout.max_staleness": 1,
            "train.old_logprobs": "trainer",
            "data.chat_template": "none",
            "train.correction.mode": "clip",
            "train.correction.low": 0.5,
            "train.optimizer.warmup_steps": 10,
            "train.off_policy_mask": 1e-4,
            "eval.temperature": 1.0,
        },
    ),
    "prime-rl: muon, RAE, its environment and staleness": (
        "rl.toml",
        _PRIME + "[orchestrator.train.source.env.taskset.task]\nhard = true\n[trainer.optim]\n"
        'type = "muon"\nmu = 0.9\n[orchestrator.algo]\ntype = "rae"\ndecay = 0.9\n'
        '[trainer.scheduler]\ntype = "cosine"\n',
        {
            "train.optimizer.rule": "muon",
            "train.optimizer.muon_momentum": 0.9,
            "train.optimizer.beta2": 0.95,
            "train.optimizer.warmup_steps": 10,
            "train.advantage": "rae",
            "train.baseline_decay": 0.9,
            "train.old_logprobs": "engine",
            "rollout.verifiers.arguments": {"task": {"hard": True}},
            "rollout.max_staleness": 8,
            "rollout.stale_groups": "drop",
            "rollout.max_response_tokens": 1024,
            "data.eval": None,
        },
    ),
    "prime-rl: the defaults of rows and adapters": (
        "sft.toml",
        'max_steps = 9\n[model]\nname = "m"\n[model.lora]\nrank = 8\n[data]\nname = "a/b"\n'
        'splits = ["train"]\n',
        {
            "train.objective": "supervised",
            "data.train": "hf:a/b:train",
            "train.batch_size": 128,
            "data.max_row_tokens": 128,
            "train.lora.alpha": 32.0,
        },
    ),
    "ROLL: its dual clip, its KL, and sums of penalties": (
        "a.yaml",
        _ROLL + "adv_estimator: reinforce\nnorm_mean_type: group\nadd_token_level_kl: true\n"
        "dual_clip_loss: true\npg_clip: 0.1\nresponse_length: 256\n"
        "actor_infer: {generating_args: {top_p: 1.0, top_k: -1}}\n",
        {
            "train.dual_clip": 1.2,
            "train.credit": "to_go",
            "train.normalize_std": "none",
            "train.kl_in": "reward",
            "train.kl_estimator": "k1",
            "rollout.temperature": 0.95,
        },
    ),
    "ROLL: an off-policy loss, and weights": (
        "a.yaml",
        _ROLL + "adv_estimator: grpo\nsequence_length: 3072\nuse_kl_loss: true\nkl_loss_coef: 0.1\n"
        "pg_variant: tis\ntrain_infer_correction: {is_weight: {enabled: true, upper_bound: 1.5}}\n",
        {
            "train.surrogate": "cispo",
            "train.clip_low": 1.0,
            "train.clip_high": 0.0,
            "train.kl_estimator": "low_var",
            "train.correction.high": 1.5,
            "rollout.max_response_tokens": 2048,
        },
    ),
    "ROLL: pairs": (
        "a.yaml",
        "pretrain: /m\nbeta: 0.2\nipo: true\nsequence_length: 512\nactor_train:\n"
        "  data_args: {file_name: a.json}\n  device_mapping: list(range(0,4))\n"
        "  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 8,\n"
        "    adam_beta1: 0.8, adam_epsilon: 1.0e-6}\n",
        {
            "train.optimizer.beta1": 0.8,
            "train.optimizer.eps": 1e-6,
            "train.objective": "preference",
            "train.preference.loss": "ipo",
            "train.preference.beta": 0.2,
            "train.batch_size": 64,
            "data.max_row_tokens": 512,
        },
    ),
    "slime: code of its own makes the texts": (
        "run.sh",
        _SLIME + "--custom-generate-function-path generate.generate",
        {"data.chat_template": "auto"},
    ),
    "slime: what the script decides, and the first of a loop": (
        "run.sh",
        _DECIDES,
        {
            "rollout.prompts_per_step": 64,
            "rollout.samples_per_prompt": 16,
            "train.optimizer.lr": 2e-6,
            "train.steps": 300,
            "rollout.max_response_tokens": 77,
        },
    ),
    "prime-rl: a script that writes its configuration": (
        "run.sh",
        _WRITES,
        {
            "model.path": "M",
            "rollout.prompts_per_step": 4,
            "train.steps": 20,
            "train.optimizer.lr": 2e-6,
        },
    ),
    "TRL: arguments by position, of a mapping, and of parameters": (
        "run.py",
        _PLACES,
        {
            "model.path": "Q/q",
            "train.lora.rank": 8,
            "data.prompts": "hf:a/b",
            "rollout.samples_per_prompt": 4,
            "rollout.max_response_tokens": 256,
            "train.optimizer.lr": 3e-6,
            "train.steps": 7,
        },
    ),
    "OpenRLHF: groups strictly within bounds, and the KL of the tokens behind": (
        "run.sh",
        _RLHF + "rloo --algo.dynamic_filtering_enable --algo.advantage.is_correction_enable "
        "--algo.advantage.is_correction_type seq-mask-tis --train.async_enable",
        {
            "rollout.pass_rate_low": 1e-6,
            "rollout.pass_rate_high": 0.999999,
            "train.credit": "to_go",
            "train.whiten": False,
            "train.correction.reject_level": "geometric",
            "train.correction.level": "token",
            "train.old_logprobs": "trainer",
            "data.chat_template": "none",
        },
    ),
    "OpenRLHF: a reward model's defaults, in a script within a script": (
        "run.sh",
        _QUOTED,
        {
            "train.objective": "reward_model",
            "train.optimizer.lr": 9e-6,
            "data.max_row_tokens": 512,
            "data.train": "rows.jsonl",
        },
    ),
    "OpenRLHF: a teacher of rows": (
        "run.sh",
        "python -m openrlhf.cli.train_kd --pretrain /m --teacher_model /t --dataset rows.jsonl",
        {
            "train.objective": "distillation",
            "train.distill.kl": "forward",
            "data.train": "rows.jsonl",
        },
    ),
    "prime-rl: a file for the trainer's side alone, as before": (
        "orch.toml",
        "batch_size = 64\nrollouts_per_example = 8\nasync_level = 2\nmax_steps = 5\n"
        '[environment]\nid = "t"\nargs = {hard = true}\n[model]\nname = "m"\n',
        {
            "rollout.prompts_per_step": 8,
            "rollout.max_staleness": 2,
            "rollout.verifiers.environment": "t",
            "rollout.verifiers.arguments": {"hard": True},
        },
    ),
    "TRL: the usage of a script that parses its options": (
        "sft_it.py",
        _USAGE,
        {
            "train.objective": "supervised",
            "model.path": "org/base",
            "train.optimizer.lr": 2e-5,
            "train.lora.rank": 16,
            "train.lora.targets": ["q_proj", "v_proj"],
        },
    ),
    "TRL: updates are no steps, and CISPO's bound is the ratio's": (
        "train.py",
        _PARSED,
        {
            "model.path": "org/base",
            "data.prompts": "hf:org/prompts",
            "rollout.samples_per_prompt": 4,
            "train.updates_per_step": 2,
            "train.steps": 50,
            "train.optimizer.warmup_steps": 5,
            "checkpoint.every": 10,
            "train.clip_low": 1.0,
            "train.clip_high": 4.0,
        },
    ),
    "TRL: what is on by default with a KL term, a reference that moves and a target entropy": (
        "train.py",
        "GRPOTrainer(model='/m', reward_funcs=[f], args=GRPOConfig(beta=0.04, max_steps=9, "
        "sync_ref_model=True, use_adaptive_entropy=True))",
        {
            "train.kl_unbiased": True,
            "train.reference_every": 512,
            "train.entropy_target": 0.2,
            "train.entropy_delta": 0.005,
            "train.entropy_max": 1.0,
        },
    ),
    "TRL: without a KL term nothing of it is set": (
        "train.py",
        "GRPOTrainer(model='/m', reward_funcs=[f], args=GRPOConfig(max_steps=9))",
        {"train.kl_coef": 0.0, "train.kl_unbiased": False, "train.reference_every": 0},
    ),
    "OpenRLHF: a correction by level and mode, one bound, and a mean of sequences": (
        "run.sh",
        f"{_RLHF} group_norm --algo.advantage.is_correction_level token "
        "--algo.advantage.is_correction_mode clip --algo.advantage.is_correction_threshold 3.0 "
        "--actor.loss_agg_mode seq-mean-token-mean --algo.kl.use_loss "
        "--algo.kl.unbiased_gradient",
        {
            "train.correction.kind": "importance",
            "train.correction.level": "token",
            "train.correction.mode": "clip",
            "train.correction.low": 0.0,
            "train.correction.high": 3.0,
            "train.aggregation": "sequence_mean",
            "train.kl_unbiased": True,
        },
    ),
    "OpenRLHF: a mask by the mean ratio of a sequence": (
        "run.sh",
        f"{_RLHF} group_norm --algo.advantage.is_correction_level seq",
        {
            "train.correction.reject_level": "geometric",
            "train.correction.reject_low": 0.5,
            "train.correction.reject_high": 5.0,
        },
    ),
    "Miles: the scale of an adapter whose alpha is not said": (
        "run.sh",
        f"{_SLIME} --lora-rank 32 --rm-type math",
        {"train.lora.rank": 32, "train.lora.alpha": 16},
    ),
    "ROLL: a critic that is not clipped, and the rank of an adapter": (
        "a.yaml",
        f"{_ROLL}adv_estimator: gae\nlora_target: q_proj,v_proj\n",
        {"train.critic.clip": None, "train.lora.rank": 8},
    ),
    "ROLL: a critic that is clipped": (
        "a.yaml",
        f"{_ROLL}adv_estimator: gae\nvalue_clip: 0.5\n",
        {"train.critic.clip": 0.5},
    ),
    "a variable that is added to, and std of the vectorized estimator": (
        "run.sh",
        'ARGS="algorithm.adv_estimator=grpo_vectorized actor_rollout_ref.rollout.n=16"\n'
        'ARGS+=" algorithm.norm_adv_by_std_in_grpo=False"\n'
        "python3 -m verl.trainer.main_ppo $ARGS data.train_files=a.jsonl "
        "actor_rollout_ref.model.path=/m",
        {
            "train.advantage": "grpo",
            "rollout.samples_per_prompt": 16,
            "train.normalize_std": "none",
        },
    ),
    "verl: two bounds of the weights mask, and Megatron's adapter has another alpha": (
        "run.sh",
        f"{_VERL} {_FIX}.rollout_is=token {_FIX}.rollout_is_threshold=0.5_5.0 "
        "actor_rollout_ref.model.lora.rank=64",
        {
            "train.correction.mode": "mask",
            "train.correction.low": 0.5,
            "train.correction.high": 5.0,
            "train.lora.alpha": 32,
        },
    ),
    "verl: longer rows end its SFT": (
        "run.sh",
        "torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=/m",
        {"data.long_rows": "error"},
    ),
    "TRL: asynchronous GRPO has defaults of its own": (
        "train.py",
        "AsyncGRPOTrainer(model='/m', reward_funcs=[f], args=AsyncGRPOConfig(max_steps=9))",
        {
            "train.old_logprobs": "engine",
            "rollout.max_response_tokens": 2048,
            "train.optimizer.schedule": "constant",
        },
    ),
    "TRL: processes of the launcher, half an epoch, an adapter's kind, rows that are cut": (
        "run.sh",
        "accelerate launch --num_processes 8 trl/scripts/dpo.py --model_name_or_path /m "
        "--dataset_name a/b --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
        "--num_train_epochs 0.5 --use_peft --use_rslora",
        {
            "train.batch_size": 64,
            "train.epochs": 0.5,
            "train.lora.type": "rslora",
            "data.long_rows": "truncate",
        },
    ),
    "TRL: rows of any length, and the end of a schedule": (
        "a.yaml",
        "trainer: sft\nmodel_name_or_path: /m\ndataset_name: a/b\nmax_length: null\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 2.0e-6}\n",
        {"data.long_rows": "error", "train.optimizer.min_lr": 2e-6},
    ),
    "ROLL: updates of a step by the defaults of a batch": (
        "a.yaml",
        _ROLL,
        {"train.updates_per_step": 4},
    ),
    "slime: rows in order unless it shuffles": (
        "run.sh",
        f"{_SLIME} --rm-type math",
        {"data.shuffle": False},
    ),
    "TRL: a loss of pairs beside that of SFT": (
        "train.py",
        "DPOTrainer(model='/m', train_dataset=load_dataset('a/b'), args=DPOConfig(max_steps=9, "
        "loss_type=['ipo', 'sft'], loss_weights=[1.0, 0.2]))",
        {"train.preference.loss": "ipo", "train.preference.sft_weight": 0.2},
    ),
    "verl: several rewards, and a KL term with the gradient of k2": (
        "run.sh",
        _VERL.replace("=grpo", "=gdpo")
        + f"{_ACTOR}.use_kl_loss=true {_ACTOR}.kl_loss_type=low_var_kl+ "
        "'+algorithm.gdpo_reward_keys=[format]' '+algorithm.gdpo_reward_weights=[0.3]'",
        {"train.advantage": "gdpo", "train.kl_estimator": "k2"},
    ),
    "TRL: a notebook": (
        "a.ipynb",
        _NOTEBOOK,
        {
            "model.path": "org/m",
            "train.preference.loss": "ipo",
            "train.preference.beta": 0.2,
            "train.optimizer.lr": 1e-6,
            "train.lora.alpha": 8,
        },
    ),
}
