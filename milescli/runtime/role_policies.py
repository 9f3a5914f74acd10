"""Older versions of the policy that play roles (`rollout.roles.NAME.policy`), before any process
starts. Each is served by an engine that is as the policy's, but for its weights. Called by
`inputs`, `planning` and `evaluate`; `build` starts the engines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir
from milescli.core.errors import RecipeError
from milescli.models import ModelFacts, load_facts
from milescli.recipe.schema import Recipe
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.runtime.held_models import HeldModelPath

if TYPE_CHECKING:
    from milescli.console.output import Output

KEY = "rollout.roles"


def policy_paths(recipe: Recipe) -> list[HeldModelPath]:
    """Where each lies, in the order of `rollout.policies`."""
    return [_path(text, Path(recipe.run.dir)) for text in recipe.rollout.policies]


def _path(text: str, runs: Path) -> HeldModelPath:
    """`runs`: the folder in which a run's bare name is looked for."""
    path, at, step = text.rpartition("@")
    has_step = bool(at) and step.isdecimal()
    name = path if has_step else text
    named = runs / name
    if re.fullmatch(r"[\w.-]+", name) and (named / RECIPE_FILE).is_file():
        name = str(named)
    return HeldModelPath(what="policy", key=KEY, path=name, step=int(step) if has_step else None)


def require_policies(recipe: Recipe, facts: ModelFacts) -> None:
    """`facts`: of the policy that is trained. Raises RecipeError where one is not there, or has
    another shape; CheckpointError where it is no model."""
    for path in policy_paths(recipe):
        _require_same(path, path.facts(recipe.longest_sequence), facts)


def policy_folders(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> tuple[Path, ...]:
    """The Hugging Face folder of each, in the order of `rollout.policies`. Raises as
    `require_policies`, and RecipeError where one has another tokenizer."""
    folders = []
    for text, path in zip(recipe.rollout.policies, policy_paths(recipe), strict=True):
        folder = path.folder(run.held_model_dir("role-model", text), output=output)
        _require_same(path, load_facts(folder), facts)
        path.refuse_other_tokens(folder, tokenizer=tokenizer, least=facts.vocab_size)
        folders.append(folder)
    return tuple(folders)


def without_policies(recipe: Recipe) -> Recipe:
    """The same, its roles played by the policy: for who only reads its data."""
    roles = {
        name: role.model_copy(update={"policy": None})
        for name, role in recipe.rollout.roles.items()
    }
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"roles": roles})})


def by_role(recipe: Recipe, policies: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of each policy, by the roles that it plays."""
    played = {name: role.policy for name, role in recipe.rollout.roles.items()}
    return {name: policies[path] for name, path in played.items() if path in policies}


def _require_same(path: HeldModelPath, theirs: ModelFacts, ours: ModelFacts) -> None:
    """Its engine is planned as the policy's are."""
    apart = [
        field.name
        for field in dataclasses.fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if apart:
        first = apart[0]
        raise RecipeError(
            f"the policy {path.path} of a role is no version of the policy that is trained",
            why=f"its `{first}` is {getattr(theirs, first)}, and that of the trained one "
            f"{getattr(ours, first)}: the engines of a run serve one shape",
            fix="serve it elsewhere, and write `endpoint: {url: http://HOST:PORT/v1, model: NAME}` "
            "in the place of `policy`",
        )
