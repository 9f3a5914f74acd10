"""Checks of one recipe: reward, plan, and its model, tokenizer and data, by the code that a launch runs, in a folder that is thrown away."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from milescli.doctor.finding import Check, Finding, ok, skip, warn
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe


def recipe_checks(loaded: LoadedRecipe, *, machine: Callable[[], Machine]) -> list[Check]:
    """What `--recipe` adds."""
    recipe = loaded.recipe
    return [
        Check(name="reward", run=lambda: check_reward_of(recipe), timeout_s=60.0),
        Check(name="plan", run=lambda: check_plan(loaded, machine()), timeout_s=60.0),
        Check(name="data", run=lambda: check_material(recipe), timeout_s=600.0, is_heavy=True),
    ]


def check_reward_of(recipe: Recipe) -> list[Finding]:
    """It can be imported, and takes what a reward takes. It is not called: it may cost money."""
    from milescli.rollout.rewards import load_reward

    load_reward(recipe.rollout)
    return ok("reward", f"`{recipe.rollout.reward}` is there, with the right parameters")


def check_plan(loaded: LoadedRecipe, machine: Machine) -> list[Finding]:
    """The recipe's layout is legal here."""
    from milescli.runtime.launch import plan_only

    plan = plan_only(loaded, machine)
    place = "share devices" if plan.colocated else "have devices of their own"
    return ok(
        "plan", f"{plan.trainer.world_size} trainer ranks and {plan.engines.num} engines on {plan.device_kind}, which {place}"
    )


def check_material(recipe: Recipe) -> list[Finding]:
    """Model folder, tokenizer, every row of the data."""
    from milescli.runtime.material import prepare
    from milescli.runtime.rundir import RunDir

    model = recipe.model
    if model.scratch is None and not Path(model.path or "").expanduser().is_dir():
        return skip(
            "data",
            f"`{model.path}` is on the hub; `hf download {model.path}` and `--set model.path=FOLDER` let this be checked",
        )
    with tempfile.TemporaryDirectory(prefix="miles-doctor-") as folder:
        material = prepare(recipe, RunDir(path=Path(folder)))
    report = material.reports["prompts"]
    what = (
        f"{report.num_rows} prompts of {report.prompt_tokens_p50} tokens (median; 99 %: {report.prompt_tokens_p99}), "
        f"columns {report.prompt_key} and {report.label_key}; {len(material.heldout)} held out"
    )
    if report.num_dropped > 0.1 * report.num_rows:
        return warn(
            "data",
            what,
            why=f"{report.num_dropped} prompts are longer than {recipe.data.max_prompt_tokens} tokens and will be dropped",
            fix=f"--set data.max_prompt_tokens={report.prompt_tokens_max}",
        )
    return ok("data", what + (f"; {report.num_dropped} too long and dropped" if report.num_dropped else ""))
