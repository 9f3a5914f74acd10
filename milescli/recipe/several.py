"""Handles `adapters`: several adapters over one model, each with its own recipe, which overrides
values of the run's. Called by launch and resume."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from milescli.core.errors import RecipeError
from milescli.recipe import layers
from milescli.recipe.algorithms import with_algorithm
from milescli.recipe.layers import KeyValue, Origin, SettingsLayer, Table
from milescli.recipe.load import LoadedRecipe, build, table_of
from milescli.recipe.reader import as_written, read
from milescli.recipe.schema import Recipe
from milescli.recipe.section import set_option

KEY = "adapters"
_OWN = ("data", "rollout", "train", "eval", "checkpoint", "warmup", "model.adapter", "run.seed")
"""Keys and sections that an adapter may set."""
_SHARED = {
    "rollout.speculative": "the engines serve all adapters",
    "rollout.on_update": "the engines serve all adapters",
    "train.lora": "all adapters share one set of matrices",
    "train.routing_replay": "the engines serve all adapters",
    "rollout.precision": "the engines serve all adapters",
    "train.precision": "all adapters share one model",
    "train.quantise_inputs": "all adapters share one model",
    "train.exempt": "all adapters share one model",
    "train.on_policy": "the ranks and the engines serve all adapters",
    "train.recompute": "the ranks train all adapters",
    "train.max_tokens_per_microbatch": "the ranks train all adapters",
    "train.expert_imbalance": "the ranks train all adapters",
    "eval.engines": "the engines serve all adapters",
    "checkpoint.async_save": "the ranks write the checkpoints of all adapters",
}
"""Exceptions from `_OWN`: keys that all adapters share, and why."""
_OWN_OF_OPTIMIZER = ("lr", "min_lr", "warmup_steps", "schedule")
"""Keys of `train.optimizer` that an adapter may set, since the driver sends them with each step."""
_OPTION = "--adapter "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
_LONGEST_NAME = 64


def from_file(path: Path, *, option: str) -> dict[str, object]:
    """Read the settings in one adapter's file. Raises RecipeError. `option` is the option as
    typed."""
    node = read(layers.read_text(path, what=f"`{option}`:"), source=str(path))
    settings = as_written(node)
    if not isinstance(settings, dict):
        raise RecipeError(
            f"{path} does not describe an adapter",
            why=f"it contains `{node.text[:60]}`, not keys of a recipe",
            fix="write the keys that differ for this adapter: data: {prompts: FILE}",
        )
    return settings


def from_options(options: Sequence[str]) -> Table:
    """Parse `--adapter NAME=FILE`, given once per adapter. Raises RecipeError."""
    adapters: dict[str, object] = {}
    for option in options:
        name, equals, file = option.partition("=")
        if not equals or not file or name in adapters:
            raise RecipeError(
                f"`--adapter {option}` is not a valid adapter",
                why="the name is used twice" if name in adapters else "it has the form NAME=FILE",
                fix=f"--adapter {name or 'sums'}={file or 'FILE.yaml'}",
            )
        adapters[name] = from_file(Path(file), option=f"--adapter {option}")
    if not adapters:
        return {}
    where = " ".join(f"{_OPTION}{option}" for option in options)
    origin = Origin(layer=SettingsLayer.SET, where=where)
    return {KEY: KeyValue(value=adapters, text=str([*adapters]), origin=origin)}


def to_options(where: str) -> list[list[str]]:
    """Return the words of the command line that set `adapters`, from its origin."""
    return [["--adapter", option] for option in where.removeprefix(_OPTION).split(f" {_OPTION}")]


def adapter_recipes(loaded: LoadedRecipe) -> dict[str, LoadedRecipe]:
    """Return the recipe of each adapter by its name, as if it were trained alone; empty without
    `adapters`. Raises RecipeError."""
    adapters = loaded.recipe.adapters
    if adapters:
        _check_all(loaded.recipe)
    return {name: _adapter_recipe(loaded, name, settings) for name, settings in adapters.items()}


def with_common_steps(loaded: LoadedRecipe) -> LoadedRecipe:
    """Return the recipe whose `train.steps` holds for every adapter: no adapter sets its own."""
    adapters: dict[str, dict[str, Any]] = {}
    for name, settings in loaded.recipe.adapters.items():
        adapters[name] = own = dict(settings)
        if isinstance(train := own.get("train"), Mapping):
            own["train"] = {key: value for key, value in train.items() if key != "steps"}
    return replace(loaded, recipe=loaded.recipe.model_copy(update={KEY: adapters}))


def recipe_to_plan(
    loaded: LoadedRecipe, each: Mapping[str, LoadedRecipe] | None = None
) -> LoadedRecipe:
    """Return the recipe to plan for, which is large enough for every adapter; without `adapters`,
    the recipe itself. `each` comes from `adapter_recipes`."""
    each = each if each is not None else adapter_recipes(loaded)
    recipes = {name: one.recipe for name, one in each.items()}
    return replace(loaded, recipe=_widest(loaded.recipe, recipes)) if recipes else loaded


def _adapter_recipe(
    loaded: LoadedRecipe, name: str, settings: Mapping[str, object]
) -> LoadedRecipe:
    where = f"{KEY}.{name}"
    own = layers.from_yaml(json.dumps(settings), source=where, layer=SettingsLayer.RECIPE)
    for key, entry in own.items():
        _require_own(key, where=where, value=entry.value)
    table = table_of(loaded)
    del table[KEY]
    made = build(layers.merge([table, with_algorithm(own)]), source=loaded.source)
    _check_one(made.recipe, base=loaded.recipe, where=where)
    return made


def _require_own(key: str, *, where: str, value: object) -> None:
    shared = next((why for part, why in _SHARED.items() if _is_of(key, part)), None)
    if shared is None and any(_is_of(key, part) for part in _OWN):
        return
    raise RecipeError(
        f"`{key}` cannot be set for one adapter only",
        why=f"`{where}` sets it, but "
        f"{shared or 'all adapters of a run share the model and machine'}",
        fix=f"{set_option(key, value)}   # for all adapters; and remove it from `{where}`",
    )


def _is_of(key: str, part: str) -> bool:
    return key == part or key.startswith(f"{part}.")


def _check_all(recipe: Recipe) -> None:
    """Raise RecipeError for what is wrong with the adapters together."""
    for name in recipe.adapters:
        if not _NAME.match(name) or len(name) > _LONGEST_NAME:
            raise RecipeError(
                f"`{name[:40]}` cannot be the name of an adapter",
                why="it also names a folder, so it may have only letters, digits, - and _, and "
                f"at most {_LONGEST_NAME} characters",
                fix="--adapter my-name=FILE",
            )
    if not recipe.train.lora.is_on:
        raise RecipeError(
            "`adapters` are set, but the run trains all weights",
            why="several adapters can only be trained at once if the base model is frozen",
            fix="--lora 16",
        )
    if recipe.model.scratch is not None:
        raise RecipeError(
            "`adapters` are set over a model from scratch",
            why="an adapter changes little, so its base model must already be trained",
            fix="--set model.scratch=null --set model.path=RUN",
        )
    refused: dict[str, tuple[bool, str, str]] = {
        "rollout.speculative.kind": (
            recipe.rollout.speculative.kind != "none",
            "what guesses ahead would be asked for several policies",
            "none",
        ),
        "fault.copy_every": (
            bool(recipe.fault.copy_every),
            "copies of the trainer's state hold one adapter",
            "0",
        ),
        "eval.engines": (
            recipe.eval.engines == "own",
            "engines that are kept for evaluations hold one policy",
            "shared",
        ),
    }
    for key, (is_set, why, instead) in refused.items():
        if is_set:
            raise RecipeError(
                f"`{key}` in a run of several adapters", why=why, fix=f"--set {key}={instead}"
            )


def _check_one(recipe: Recipe, *, base: Recipe, where: str) -> None:
    """Raise RecipeError if an adapter sets what does not work yet with several of them."""
    refused = {
        "data.train": (recipe.learns_from_rows, "it learns from rows, which no engine samples"),
        "rollout.max_staleness": (
            recipe.rollout.max_staleness > 0,
            "each is strictly on-policy: while one is trained, the engines sample for the others",
        ),
        "train.credit": (recipe.has_critic, "a critic is trained whole, beside one policy"),
        "train.distill.teachers": (bool(recipe.local_teachers), "the ranks hold no teachers"),
        "rollout.reward": (recipe.uses_reward_model, "no engine holds the reward model"),
        "rollout.roles": (bool(recipe.rollout.policies), "no engine plays another policy"),
    }
    for key, (is_set, why) in refused.items():
        if is_set:
            raise RecipeError(
                f"`{key}` does not work with several adapters",
                why=f"{where}: {why}",
                fix="train this adapter in a run of its own",
            )
    theirs, own = base.train.optimizer.model_dump(), recipe.train.optimizer.model_dump()
    for key, value in own.items():
        if key not in _OWN_OF_OPTIMIZER and value != theirs[key]:
            raise RecipeError(
                f"`train.optimizer.{key}` cannot be set for one adapter only",
                why=f"{where} sets {value}, but all adapters share one optimizer",
                fix=f"--set train.optimizer.{key}={value}   # for all adapters",
            )


def _widest(recipe: Recipe, each: Mapping[str, Recipe]) -> Recipe:
    """Return the recipe with the largest numbers of any adapter, and the samples of all
    together."""
    recipes = each.values()
    most = max(one.rollout.samples_per_prompt for one in recipes)
    samples = sum(one.sequences_per_step for one in recipes)
    answers = [one.eval.max_response_tokens for one in recipes]
    rollout = {
        "samples_per_prompt": most,
        "prompts_per_step": -(-samples // most),
        "max_response_tokens": max(one.rollout.max_response_tokens for one in recipes),
        "max_turns": max(one.rollout.max_turns for one in recipes),
    }
    longest_answer = max((bound for bound in answers if bound is not None), default=None)
    longest_prompt = max(one.data.max_prompt_tokens for one in recipes)
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"max_prompt_tokens": longest_prompt}),
            "rollout": recipe.rollout.model_copy(update=rollout),
            "eval": recipe.eval.model_copy(update={"max_response_tokens": longest_answer}),
        }
    )
