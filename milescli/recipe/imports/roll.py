"""ROLL: what its table (templates/imports/roll.yaml) calls."""

from __future__ import annotations

import math
import re
from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import Said, path_of, updates

ARGS = "actor_train.training_args"
ACCUMULATION = "gradient_accumulation_steps"
CONFIG = "actor_train.strategy_args.strategy_config"
TEACHER = "teacher.model_args.model_name_or_path"
ESTIMATORS: dict[str, Said] = {
    "grpo": {"train.advantage": "grpo"},
    "gae": {"train.advantage": "reinforce", "train.credit": "gae"},
    "gigpo": {"train.advantage": "gigpo"},
    "step_reinforce": "gives each step of an episode a return of its own: see train.credit",
    "agentic_reinforce": "gives each turn a return of its own: see train.credit",
}


def fits(found: Foreign) -> str:
    """Return by what a configuration of ROLL is known."""
    begins = ("actor_train.", "actor_infer.", "sft_train.", "student")
    name = next((one for one in found.settings if one.startswith(begins)), None)
    has_model = {"pretrain", "student_pretrain"} & {*found.settings}
    return f"it sets {name}" if name and has_model else ""


def trains_rows(found: Foreign) -> Said:
    """Return the keys of a run without rollout."""
    if distils_rows(found):
        return {"train.objective": "distillation"}
    if any(name.startswith("sft_train.") for name in found.settings):
        return {"train.objective": "supervised"}
    if "beta" in found.settings and "rollout_batch_size" not in found.settings:
        return {"train.objective": "preference"}
    return {}


def distils_rows(found: Foreign) -> bool:
    """Return True if a student learns from a teacher on rows; on its own samples it is RL."""
    return "teacher_pretrain" in found.settings


def teacher(value: Any, found: Foreign) -> Said:
    """The teacher, of whom a student learns alone."""
    said = {"train.distill.teachers": [{"path": path_of(str(value))}]}
    return said if distils_rows(found) else {**said, "rollout.reward": "none"}


def of_teacher_alone(value: Any, found: Foreign) -> Said:
    """Weight of the teacher's loss, beside that of the rows."""
    return {} if value == 1 else "adds the loss of the rows: here the teacher alone teaches"


def at_one(value: Any, found: Foreign) -> Said:
    """Temperature of a distance."""
    return {} if value == 1 else "changes both distributions: here the distance is at temperature 1"


def has_critic(found: Foreign) -> bool:
    """Return True if a critic is trained."""
    return found.value("adv_estimator") == "gae" and TEACHER not in found.settings


def in_loss(found: Foreign) -> bool:
    """Return True if the loss has a KL term."""
    return bool(found.value("use_kl_loss"))


def in_reward(found: Foreign) -> bool:
    """Return True if the reward has a KL term."""
    return bool(found.value("add_token_level_kl")) and not in_loss(found)


def estimator(value: Any, found: Foreign) -> Said:
    """REINFORCE takes the mean and the std that norm_*_type name. A teacher judges each token by
    itself."""
    if TEACHER in found.settings:
        return {}
    if value != "reinforce":
        return ESTIMATORS.get(str(value), f"estimates advantages by `{value}`")
    mean = found.value("norm_mean_type", found.value("reward_normalization.grouping"))
    if mean not in ("group", "traj_group_id"):
        return {"train.advantage": "reinforce", "train.credit": "to_go"}
    method = str(found.value("reward_normalization.method", ""))
    is_scaled = found.value("norm_std_type") or "std" in method
    return {"train.advantage": "grpo", "train.normalize_std": "group" if is_scaled else "none"}


def _is_agentic(found: Foreign) -> bool:
    return any(name.startswith("train_env_manager.") for name in found.settings)


def prompts(value: Any, found: Foreign) -> Said:
    """Of RLVR the batch counts prompts, of agents episodes."""
    if not _is_agentic(found):
        return {"rollout.prompts_per_step": value}
    size = int(found.value("train_env_manager.group_size", 1))
    return {"rollout.prompts_per_step": max(1, int(value) // size)}


def _ranks(found: Foreign) -> int:
    """Data-parallel ranks of the trainer."""
    mapping = str(found.value("actor_train.device_mapping", "list(range(0,1))"))
    if match := re.fullmatch(r"list\(range\((\d+),\s*(\d+)\)\)", mapping.replace(" ", "")):
        devices = int(match[2]) - int(match[1])
    else:
        devices = len(re.findall(r"\d+", mapping)) or 1
    for name in ("tensor", "pipeline", "context"):
        size = found.value(f"{CONFIG}.{name}_{'model_' * (name != 'context')}parallel_size", 1)
        devices //= int(size)
    return max(1, devices)


def accumulated(value: Any, found: Foreign) -> Said:
    """Count updates of a step's samples."""
    if found.value("ppo_epochs", 1) != 1:
        return f"with ppo_epochs={found.value('ppo_epochs')}, miles would use each sample once"
    update = int(value) * int(found.value(f"{ARGS}.per_device_train_batch_size", 1)) * _ranks(found)
    if re.search(r" (sft_train|student)\.", found.settings[f"{ARGS}.{ACCUMULATION}"].where):
        return {"rollout.prompts_per_step": update}  # the batch of a run of rows
    whole = int(found.value("rollout_batch_size", 128))
    if not _is_agentic(found):
        whole *= int(found.value("num_return_sequences_in_group", 1))
    said = updates(float(whole), float(update))
    return {"train.updates_per_step": 1} if isinstance(said, str) and update > whole else said


def staleness(value: Any, found: Foreign) -> Said:
    """Batches that rollout may run ahead."""
    return {"rollout.max_staleness": math.ceil(value)}
