"""Implements the functions that the table of ROLL (templates/imports/roll.yaml) calls."""

from __future__ import annotations

import math
import re
from typing import Any

from milescli.recipe.imports.reading import ForeignConfig
from milescli.recipe.imports.tables import NOTE, WARNS, RowResult, path_of, share, updates

ARGS = "actor_train.training_args"
WEIGHT = "train_infer_correction.is_weight"
ACCUMULATION = "gradient_accumulation_steps"
CONFIG = "actor_train.strategy_args.strategy_config"
TEACHER = "teacher.model_args.model_name_or_path"
OF_STEPS = {
    "step_reinforce": "takes each step of an episode as a sample, with its return, and normalises "
    "those: here, rewards of turns are summed over the tokens behind",
    "agentic_reinforce": "counts gamma by turns: here, train.gamma counts tokens",
}


def fits(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as ROLL's; empty if it was not."""
    begins = ("actor_train.", "actor_infer.", "sft_train.", "student")
    name = next((one for one in found.settings if one.startswith(begins)), None)
    has_model = {"pretrain", "student_pretrain"} & {*found.settings}
    return f"it sets {name}" if name and has_model else ""


def trains_rows(found: ForeignConfig) -> RowResult:
    """Return the recipe keys of a run without rollout; empty for RL."""
    if distils_rows(found):
        return {"train.objective": "distillation"}
    if any(name.startswith("sft_train.") for name in found.settings):
        return {"train.objective": "supervised"}
    of_pairs, of_rl = {"beta", "chosen_key", "ipo"}, {"rollout_batch_size", "rewards"}
    names = {name.partition(".")[0] for name in found.settings}
    return {"train.objective": "preference"} if of_pairs & names and not of_rl & names else {}


def is_preference(found: ForeignConfig) -> bool:
    """Return True if the run trains on pairs."""
    return found.objective == "preference"


def is_gigpo(found: ForeignConfig) -> bool:
    """Return True if the estimator is GiGPO, which gives turns their own advantages."""
    return found.value("adv_estimator") == "gigpo"


def has_validation(found: ForeignConfig) -> bool:
    """Return True if the run has an evaluation."""
    return any(name.startswith("validation.") for name in found.settings)


def distils_rows(found: ForeignConfig) -> bool:
    """Return True if a student is distilled on rows; distillation on its own samples is RL."""
    return "teacher_pretrain" in found.settings


def teacher(value: Any, found: ForeignConfig) -> RowResult:
    """Map the teacher's path; in RL the teacher replaces the reward."""
    settings = {"train.distill.teachers": [{"path": path_of(str(value))}]}
    return settings if distils_rows(found) else {**settings, "rollout.reward": "none"}


def of_teacher_alone(value: Any, found: ForeignConfig) -> RowResult:
    """Map the weight of the teacher's loss beside the loss on the rows."""
    return {} if value == 1 else "adds the loss of the rows: here the teacher alone teaches"


def at_one(value: Any, found: ForeignConfig) -> RowResult:
    """Check that the temperature of the distillation loss is 1."""
    return {} if value == 1 else "changes both distributions: here the distance is at temperature 1"


def has_critic(found: ForeignConfig) -> bool:
    """Return True if a critic is trained."""
    return found.value("adv_estimator") == "gae" and TEACHER not in found.settings


def critic(value: Any, found: ForeignConfig) -> RowResult:
    """Map the critic's learning rate, and its clip, without which ROLL does not clip."""
    return {"train.critic.lr": value, "train.critic.clip": found.value("value_clip")}


def in_loss(found: ForeignConfig) -> bool:
    """Return True if the loss has a KL term."""
    return bool(found.value("use_kl_loss"))


def in_reward(found: ForeignConfig) -> bool:
    """Return True if the reward has a KL term."""
    return bool(found.value("add_token_level_kl")) and not in_loss(found)


def estimator(value: Any, found: ForeignConfig) -> RowResult:
    """Map the estimator: ROLL centres and scales rewards by norm_*_type, then sums them over the
    later tokens. With a teacher there is nothing to map: the teacher scores each token."""
    if TEACHER in found.settings:
        return {}
    if value == "gae":
        clip = found.value("value_clip")
        settings = {"train.advantage": "reinforce", "train.credit": "gae"}
        return settings if clip is not None else {**settings, "train.critic.clip": None}
    if why := OF_STEPS.get(str(value)):
        return {"train.advantage": "reinforce", "train.credit": "to_go", NOTE: f"ROLL {why}"}
    mean, std = ("group", "group") if value == "grpo" else _norms(found)
    scaled = {"train.normalize_std": std or "none"}
    if value == "gigpo":
        return {"train.advantage": "gigpo", **scaled}
    if value not in ("reinforce", "grpo"):
        return f"estimates advantages by `{value}`"
    sums = in_reward(found) or found.value("gamma", 1) != 1
    settings = {"train.credit": "to_go"} if sums else {}
    if mean == "group":
        return {"train.advantage": "grpo", **scaled, **settings}
    settings |= {"train.advantage": "reinforce"}
    if mean == "batch":
        note = "ROLL centres and scales rewards over the batch: here, train.whiten does advantages"
        return {**settings, "train.whiten": True, NOTE: note}
    return settings if std is None else f"{WARNS}`{value}` scales rewards that are not centred"


def _norms(found: ForeignConfig) -> tuple[str | None, str | None]:
    """Return over which samples rewards are centred, and over which they are scaled."""
    if not is_agentic(found):
        return found.value("norm_mean_type"), found.value("norm_std_type")
    method = found.value("reward_normalization.method", "identity")
    grouping = found.value("reward_normalization.grouping", "batch")
    level = "batch" if grouping == "batch" else "group"
    mean = level if method in ("mean", "mean_std", "asym_clip") else None
    std = level if method in ("mean_std", "asym_clip") else None
    return (
        found.value("reward_normalization.norm_mean_type", mean),
        found.value("reward_normalization.norm_std_type", std),
    )


def turn_weight(value: Any, found: ForeignConfig) -> RowResult:
    """Map the weight of a turn's advantage, relative to the episode's weight."""
    return {"train.turn_weight": value / found.value("episode_reward_weight", 1.0)}


def dual_clip(value: Any, found: ForeignConfig) -> RowResult:
    """Map ROLL's second clip, which is at 1 + 2 `pg_clip`."""
    return {"train.dual_clip": 1.0 + 2.0 * found.value("pg_clip", 0.2)} if value else {}


def loss(value: Any, found: ForeignConfig) -> RowResult:
    """Map the policy losses of ROLL's worker for off-policy samples."""
    if value == "ppo":
        return {"train.surrogate": "clip"}
    if value == "vanilla":
        return {"train.surrogate": "reinforce"}
    if value == "cispo":
        bounds = [found.value(f"cispo_epsilon_{one}", 0.1) for one in ("low", "high")]
    elif value == "tis":
        low, high = found.value("tis_lower_bound", 0.0), found.value("tis_upper_bound", 1.0)
        bounds = [1.0 - low, high - 1.0]
    else:
        why = "of the ratio of each token; train.surrogate=topr takes that of the sequence"
        return f"{WARNS}takes the loss `{value}`" + (f", {why}" if value == "topr" else "")
    return {
        "train.surrogate": "cispo",
        "train.clip_low": bounds[0],
        "train.clip_high": bounds[1],
    }


def correction(value: Any, found: ForeignConfig) -> RowResult:
    """Map the importance weights between trainer and engine."""
    level = found.value(f"{WEIGHT}.weight_type", "token")
    if not value or level == "segment":
        return f"{WARNS}weights turns by trainer and engine" if value else {}
    return {
        "train.correction.kind": "importance",
        "train.correction.level": level,
        "train.correction.mode": "truncate",
        "train.correction.high": found.value(f"{WEIGHT}.upper_bound", 1.2),
    }


def bound(value: Any, found: ForeignConfig) -> RowResult:
    """Map the bound on prompt and response together; on rows, the bound on a row."""
    if found.objective:
        return {"data.max_row_tokens": value}
    prompt = int(found.value("prompt_length", 1024))
    if is_agentic(found):
        prompt = min(prompt, int(value) // 2)
        return {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": value - prompt}
    left = int(value) - prompt
    return {"rollout.max_response_tokens": left} if left > 0 else "bounds prompt and response"


def new_tokens(value: Any, found: ForeignConfig) -> RowResult:
    """Map the bound on a turn or a response; ROLL's bound on prompt and response together has
    precedence."""
    if is_agentic(found):
        return {"rollout.max_turn_tokens": value} if isinstance(value, int) else {}
    is_bounded = {"response_length", "sequence_length"} & set(found.settings)
    return {} if is_bounded or found.objective else {"rollout.max_response_tokens": value}


def epochs(value: Any, found: ForeignConfig) -> RowResult:
    """Map the epochs where they set the run's length: SFT and distillation."""
    if _counts_epochs(found):
        return {"train.epochs": value}
    return "counts passes over the data: max_steps ends the run"


def steps(value: Any, found: ForeignConfig) -> RowResult:
    """Map the number of steps, unless epochs set the run's length."""
    return {} if _counts_epochs(found) else {"train.steps": value}


def _counts_epochs(found: ForeignConfig) -> bool:
    return found.objective in ("supervised", "distillation")


def warmup(value: Any, found: ForeignConfig) -> RowResult:
    """Map the warm-up, which ROLL counts in updates, to steps."""
    times = accumulated(found.value(f"{ARGS}.{ACCUMULATION}", 1), found)
    each = times.get("train.updates_per_step", 1) if isinstance(times, dict) else 1
    return {"train.optimizer.warmup_steps": math.ceil(value / each)}


def warmup_share(value: Any, found: ForeignConfig) -> RowResult:
    """Map the share of the steps that warm up, unless epochs set the run's length."""
    total = None if _counts_epochs(found) else found.value("max_steps")
    return share(value, total, "train.optimizer.warmup_steps")


def is_rlvr(found: ForeignConfig) -> bool:
    """Return True if each sample answers a prompt, without an environment."""
    return not found.objective and not is_agentic(found)


def is_agentic(found: ForeignConfig) -> bool:
    """Return True if agents play episodes."""
    return any(name.startswith("train_env_manager.") for name in found.settings)


def prompts(value: Any, found: ForeignConfig) -> RowResult:
    """Map the batch size, which counts prompts; for agents it counts episodes."""
    if not is_agentic(found):
        return {"rollout.prompts_per_step": value}
    size = int(found.value("train_env_manager.group_size", 1))
    return {"rollout.prompts_per_step": max(1, int(value) // size)}


def _ranks(found: ForeignConfig) -> int:
    """Return the number of the trainer's data-parallel ranks."""
    mapping = str(found.value("actor_train.device_mapping", "list(range(0,1))"))
    if match := re.fullmatch(r"list\(range\((\d+),\s*(\d+)\)\)", mapping.replace(" ", "")):
        devices = int(match[2]) - int(match[1])
    else:
        devices = len(re.findall(r"\d+", mapping)) or 1
    for name in ("tensor", "pipeline", "context"):
        size = found.value(f"{CONFIG}.{name}_{'model_' * (name != 'context')}parallel_size", 1)
        devices //= int(size)
    ulysses = int(found.value("actor_train.model_args.ulysses_size", 1))
    return max(1, devices // max(1, ulysses))


def accumulated(value: Any, found: ForeignConfig) -> RowResult:
    """Count updates of a step's samples."""
    if found.value("ppo_epochs", 1) != 1:
        return f"with ppo_epochs={found.value('ppo_epochs')}, miles would use each sample once"
    update = int(value) * int(found.value(f"{ARGS}.per_device_train_batch_size", 8)) * _ranks(found)
    if found.objective:
        return {"rollout.prompts_per_step": update}
    whole = int(found.value("rollout_batch_size", 128))
    if not is_agentic(found):
        whole *= int(found.value("num_return_sequences_in_group", 1))
    result = updates(float(whole), float(update))
    return {"train.updates_per_step": 1} if isinstance(result, str) and update > whole else result


def staleness(value: Any, found: ForeignConfig) -> RowResult:
    """Map how many batches rollout may run ahead; the trainer then computes the old log-probs."""
    settings = {"rollout.max_staleness": math.ceil(value)}
    return {**settings, "train.old_logprobs": "trainer"} if value else settings
