"""Implements the functions that the table of slime (templates/imports/slime.yaml) calls."""

from __future__ import annotations

import math
from typing import Any

from milescli.recipe.imports.reading import ForeignConfig
from milescli.recipe.imports.tables import TEXTS, WARNS, RowResult, data_name, updates

_SHIPPED = ("sglang_rollout", "sft_rollout")
"""Rollout modules of slime itself: one samples as miles does, the other reads rows."""


def fits(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as slime's; empty if it was not."""
    batches = {"rollout_batch_size", "global_batch_size", "num_rollout", "colocate"}
    is_own = "hf_checkpoint" in found.settings and not batches.isdisjoint(found.settings)
    return f"the script runs {found.program} with --hf-checkpoint" if is_own else ""


def fits_miles(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as that of Miles, which has slime's flags; empty
    if it was not."""
    reason = fits(found)
    return f"{reason}, and names Miles" if reason and "miles" in found.text.lower() else ""


def is_sft(found: ForeignConfig) -> bool:
    """Return True if the run trains on rows."""
    return found.value("loss_type") == "sft_loss"


def is_ppo(found: ForeignConfig) -> bool:
    """Return True if a critic is trained."""
    return found.value("advantage_estimator") == "ppo"


def of_program(found: ForeignConfig) -> dict[str, Any]:
    """Return the keys that the program itself decides: one program samples a step ahead."""
    if "async" not in found.program and not found.value("fully_async"):
        return {}
    old = "engine" if found.value("use_rollout_logprobs") else "trainer"
    return {"rollout.max_staleness": 1, "train.old_logprobs": old}


def trains_rows(found: ForeignConfig) -> RowResult:
    """Return the recipe keys of a run without rollout; empty for RL."""
    return {"train.objective": "supervised"} if is_sft(found) else {}


def in_loss(found: ForeignConfig) -> bool:
    """Return True if the loss has a KL term."""
    return bool(found.value("use_kl_loss"))


def not_in_loss(found: ForeignConfig) -> bool:
    """Return True if the loss has no KL term."""
    return not in_loss(found)


def has_kl(found: ForeignConfig) -> bool:
    """Return True if the loss or the reward has a KL term."""
    return in_loss(found) or found.value("kl_coef", 0) > 0


def epochs(value: Any, found: ForeignConfig) -> RowResult:
    """Map the epochs of SFT; in RL the number of rows decides, so a note replaces them."""
    return {"train.epochs": value} if is_sft(found) else TEXTS["EPOCHS"]


def batch(value: Any, found: ForeignConfig) -> RowResult:
    """Map the batch size in samples to the number of updates per step."""
    if is_sft(found):
        return {"rollout.prompts_per_step": value}
    samples = found.value("rollout_batch_size", 0) * found.value("n_samples_per_prompt", 1)
    return updates(float(samples), float(value))


def _updates(found: ForeignConfig) -> int:
    """Return the optimizer updates per step."""
    if steps := found.value("num_steps_per_rollout"):
        return int(steps)
    samples = found.value("rollout_batch_size", 1) * found.value("n_samples_per_prompt", 1)
    return max(1, int(samples) // int(found.value("global_batch_size", samples)))


def warmup(value: Any, found: ForeignConfig) -> RowResult:
    """Map the warm-up, which slime counts in updates, to steps."""
    return {"train.optimizer.warmup_steps": math.ceil(value / _updates(found))}


def lr(value: Any, found: ForeignConfig) -> RowResult:
    """Map the learning rate; a critic without its own gets the same."""
    return {"train.optimizer.lr": value, **({"train.critic.lr": value} if is_ppo(found) else {})}


def own_code(found: ForeignConfig) -> bool:
    """Return True if the user's own code makes the samples and the engine's requests."""
    keys = ("custom_generate_function_path", "custom_agent_function_path", "rollout_function_path")
    paths = [str(found.value(key)) for key in keys if found.value(key)]
    shipped = ("single_turn", "fully_async", *_SHIPPED)
    return any(all(name not in path for name in shipped) for path in paths)


def chat_template(value: Any, found: ForeignConfig) -> RowResult:
    """Turn the chat template off if prompts are the plain text of their column; rows always are
    chats."""
    if value or is_sft(found) or own_code(found):
        return {}
    return {"data.chat_template": "none"}


def evaluates(value: Any, found: ForeignConfig) -> RowResult:
    """Map the evaluation interval; evaluation samples like rollout unless other flags say
    otherwise."""
    if not value:
        return {"eval.every": 0}
    settings = {
        "eval.every": int(value),
        "eval.temperature": found.value("rollout_temperature", 1.0),
    }
    return settings | {"eval.top_p": found.value("rollout_top_p", 1.0)}


def kl_in_reward(value: Any, found: ForeignConfig) -> RowResult:
    """Map the KL coefficient of the reward, which slime's GRPO ignores."""
    if found.value("advantage_estimator") in ("grpo", "gspo", "cispo"):
        return "has no effect there: GRPO takes a KL term in the loss alone (--use-kl-loss)"
    return {"train.kl_coef": value, "train.kl_in": "reward"}


def opsm(value: Any, found: ForeignConfig) -> RowResult:
    """Map off-policy sequence masking with its bound."""
    return {"train.off_policy_mask": found.value("opsm_delta", 1e-4)} if value else {}


def own_correction(value: Any, found: ForeignConfig) -> RowResult:
    """Map the correction function that ships with slime; own code gives a note only."""
    if not str(value).endswith("icepop_function"):
        return f"{WARNS}weights by code of its own: see train.correction"
    return {
        "train.correction.mode": "mask",
        "train.correction.low": float(found.value("tis_clip_low", 0.0)),
        "train.correction.high": float(found.value("tis_clip", 2.0)),
    }


def own_rollout(value: Any, found: ForeignConfig) -> RowResult:
    """Map the rollout function: slime's own modules, or a note about the user's code."""
    if any(name in str(value) for name in _SHIPPED):
        return {}
    if "fully_async" in str(value):
        return unbounded(True, found)
    return f"{WARNS}samples by code of its own: see rollout.agent and docs/own-agent.md"


def unbounded(value: Any, found: ForeignConfig) -> RowResult:
    """Note that rollout runs ahead without a bound, if no bound is set."""
    if not value or found.value("max_weight_staleness") is not None:
        return {}
    return f"{WARNS}lets rollout run ahead without a bound: set rollout.max_staleness (here 1)"


def interval(value: Any, found: ForeignConfig) -> RowResult:
    """Check that engines are updated every step."""
    return {} if value == 1 else f"{WARNS}updates the engines every {value} steps: miles every step"


def mtp(value: Any, found: ForeignConfig) -> RowResult:
    """Map the loss weight of multi-token prediction."""
    weight = float(found.value("mtp_loss_scaling_factor", 0.2))
    return {"train.mtp.loss_weight": weight} if value else {}


def evaluated(value: Any, found: ForeignConfig) -> RowResult:
    """Map the evaluation files of `name path name path ...`."""
    files = value[1::2] if isinstance(value, list) else [value]
    return {"data.eval": data_name(files)} if files else {}


def filter(value: Any, found: ForeignConfig) -> RowResult:
    """Map the one filter that ships with slime."""
    known = str(value).endswith("check_reward_nonzero_std")
    return {"rollout.filter": "zero_variance"} if known else TEXTS["OWN_CODE"]


def over_sampled(value: Any, found: ForeignConfig) -> RowResult:
    """Map the prompts sampled per batch to a ratio of over-sampling."""
    return {"rollout.over_sampling": max(1.0, value / found.value("rollout_batch_size", value))}


def stops(value: Any, found: ForeignConfig) -> RowResult:
    """Map one stop string, or a list of them."""
    return {"rollout.stop": value if isinstance(value, list) else [value]}


def fp8(value: Any, found: ForeignConfig) -> RowResult:
    """Map the FP8 format of training."""
    return {"train.precision": "mxfp8" if value == "mxfp8" else "fp8_block"}
