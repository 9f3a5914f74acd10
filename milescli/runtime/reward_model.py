"""The model behind the reward `reward_model`, before any process starts. Called by `inputs` and
`planning`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.models import ModelFacts
from milescli.plan.on_cpu import longest_tokens
from milescli.recipe.schema import Recipe
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.runtime.held_models import HeldModelPath

if TYPE_CHECKING:
    from milescli.console.output import Output


def reward_path(recipe: Recipe) -> HeldModelPath | None:
    """Where it lies; None: the recipe asks none."""
    if not recipe.asks_reward_model:
        return None
    asked = recipe.rollout.reward_model
    assert asked.path is not None, "recipe.check lets no reward model without a path pass"
    return HeldModelPath(
        what="reward model",
        key="rollout.reward_model.path",
        path=asked.path,
        revision=asked.revision,
    )


def reward_facts(recipe: Recipe) -> ModelFacts | None:
    """Of the recipe's reward model, without loading it; None: it asks none. Raises RecipeError
    where it gives no score."""
    path = reward_path(recipe)
    if path is None:
        return None
    if not (facts := path.facts(longest_tokens(recipe))).scores:
        raise RecipeError(
            f"`{path.path}` is no reward model",
            why="it gives a next token, and no score: its config.json does not name a model for "
            "sequence classification with one label",
            fix="miles launch --recipe RECIPE --set train.objective=reward_model   # trains one",
        )
    return facts


def reward_model_folder(
    recipe: Recipe, run: RunDir, tokenizer: ChatTokenizer, *, output: Output | None
) -> Path | None:
    """The Hugging Face folder of the recipe's reward model; None: it asks none. Raises RecipeError
    where it reads other tokens than the policy."""
    path = reward_path(recipe)
    if path is None:
        return None
    folder = path.folder(run.held_model_dir("reward-model", path.path), output=output)
    path.refuse_other_tokens(folder, tokenizer=tokenizer, least=tokenizer.vocab_size)
    return folder
