"""Rules of `train.lora`. Pure; the first broken one is raised. Called by `check`."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe


def check_lora(recipe: Recipe) -> None:
    """Raises RecipeError."""
    lora = recipe.train.lora
    if recipe.model.adapter is not None and not lora.is_on:
        raise RecipeError(
            f"`model.adapter={recipe.model.adapter}` in a run that trains all weights",
            why="an adapter is begun with where one is trained",
            fix=[
                "--lora RANK   # that of the adapter",
                f"miles export {recipe.model.adapter} --to DIR --merge   # then --set "
                "model.path=DIR",
            ],
        )
    if not lora.is_on:
        return
    if lora.type == "dora":
        raise RecipeError(
            "`train.lora.type=dora` cannot be served",
            why="DoRA scales each column of W + B A to a length of its own (arXiv 2402.09353), and "
            "SGLang 0.5.20 serves W x + B A x alone: it would sample from another policy",
            fix=["--set train.lora.type=lora", "--set train.lora.type=rslora"],
        )
    if recipe.trains_scores:
        raise RecipeError(
            f"`train.objective={recipe.train.objective}` trains no adapter",
            why="its model begins with a new score head, which must be trained, too, and an "
            "adapter leaves everything else as it is",
            fix="--set train.lora.rank=null",
        )
    if lora.dropout and not recipe.learns_from_rows:
        raise RecipeError(
            f"`train.lora.dropout={lora.dropout}` in a run that learns from samples",
            why="the engine samples without dropout, so that the trainer's log-probs would be of "
            "another policy than the one that sampled",
            fix="--set train.lora.dropout=0",
        )
    if recipe.weights.format != "hf":
        raise RecipeError(
            f"`weights.format={recipe.weights.format}` with an adapter",
            why="engines are sent the adapter's matrices as they are, and no weight of the model",
            fix=["--set weights.format=hf", "--set train.lora.rank=null"],
        )
    if lora.publish == "merged" and recipe.adapters:
        raise RecipeError(
            "`train.lora.publish=merged` with several adapters",
            why="one set of engines serves them all, each beside the same frozen model",
            fix="--set train.lora.publish=auto",
        )
    layout = recipe.parallel
    if (layout.etp or 1) > (layout.tp or layout.etp or 1):
        raise RecipeError(
            f"`parallel.etp={layout.etp}` above `parallel.tp={layout.tp}` with an adapter",
            why="the norm of the gradient would count adapters of experts more than once",
            fix=f"--set parallel.etp={layout.tp}",
        )


def doubt_about_lora(recipe: Recipe) -> str | None:
    """What was probably not meant; None: nothing."""
    if not recipe.train.lora.is_on or recipe.model.scratch is None:
        return None
    return (
        "the adapter is trained over random weights (`model.scratch`), which it cannot make a "
        "model of; begin with one that was trained: --set model.scratch=null --set "
        "model.path=RUN --set warmup.steps=0"
    )
