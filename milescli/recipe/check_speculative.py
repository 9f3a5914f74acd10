"""Rules of `rollout.speculative`. Pure; called by `check`. What the model and its device have to do
with it is `backends.sglang.speculation`'s to say."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe
from milescli.recipe.speculative import SpeculativeSettings

_KEY = "rollout.speculative"


def check_speculative(recipe: Recipe) -> None:
    """Raises RecipeError where engines could not guess as the recipe says."""
    settings = recipe.rollout.speculative
    _of_kind(settings)
    if settings.kind == "none":
        return
    if recipe.learns_from_rows:
        raise RecipeError(
            "nothing is sampled that could be guessed ahead",
            why=f"`{_KEY}.kind` is {settings.kind}, and `data.train` has the rows to learn from; "
            "evaluations guess nothing",
            fix=f"--set {_KEY}.kind=none",
        )
    if recipe.train.lora.is_on and settings.kind != "ngram":
        raise RecipeError(
            f"engines that serve an adapter cannot guess by {settings.kind}",
            why="SGLang 0.5.20 serves none beside a draft model"
            if settings.kind == "draft"
            else "an MTP layer beside an adapter was never tried",
            fix=[f"--set {_KEY}.kind=ngram", "--set train.lora.rank=null"],
        )
    if (recipe.engines.attention_dp or 1) > 1 and settings.kind != "mtp":
        raise RecipeError(
            f"engines whose devices share out the requests cannot guess by {settings.kind}",
            why=f"`engines.attention_dp` is {recipe.engines.attention_dp}, and SGLang has that "
            "with MTP layers alone",
            fix=[f"--set {_KEY}.kind=none", "--set engines.attention_dp=1"],
        )
    if settings.kind == "mtp" and recipe.weights.channel == "distributed":
        raise RecipeError(
            "new weights would not reach the layer that guesses",
            why="`weights.channel` is distributed, by which SGLang updates the model alone, "
            "without its MTP layer",
            fix=["--set weights.channel=tensor", f"--set {_KEY}.kind=ngram"],
        )


def _of_kind(settings: SpeculativeSettings) -> None:
    if settings.kind == "draft" and not (settings.model or "").strip():
        raise RecipeError(
            "no model is named that guesses",
            why=f"`{_KEY}.kind` is draft, and `{_KEY}.model` says which one",
            fix=[f"--set {_KEY}.model=FOLDER", f"--set {_KEY}.kind=ngram"],
        )
    if settings.kind != "draft" and settings.model is not None:
        raise RecipeError(
            f"`{_KEY}.model` is `{settings.model}`, and no model guesses",
            why=f"`{_KEY}.kind` is {settings.kind}",
            fix=[f"--set {_KEY}.kind=draft", f"--set {_KEY}.model=null"],
        )
    if settings.revision is not None and settings.model is None:
        raise RecipeError(
            f"`{_KEY}.revision` is `{settings.revision}`, but nothing is downloaded",
            why=f"a revision belongs to `{_KEY}.model`",
            fix=f"--set {_KEY}.revision=null",
        )
    defaults = SpeculativeSettings()
    for name in ("ngram_breadth", "ngram_length"):
        if settings.kind != "ngram" and getattr(settings, name) != getattr(defaults, name):
            raise RecipeError(
                f"`{_KEY}.{name}` has no n-grams to be about",
                why=f"`{_KEY}.kind` is {settings.kind}",
                fix=[f"--set {_KEY}.kind=ngram", f"--set {_KEY}.{name}={getattr(defaults, name)}"],
            )
    if settings.kind == "ngram" and settings.guesses and settings.ngram_breadth > settings.guesses:
        raise RecipeError(
            f"{settings.guesses} guesses have no {settings.ngram_breadth} ways to go on",
            why=f"`{_KEY}.ngram_breadth` is larger than `{_KEY}.guesses`",
            fix=f"--set {_KEY}.ngram_breadth={settings.guesses}",
        )
