"""What a recipe's model is, read of its config.json alone: before a run is planned, nothing is
fetched, made or loaded. `run_inputs` reads what was fetched in the end."""

from __future__ import annotations

from pathlib import Path

from milescli.backends.hub.models import fetch_config
from milescli.checkpoint.weight_files import require_weights
from milescli.models import ModelFacts, parse_facts, scratch
from milescli.models.base import read_config
from milescli.models.mtp import with_mtp
from milescli.models.score_head import with_score_head
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import shipped_shape
from milescli.runtime.inputs.given_models import checkpoint_of, is_checkpoint


def facts_of_recipe(model: Model) -> ModelFacts:
    """Return the facts of the recipe's model, by `config_of_recipe`. `prepare` reads what was
    fetched in the end."""
    return parse_facts(config_of_recipe(model))


def config_of_recipe(model: Model) -> dict[str, object]:
    """Return the config.json of the recipe's model without making or loading it: of a name on the
    hub, the shape that ships with the recipes, else that file alone."""
    if model.scratch is not None:
        return scratch.config_of(model.scratch)
    assert model.path is not None, "recipe.check lets no recipe without a model pass"
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return read_config(checkpoint_of(folder).model_dir if is_checkpoint(folder) else folder)
    if model.revision in (None, "main") and (shape := shipped_shape(model.path)):
        return shape
    return read_config(fetch_config(model.path, revision=model.revision))


def require_model(model: Model) -> None:
    """Raises CheckpointError where a folder of this computer has no usable weights; takes no time,
    as headers alone are read."""
    folder = Path(model.path or "").expanduser()
    if model.path is not None and folder.is_dir() and not is_checkpoint(folder):
        require_weights(folder)


def planned_facts(recipe: Recipe) -> ModelFacts:
    """Return the facts of the model that is trained: with a score head where the objective wants
    one, with its MTP layer where that is trained."""
    facts = facts_of_recipe(recipe.model)
    if recipe.train.mtp.is_on:
        return with_mtp(facts)
    return with_score_head(facts) if recipe.trains_scores else facts
