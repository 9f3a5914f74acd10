"""Rules of runs that learn from rows of a file instead of what engines sample."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe
from milescli.recipe.train import OF_PAIRS, OF_ROWS


def check_rows(recipe: Recipe) -> None:
    """Raises RecipeError."""
    _one_source(recipe)
    if recipe.learns_from_rows:
        _one_update(recipe)
        _no_imitation_of_scores(recipe)
        _evaluation(recipe)
    elif recipe.train.epochs is not None or recipe.data.validation is not None:
        key = "train.epochs" if recipe.train.epochs is not None else "data.validation"
        raise RecipeError(
            f"`{key}` is of runs that learn from rows",
            why="`data.train` is not set, and engines sample as long as `train.steps` says",
            fix=[f"--set {key}=null", "--set data.train=FILE.jsonl --set data.prompts=null"],
        )


def _one_source(recipe: Recipe) -> None:
    data, objective = recipe.data, recipe.train.objective
    of_rows = objective in OF_ROWS
    if data.train is not None and (data.prompts is not None or data.mix):
        key = "prompts" if data.prompts is not None else "mix"
        raise RecipeError(
            "the recipe has two things to learn from",
            why=f"`data.train` is {data.train}, and `data.{key}` is set: rows are learned from as "
            "they are, prompts are answered by engines",
            fix=[f"--set data.{key}=null", "--set data.train=null"],
        )
    if of_rows and data.train is None:
        what = "pairs" if objective in OF_PAIRS else "chats or texts"
        raise RecipeError(
            f"`train.objective={objective}` has nothing to learn from",
            why=f"it takes {what} from `data.train`, which is not set",
            fix=[
                f"--set data.train={data.prompts or 'FILE.jsonl'} --set data.prompts=null",
                "--set train.objective=policy   # to learn from what engines sample",
            ],
        )
    if data.train is not None and objective == "policy":
        raise RecipeError(
            "`train.objective=policy` does not learn from rows",
            why=f"it reinforces what engines sample, and `data.train` is {data.train}",
            fix=[
                "--set train.objective=supervised   # to imitate them",
                f"--set data.prompts={data.train} --set data.train=null",
            ],
        )


def _one_update(recipe: Recipe) -> None:
    if recipe.train.updates_per_step > 1:
        raise RecipeError(
            "rows are not parted into several updates",
            why=f"`train.updates_per_step` is {recipe.train.updates_per_step}; a step of "
            f"`train.objective={recipe.train.objective}` is one update of `train.batch_size` rows",
            fix=[
                "--set train.updates_per_step=1",
                f"--set train.batch_size="
                f"{max(1, recipe.train.batch_size // recipe.train.updates_per_step)}",
            ],
        )


def _no_imitation_of_scores(recipe: Recipe) -> None:
    if recipe.trains_scores and recipe.warmup.steps:
        raise RecipeError(
            f"`train.objective={recipe.train.objective}` has no warm-up",
            why=f"`warmup.steps` is {recipe.warmup.steps}: it imitates responses, and a model that "
            "gives a score writes none",
            fix="--set warmup.steps=0   # begin with a model that was trained before",
        )


def _evaluation(recipe: Recipe) -> None:
    data = recipe.data
    if recipe.eval.every and data.eval is None and data.validation is None:
        raise RecipeError(
            f"an evaluation every {recipe.eval.every} steps has nothing to evaluate on",
            why="`eval.every` needs held-out rows in `data.validation`, or prompts in `data.eval`",
            fix=["--set data.validation=FILE.jsonl", "--set eval.every=0"],
        )
    if data.eval is not None and recipe.trains_scores:
        raise RecipeError(
            f"`train.objective={recipe.train.objective}` answers no prompts",
            why=f"its model gives a score instead of a next token, and `data.eval` is {data.eval}",
            fix="--set data.eval=null   # data.validation measures it on held-out pairs",
        )
    if data.validation is not None and data.validation == data.train:
        raise RecipeError(
            "`data.validation` is `data.train`",
            why="the loss would be of rows that were trained on",
            fix="--set data.validation=FILE.jsonl   # other rows",
        )
