"""Checks one recipe: reward, plan, and its model, tokenizer and data, with the code that a launch
runs, in a temporary folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.units import MIB, format_bytes
from milescli.doctor.disk import check_checkpoints, check_download
from milescli.doctor.finding import Check, Finding, fail, ok, skip, warn
from milescli.doctor.roles import check_roles
from milescli.platform.machine import Machine
from milescli.recipe.agents import PACKAGE_AGENTS
from milescli.recipe.data_files import is_hub, parse_hub
from milescli.recipe.distill import policy_only
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe

if TYPE_CHECKING:
    from milescli.data.examples import ExampleReport

DATA_LIMIT = 256 * MIB
"""Largest size of a data set on the hub that is downloaded for a check."""


def recipe_checks(loaded: LoadedRecipe, *, machine: Callable[[], Machine]) -> list[Check]:
    """List the checks that `--recipe` adds."""
    recipe = loaded.recipe
    servers = Check(name="mcp", run=lambda: check_mcp_of(recipe), timeout_s=120.0)
    return [
        Check(
            name="model",
            run=lambda: check_model(recipe, machine()),
            timeout_s=120.0,
            needs=("visibility",),
        ),
        Check(
            name="checkpoints",
            run=lambda: check_checkpoints(recipe, machine()),
            timeout_s=120.0,
            needs=("model", "disk"),
        ),
        Check(
            name="download", run=lambda: check_download(recipe), timeout_s=60.0, needs=("model",)
        ),
        Check(name="reward", run=lambda: check_reward_of(recipe), timeout_s=60.0),
        *([servers] if recipe.rollout.mcp else []),
        Check(
            name="roles",
            run=lambda: check_roles(recipe),
            timeout_s=120.0,
            needs=("model", "reward"),
        ),
        Check(
            name="plan",
            run=lambda: check_plan(loaded, machine()),
            timeout_s=60.0,
            needs=("model", "reward", "roles"),
        ),
        Check(
            name="data",
            run=lambda: check_material(recipe, loaded.source),
            timeout_s=600.0,
            is_heavy=True,
            needs=("reward", "hub"),
        ),
    ]


def check_reward_of(recipe: Recipe) -> list[Finding]:
    """Check that the reward can be imported and has the parameters of a reward. The check `data`
    calls a user's reward once."""
    from milescli.rollout.rewards import load_all_rewards
    from milescli.runtime.inputs.data_files import rollouts_of

    for rollout in rollouts_of(recipe):
        load_all_rewards(rollout)
    if recipe.rollout.agent in PACKAGE_AGENTS:
        from milescli.rollout.episode.agents import require_agent

        require_agent(recipe.rollout)
    if recipe.rollout.plays_environment:
        from milescli.rollout.environments import require_environment

        require_environment(recipe.rollout.environment)
    return ok("reward", f"`{recipe.rollout.reward_name}` exists, with the right parameters")


def check_mcp_of(recipe: Recipe) -> list[Finding]:
    """Check that the servers of tools respond, and have the tools that the recipe names. Raises
    what a launch would raise."""
    from milescli.agents.tool_kit import offered_tools

    names = [schema["function"]["name"] for schema in offered_tools(recipe.rollout)]
    servers = ", ".join(recipe.rollout.mcp)
    return ok("mcp", f"the tools of {servers} exist; the model may call {', '.join(names)}")


def check_model(recipe: Recipe, machine: Machine) -> list[Finding]:
    """Check that the model's family can be trained and served here. Raises what a launch would
    raise."""
    from milescli.backends.sglang.launch.servable import fault_of_sglang, servable_on_cpu
    from milescli.models.catalogue import UNPROVEN
    from milescli.runtime.inputs.model_facts import planned_facts
    from milescli.runtime.planning import refuse_unproven, refuse_unrecorded

    facts = planned_facts(recipe)
    refuse_unrecorded(recipe, facts)
    refuse_unproven(recipe, facts)
    what = f"{facts.family}: {facts.num_layers} layers, width {facts.hidden_size}"
    on_host = machine.kind == "cpu" or recipe.machine.gpus == 0
    served, why = (
        servable_on_cpu(facts) if on_host else (not (fault := fault_of_sglang(facts)), fault or "")
    )
    if not served:
        where = "on a CPU" if on_host else "here"
        return fail(
            "model",
            f"{what}: SGLang does not support it {where}",
            why=why,
            fix="--set model.path=FOLDER   # of another family",
        )
    if facts.family in UNPROVEN:
        look = "miles models   # shows what was compared, and how"
        return warn(
            "model",
            f"{what}: allowed by model.allow_unproven",
            why=UNPROVEN[facts.family],
            fix=look,
        )
    return ok("model", f"{what}; trained and served here")


