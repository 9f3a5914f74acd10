"""slime and Miles: what their table (templates/imports/slime.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import TEXTS, Said, data_name, updates


def fits(found: Foreign) -> str:
    """Return by what a configuration of slime is known."""
    is_own = {"hf_checkpoint", "rollout_batch_size"} <= set(found.settings)
    return f"the script runs {found.program} with --hf-checkpoint" if is_own else ""


def fits_miles(found: Foreign) -> str:
    """Return by what one of Miles is known: the same flags, and its name."""
    reason = fits(found)
    return f"{reason}, and names Miles" if reason and "miles" in found.text.lower() else ""


def _is_sft(found: Foreign) -> bool:
    return found.value("loss_type") == "sft_loss"


def trains_rows(found: Foreign) -> Said:
    """Return the keys of a run without rollout."""
    return {"train.objective": "supervised"} if _is_sft(found) else {}


def in_loss(found: Foreign) -> bool:
    """Return True if the loss has a KL term."""
    return bool(found.value("use_kl_loss"))


def not_in_loss(found: Foreign) -> bool:
    """Return True if the loss has none."""
    return not in_loss(found)


def has_kl(found: Foreign) -> bool:
    """Return True if loss or reward have a KL term."""
    return in_loss(found) or found.value("kl_coef", 0) > 0


def epochs(value: Any, found: Foreign) -> Said:
    """Of SFT they are the length; of RL the number of rows decides."""
    return {"train.epochs": value} if _is_sft(found) else TEXTS["EPOCHS"]


def batch(value: Any, found: Foreign) -> Said:
    """Count updates: theirs are of samples."""
    if _is_sft(found):
        return {"rollout.prompts_per_step": value}
    samples = found.value("rollout_batch_size", 0) * found.value("n_samples_per_prompt", 1)
    return updates(float(samples), float(value))


def evaluated(value: Any, found: Foreign) -> Said:
    """`name path name path ...`"""
    files = value[1::2] if isinstance(value, list) else [value]
    return {"data.eval": data_name(files)} if files else {}


def filter(value: Any, found: Foreign) -> Said:
    """The one filter that ships with them."""
    known = str(value).endswith("check_reward_nonzero_std")
    return {"rollout.filter": "zero_variance"} if known else TEXTS["OWN_CODE"]


def over_sampled(value: Any, found: Foreign) -> Said:
    """Prompts that are sampled for a batch."""
    return {"rollout.over_sampling": max(1.0, value / found.value("rollout_batch_size", value))}


def stops(value: Any, found: Foreign) -> Said:
    """One stop string, or several."""
    return {"rollout.stop": value if isinstance(value, list) else [value]}


def fp8(value: Any, found: Foreign) -> Said:
    """The format of training."""
    return {"train.precision": "mxfp8" if value == "mxfp8" else "fp8_block"}
