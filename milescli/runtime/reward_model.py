"""The model behind the reward `reward_model`: where it lies, and whether it reads the policy's
tokens. Refused before a device is taken."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir
from milescli.checkpoint.store import CheckpointStore
from milescli.core.errors import CheckpointError, RecipeError
from milescli.models import ModelFacts, load_facts
from milescli.models.base import CONFIG_NAME
from milescli.recipe.model import Model
from milescli.recipe.rewards import RewardModelSettings
from milescli.recipe.schema import Recipe
from milescli.rollout.tokenizer import ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from milescli.console.output import Output

NAME = "reward_model"
"""Of the reward, as `rollout.reward` says it."""


def settings_of(recipe: Recipe) -> RewardModelSettings | None:
    """Of the recipe's reward model; None: it asks none."""
    named = [recipe.rollout.reward_weights, *({s.reward: 1} for s in recipe.data.mix or [])]
    is_asked = recipe.has_engines and any(NAME in names for names in named)
    return recipe.rollout.reward_model if is_asked else None


def reward_facts(recipe: Recipe) -> ModelFacts | None:
    """Of the recipe's reward model, without loading it; None: it asks none. Raises RecipeError
    where it gives no score."""
    from milescli.runtime.inputs import facts_of_recipe

    settings = settings_of(recipe)
    if settings is None:
        return None
    assert settings.path is not None, "recipe.check lets no reward model without a path pass"
    run = _run_at(settings.path, recipe)
    if run is None:
        facts = facts_of_recipe(Model(path=settings.path, revision=settings.revision))
    else:
        facts = load_facts(_score_model_of(run))
    if not facts.scores:
        raise RecipeError(
            f"`{settings.path}` is no reward model",
            why="it gives a next token, and no score: its config.json does not name a model for "
            "sequence classification with one label",
            fix="miles launch --recipe RECIPE --set train.objective=reward_model   # trains one",
        )
    return facts


def reward_model_folder(
    recipe: Recipe, run: RunDir, tokenizer: ChatTokenizer, *, output: Output | None
) -> Path | None:
    """The Hugging Face folder of the recipe's reward model, fetched or unpacked where it must be;
    None: it asks none. Raises RecipeError where it reads other tokens than the policy."""
    from milescli.runtime.inputs import model_dir_of

    settings = settings_of(recipe)
    if settings is None:
        return None
    other = _run_at(str(settings.path), recipe)
    folder = (
        model_dir_of(Model(path=settings.path, revision=settings.revision), run, output=output)
        if other is None
        else _unpacked(other, run.reward_model_dir)
    )
    theirs = load_tokenizer(folder).inner.get_vocab()
    ours = tokenizer.inner.get_vocab()
    if theirs != ours:
        raise RecipeError(
            "the reward model reads other tokens than the policy",
            why=f"`rollout.reward_model.path` {settings.path}: {_difference(ours, theirs)}",
            fix="train one on the policy's own model: train.objective=reward_model",
        )
    return folder


def _run_at(path: str, recipe: Recipe) -> RunDir | None:
    """The run that `path` is or names; None: it is none."""
    for folder in (Path(path).expanduser(), Path(recipe.run.dir).expanduser() / path):
        if (folder / RECIPE_FILE).is_file():
            return RunDir(folder.absolute())
    return None


def _score_model_of(run: RunDir) -> Path:
    """The folder that the run's model with a score head was made in."""
    folder = run.score_model_dir
    if (folder / CONFIG_NAME).is_file():
        return folder
    base = run.model_dir()
    if load_facts(base).scores:
        return base
    raise RecipeError(
        f"run `{run.shown}` has no reward model",
        why="it trains a model that gives a next token, and no score",
        fix="name a run of train.objective=reward_model",
    )


def _unpacked(other: RunDir, folder: Path) -> Path:
    """The other run's newest checkpoint as a Hugging Face folder, made once: a run keeps its reward
    model, whatever the other one learns later."""
    if not (folder / CONFIG_NAME).exists():
        from milescli.conversion.unpack import unpack

        newest = CheckpointStore(other.checkpoints).find(None)
        if newest.step == 0:
            raise CheckpointError(
                f"the reward model of run `{other.shown}` has learned nothing yet",
                why="its only checkpoint is that of step 0",
                fix=f"miles resume {other.shown}",
            )
        unpack(newest.path, folder, model_dir=_score_model_of(other), read_back=False)
    return folder


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """The first token that both number otherwise."""
    other = min(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: ours.get(token, len(ours)),
    )
    sizes = f"its vocabulary has {len(theirs)} tokens, the policy's {len(ours)}; "
    return f"{sizes}{other!r} is token {theirs.get(other)} there, {ours.get(other)} here"
