"""prime-rl: what its table (templates/imports/prime-rl.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import Foreign
from milescli.recipe.imports.tables import Said, ratio


def fits(found: Foreign) -> str:
    """Return by what a configuration of prime-rl is known."""
    begins = ("orchestrator.", "trainer.", "inference", "deployment.")
    name = next((one for one in found.settings if one.startswith(begins)), None)
    if found.form == "toml" and (name or "max_steps" in found.settings):
        return f"it is TOML and sets {name or 'max_steps'}"
    return ""


def trains_rows(found: Foreign) -> Said:
    """Return the keys of a run without rollout."""
    of_rl = any(name.startswith(("orchestrator.", "trainer.")) for name in found.settings)
    is_sft = "data.batch_size" in found.settings and not of_rl
    return {"train.objective": "supervised"} if is_sft else {}


def batch(value: Any, found: Foreign) -> Said:
    """Prompts of a step: their batch counts samples."""
    prompts = ratio(float(value), float(found.value("orchestrator.group_size", 1)))
    return prompts if isinstance(prompts, str) else {"rollout.prompts_per_step": prompts}


def environment(value: Any, found: Foreign) -> Said:
    """Its environment has the prompts, too."""
    return {
        "rollout.agent": "verifiers",
        "rollout.verifiers.environment": value,
        "data.prompts": "task:verifiers",
        "data.eval": "task:verifiers-heldout",
    }


def filter(value: Any, found: Foreign) -> Said:
    """Groups that teach nothing."""
    return {"rollout.filter": "zero_variance" if value else "none"}
