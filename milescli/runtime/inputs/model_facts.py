"""Reads the facts about a recipe's model from its config.json alone, before a run is planned: no
weights are downloaded, made or loaded. `run_inputs` later reads the real files."""

from __future__ import annotations

import shlex
from pathlib import Path

from milescli.backends.hub.models import fetch_config
from milescli.checkpoint.matching import require_kinds
from milescli.checkpoint.weight_files import require_weights
from milescli.core.errors import FitError, RecipeError, nearest
from milescli.core.units import format_count
from milescli.models import ModelFacts, parse_facts, scratch, table
from milescli.models.base import quantization_config, read_config
from milescli.models.latent import with_indexer
from milescli.models.mtp import with_mtp
from milescli.models.score_head import with_score_head
from milescli.models.vision import with_vision
from milescli.plan.on_cpu import longest_tokens
from milescli.recipe.layers import SettingsLayer
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.model import Model, ScratchModel
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import nearest_template, shipped_shape
from milescli.runtime.inputs.auxiliary_models import (
    checkpoint_of,
    is_checkpoint,
    is_run_path,
    launch_that_makes,
)


def facts_of_recipe(model: Model) -> ModelFacts:
    """Return the facts of the recipe's model, by `config_of_recipe`. `prepare` later reads the real
    files."""
    return parse_facts(config_of_recipe(model))


def config_of_recipe(model: Model) -> dict[str, object]:
    """Return the config.json of the recipe's model without making or loading it. For a name on the
    hub: the shape that ships with the recipes, or else that file alone."""
    if model.scratch is not None:
        return scratch.config_of(model.scratch)
    assert model.path is not None, "recipe.check lets no recipe without a model pass"
    folder = Path(model.path).expanduser()
    _refuse_missing(model.path, folder)
    if folder.is_dir():
        return read_config(checkpoint_of(folder).model_dir if is_checkpoint(folder) else folder)
    if model.revision in (None, "main") and (shape := shipped_shape(model.path)):
        return shape
    return read_config(fetch_config(model.path, revision=model.revision))


def _refuse_missing(path: str, folder: Path) -> None:
    """Raise RecipeError if a path is neither a folder nor a possible name on the hub."""
    is_local = (
        path.startswith(("/", ".", "~"))
        or path.count("/") > 1
        or is_run_path(path)
        or (folder.parent.name and folder.parent.is_dir())
    )
    if folder.is_dir() or not is_local:
        return
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    guess = nearest(folder.name, [one.name for one in beside if one.is_dir()])
    near = [f"--set model.path={shlex.quote(str(folder.parent / guess))}"] if guess else []
    if launch := launch_that_makes(folder):
        near.append(launch)
    raise RecipeError(
        f"the model {path} does not exist",
        why="it is a file" if folder.exists() else f"{folder.absolute()} does not exist",
        fix=[*near, "--set model.path=Qwen/Qwen3-0.6B   # a name on the hub, or another folder"],
    )


def require_model(model: Model) -> None:
    """Raise CheckpointError if a local folder has no usable weights, or has integers in their
    place. Takes no time, as it reads only headers."""
    folder = Path(model.path or "").expanduser()
    if model.path is not None and folder.is_dir() and not is_checkpoint(folder):
        is_real, config = require_weights(folder), read_config(folder)
        if quantization_config(config) is None:
            lines = table(parse_facts(config)).as_on_disk(is_real)
            require_kinds(lines, is_real.get, folder=folder)


def require_positions(recipe: Recipe, facts: ModelFacts) -> None:
    """Raise FitError if the longest prompt and response together have more tokens than the model
    has positions."""
    longest, positions = longest_tokens(recipe), facts.max_position_embeddings
    if not 0 < positions < longest:
        return
    prompt = recipe.data.max_prompt_tokens
    response = longest - prompt
    bounds = {
        "rollout.max_response_tokens": recipe.rollout.max_response_tokens,
        "eval.max_response_tokens": recipe.eval.max_response_tokens or 0,
    }

    def shorter(most: int) -> str:
        return " ".join(f"--set {key}={most}" for key, value in bounds.items() if value > most)

    fixes = [shorter(positions - prompt)] if prompt < positions else []
    if response < positions:
        fixes.append(f"--set data.max_prompt_tokens={positions - response}")
    raise FitError(
        "prompts and responses exceed the model's positions",
        why=f"data.max_prompt_tokens {prompt} + {max(bounds, key=bounds.__getitem__)} {response} = "
        f"{longest}; the model has only {positions}",
        fix=fixes
        or [f"--set data.max_prompt_tokens={positions // 2} {shorter(positions - positions // 2)}"],
    )


REAL = 10
"""A model with this many times the parameters of the default `model.scratch` counts as
pretrained."""


def refuse_settings_of_scratch(loaded: LoadedRecipe, facts: ModelFacts) -> None:
    """Raise RecipeError if the command line puts a pretrained model into a recipe that makes its
    own small one, but leaves the learning rate that suits random weights."""
    recipe, origins = loaded.recipe, loaded.origins
    lr = origins["train.optimizer.lr"]
    replaced = origins["model.scratch.hidden_size"].layer not in _BELOW
    if recipe.model.path is None or not replaced or lr.layer is not SettingsLayer.RECIPE:
        return
    num, own = (
        table(one).num_parameters for one in (facts, parse_facts(scratch.config_of(ScratchModel())))
    )
    if num < REAL * own:
        return
    fixes = [f"--set train.optimizer.lr=1e-6   # or {recipe.train.optimizer.lr:g} if you mean it"]
    if recipe.train.objective == "policy":
        fixes.insert(0, _with_own_recipe(loaded, nearest_template(facts.family, num)))
    raise RecipeError(
        f"the recipe `{loaded.source}` is designed for a model from scratch",
        why=f"{lr} sets train.optimizer.lr={recipe.train.optimizer.lr:g} for random weights of "
        f"{format_count(own)} parameters; {recipe.model.path} is pretrained and has "
        f"{format_count(num)}, and such steps would undo its training",
        fix=fixes,
    )


_BELOW = (SettingsLayer.DEFAULT, SettingsLayer.ALGORITHM, SettingsLayer.RECIPE)
_OF_SCRATCH = ("model.scratch", "warmup", "model.path")


def _with_own_recipe(loaded: LoadedRecipe, name: str) -> str:
    """Return the command line with another recipe, and all settings except those that replaced the
    model from scratch."""
    words = [
        origin.where
        for key, origin in loaded.origins.items()
        if origin.layer is SettingsLayer.SET and not key.startswith(_OF_SCRATCH)
    ]
    model = f"--set model.path={shlex.quote(str(loaded.recipe.model.path))}"
    return " ".join([f"miles launch --recipe {name}", model, *dict.fromkeys(words)])


def planned_facts(recipe: Recipe) -> ModelFacts:
    """Return the facts of the trained model: with a score head if the objective needs one, and with
    its MTP layer, vision tower or indexers if those are trained."""
    facts = with_vision(facts_of_recipe(recipe.model), recipe.model.vision)
    facts = with_indexer(facts, recipe.model.indexer)
    if recipe.train.mtp.is_on:
        return with_mtp(facts)
    return with_score_head(facts) if recipe.trains_scores else facts