def check_plan(loaded: LoadedRecipe, machine: Machine) -> list[Finding]:
    """Check that the recipe's layout is valid on this machine."""
    from milescli.runtime.planning import plan_only

    plan = plan_only(loaded, machine)
    place = "share devices" if plan.colocated else "have their own devices"
    return ok(
        "plan",
        f"{plan.trainer.world_size} trainer ranks and {plan.engines.num} engines on "
        f"{plan.device_kind}, which {place}",
    )


def _skip_reason(recipe: Recipe) -> str:
    """Return why the data is not checked; empty if it is small, or already downloaded."""
    from milescli.backends.hub.datasets import missing_bytes
    from milescli.recipe.data_files import FIELDS, files_of

    for field in FIELDS:
        names = [file.name for file in files_of(recipe.data, field) if is_hub(file.name)]
        for name in names:
            size_bytes = missing_bytes(parse_hub(name, key=f"data.{field}"), key=field)
            if size_bytes > DATA_LIMIT:
                return (
                    f"{name} would need a download of {format_bytes(size_bytes)}; `miles launch` "
                    "does that, and checks every row first"
                )
    return ""


def check_material(recipe: Recipe, source: str) -> list[Finding]:
    """Check model folder, tokenizer and every row of the data, and make all comparisons of a run.
    `source` is the recipe's name as the user gave it."""
    from milescli.checkpoint.run_dir import RunDir
    from milescli.data.examples import ExampleReport
    from milescli.data.prompt_source import SourceReport
    from milescli.runtime.inputs.run_inputs import prepare_inputs

    if too_large := _skip_reason(recipe):
        return skip("data", too_large)
    with tempfile.TemporaryDirectory(prefix="miles-doctor-") as folder:
        model = recipe.model
        if model.scratch is None and not Path(model.path or "").expanduser().is_dir():
            from milescli.backends.hub.models import fetch_tokenizer

            # The weights are not fetched: tokenizer and config are all that the data is read with.
            path = str(fetch_tokenizer(str(model.path), revision=model.revision))
            recipe = recipe.model_copy(
                update={"model": model.model_copy(update={"path": path, "revision": None})}
            )
        material = prepare_inputs(policy_only(recipe), RunDir(path=Path(folder)))
    if doubts := [doubt for made in material.checked for doubt in made.doubts]:
        look = f"miles data check {source}   # shows what the model reads"
        return warn("data", doubts[0], why="; ".join(doubts[1:]) or "the run would warn", fix=look)
    if isinstance(rows := material.reports.get("train"), ExampleReport):
        return _row_findings(rows, num_heldout=len(material.heldout))
    report = material.reports["prompts"]
    assert isinstance(report, SourceReport), "prompts are no rows to learn from"
    what = (
        f"{report.num_rows} prompts of {report.prompt_tokens_p50} tokens (median; 99 %: "
        f"{report.prompt_tokens_p99}), columns {report.prompt_key} and {report.label_key}; "
        f"{len(material.heldout)} held out"
    )
    if report.num_dropped > 0.1 * report.num_measured:
        return warn(
            "data",
            what,
            why=f"{report.num_dropped} of {report.num_measured} prompts are longer than "
            f"{recipe.data.max_prompt_tokens} tokens and will be skipped",
            fix=f"--set data.max_prompt_tokens={report.prompt_tokens_max}",
        )
    return ok(
        "data",
        what + (f"; {report.num_dropped} are too long and skipped" if report.num_dropped else ""),
    )


def _row_findings(report: ExampleReport, *, num_heldout: int) -> list[Finding]:
    what = (
        f"{report.num_rows} rows to learn from, of {report.tokens_p50} tokens (median; 99 %: "
        f"{report.tokens_p99}); {report.loss_tokens:,} of {report.tokens:,} tokens are learned; "
        f"{num_heldout} prompts held out"
    )
    if report.note:
        look = f"miles data check {report.path}   # shows which, and why"
        return warn("data", what, why=report.note, fix=look)
    return ok("data", what)
