"""Implements the functions that the table of prime-rl (templates/imports/prime-rl.yaml) calls."""

from __future__ import annotations

from typing import Any

from milescli.recipe.imports.reading import ForeignConfig
from milescli.recipe.imports.tables import NOTE, RowResult, data_name, ratio

SOURCE = "orchestrator.train.source"
LONGEST_PROMPT = 4096
"""Largest number of prompt tokens if one bound covers prompt and response together."""


def fits(found: ForeignConfig) -> str:
    """Return how the configuration was recognised as prime-rl's; empty if it was not."""
    if found.program.startswith("prime-rl "):
        return f"the script runs {found.program.removeprefix('prime-rl ')}"
    begins = ("orchestrator.", "trainer.", "inference", "deployment.")
    split = ("rollouts_per_example", "environment.id", "optim.lr", "max_async_level")
    name = next((one for one in found.settings if one.startswith(begins) or one in split), None)
    if found.form == "toml" and (name or "max_steps" in found.settings):
        return f"it is TOML and sets {name or 'max_steps'}"
    return ""


def is_sft(found: ForeignConfig) -> bool:
    """Return True if the run trains on rows."""
    names = found.settings
    has_rows = any(name.startswith("data.") and name != "data.fake" for name in names)
    return has_rows and not any(name.startswith("orchestrator.") for name in names)


def trains_rows(found: ForeignConfig) -> RowResult:
    """Return the recipe keys of a run without rollout; empty for RL."""
    return {"train.objective": "supervised"} if is_sft(found) else {}


def has_ipo(found: ForeignConfig) -> bool:
    """Return True if the loss is not the default one."""
    return found.value("trainer.loss.type", "default") != "default"


def has_warmup(found: ForeignConfig) -> bool:
    """Return True if the schedule begins with a warm-up."""
    return found.value("trainer.scheduler.type", "constant") != "constant"


def has_muon(found: ForeignConfig) -> bool:
    """Return True if Muon is the optimizer."""
    return found.value("trainer.optim.type") == "muon"


def has_sgd(found: ForeignConfig) -> bool:
    """Return True if SGD is the optimizer."""
    return found.value("trainer.optim.type") == "sgd"


def has_lora(found: ForeignConfig) -> bool:
    """Return True if an adapter is trained."""
    return any(name.startswith("trainer.model.lora") for name in found.settings)


def batch(value: Any, found: ForeignConfig) -> RowResult:
    """Map the batch size, which counts samples, to prompts per step."""
    prompts = ratio(float(value), float(found.value("orchestrator.group_size", 1)))
    return prompts if isinstance(prompts, str) else {"rollout.prompts_per_step": prompts}


def bound(value: Any, found: ForeignConfig) -> RowResult:
    """Map the bound on prompt and response together: the prompt gets at most half of it."""
    prompt = min(LONGEST_PROMPT, int(value) // 2)
    turn = int(found.value("orchestrator.train.sampling.max_completion_tokens", 0))
    return {
        "data.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": max(turn, int(value) - prompt),
    }


def staleness(value: Any, found: ForeignConfig) -> RowResult:
    """Map the staleness bound: a step takes the groups that are finished, and drops stale ones."""
    if not value:
        return {"rollout.max_staleness": 0}
    return {
        "rollout.max_staleness": value,
        "rollout.order": "done",
        "rollout.stale_groups": "drop",
    }


def environment(value: Any, found: ForeignConfig) -> RowResult:
    """Map the first environment, which also supplies the prompts; note any further ones."""
    options = _below(found, f"{SOURCE}.0.env")
    arguments = {name: one for name, one in options.pop("taskset", {}).items() if name != "id"}
    settings: dict[str, Any] = {
        "rollout.agent": "verifiers",
        "rollout.verifiers.environment": value,
        "data.prompts": "task:verifiers",
    }
    if arguments:
        settings["rollout.verifiers.arguments"] = arguments
    if options:
        settings["rollout.verifiers.options"] = options
    if value in found.settings_below("orchestrator.eval.source.0.env").values():
        settings["data.eval"] = "task:verifiers-heldout"
    if found.settings_below(f"{SOURCE}.1"):
        settings[NOTE] = (
            "of the environments, the recipe has the first: miles trains on one of these"
        )
    return settings


def _below(found: ForeignConfig, prefix: str) -> dict[str, Any]:
    """Return the settings below a name as nested mappings."""
    made: dict[str, Any] = {}
    for name, one in found.settings_below(prefix).items():
        *above, last = name.split(".")
        inner = made
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = one
    return made


def filter(value: Any, found: ForeignConfig) -> RowResult:
    """Map the filter that drops groups whose rewards are all equal."""
    return {"rollout.filter": "zero_variance" if value else "none"}


def rows(value: Any, found: ForeignConfig) -> RowResult:
    """Map a data set with its subset and split."""
    parts = [found.value(name) for name in ("data.subsets", "data.splits")]
    named = [str(one[0]) for one in parts if isinstance(one, list) and len(one) == 1]
    return {"data.prompts": ":".join([str(data_name(value)), *named])}
