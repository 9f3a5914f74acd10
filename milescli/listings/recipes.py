"""Implements `miles recipes`: lists each built-in recipe with its model's size, its data, and the
smallest machine for which the planner finds a plan. Uses no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milescli.core.files import read_json
from milescli.models import ModelFacts, parse_facts, scratch, table
from milescli.plan.make import try_plan
from milescli.platform.machine import parse_machine
from milescli.recipe.data_files import names_in
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import ALIASES, MODELS_FILE, template_names, templates_dir

CANDIDATE_MACHINES = (
    "1xH100",
    "2xH100",
    "4xH100",
    "8xH100",
    *(f"{nodes}x8xH100" for nodes in (2, 4, 8, 16, 32, 64)),
)
"""Machines that are tried, the smallest first."""
NO_MACHINE = "none"
"""Value in `models.json` if the planner finds no plan for any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRow:
    """Describes one recipe."""

    name: str
    aliases: list[str]
    description: str
    model: str
    """Name on the hub; `made here` for one from scratch."""
    family: str
    num_parameters: int | None
    """Number of parameters without multi-token-prediction layers and vision tower; None: not
    measured."""
    num_active_parameters: int | None
    """Number of parameters that one token uses."""
    algorithm: str
    """A row of `miles algorithms`, or what else the recipe learns by: supervised, dpo, ..."""
    prompts: str
    """What it trains on: prompts or rows."""
    eval: str | None
    smallest_machine: str | None
    """Smallest machine by the planner's estimate, in H100s; None: unknown."""


def recipe_rows() -> list[RecipeRow]:
    """List every built-in recipe, smaller models first."""
    known = read_json(templates_dir() / MODELS_FILE)
    rows = [_row(name, known["models"], known["smallest_machines"]) for name in template_names()]
    return sorted(rows, key=lambda row: (row.num_parameters or 0, row.name))


def smallest_machine(recipe: Recipe, facts: ModelFacts) -> str | None:
    """Return the first candidate machine for which the planner finds a plan, or None."""
    for name in CANDIDATE_MACHINES:
        machine = parse_machine(name)
        sized = recipe.model_copy(
            update={"machine": recipe.machine.model_copy(update={"nodes": len(machine.nodes)})}
        )
        if try_plan(sized, machine, facts) is not None:
            return name
    return None


def _row(name: str, models: dict[str, dict[str, object]], machines: dict[str, str]) -> RecipeRow:
    recipe = load(name, environ={}, cwd=Path("/"), home=Path("/")).recipe
    if recipe.model.scratch is not None:
        made = table(parse_facts(scratch.config_of(recipe.model.scratch)))
        facts: dict[str, object] = {
            "family": recipe.model.scratch.family,
            "parameters": made.num_parameters,
            "active": made.num_active_parameters,
        }
        machine: str | None = "cpu"
    else:
        facts, machine = models.get(str(recipe.model.path), {}), machines.get(name)
    return RecipeRow(
        name=name,
        aliases=[alias for alias, target in ALIASES.items() if target == name],
        description=recipe.description,
        model=recipe.model.path or "made here",
        family=str(facts.get("family", "?")),
        num_parameters=_number(facts.get("parameters")),
        num_active_parameters=_number(facts.get("active")),
        algorithm=_learns_by(recipe),
        prompts=", ".join(names_in(recipe.data.train or recipe.data.prompts)),
        eval=", ".join(names_in(recipe.data.eval)) or None,
        smallest_machine=None if machine == NO_MACHINE else machine,
    )


def _learns_by(recipe: Recipe) -> str:
    train = recipe.train
    if train.objective == "preference":
        return {"sigmoid": "dpo"}.get(train.preference.loss, train.preference.loss)
    if train.objective != "policy":
        return train.objective
    return train.algorithm or train.advantage


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
