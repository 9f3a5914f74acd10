"""What an optimizer step can minimise, by name. `train.objective` names one: built in here, an
entry point, or an import path to a factory `(recipe) -> Objective`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from milescli.core.errors import MilesError, RecipeError
from milescli.core.registry import Registry
from milescli.core.user_code import user_traceback
from milescli.recipe.schema import Recipe
from milescli.train.base import Objective
from milescli.train.streams import FROM_RANKS

OBJECTIVES = Registry(
    "objective",
    {
        "policy": "milescli.train.objectives.policy:Policy",
        "supervised": "milescli.train.objectives.supervised:Supervised",
    },
    signature=("recipe",),
)


def load_objective(name: str, recipe: Recipe) -> Objective[Any]:
    """The objective that `name` names, made for `recipe`. Raises RecipeError where it, or a piece
    of it, cannot be had or is none."""
    factory = OBJECTIVES.resolve(name, key="train.objective")
    objective = cast(Callable[..., Objective[Any]], factory)(recipe=recipe)
    lacking = [
        part for part in ("needs", "sequences", "complete", "loss") if not hasattr(objective, part)
    ]
    if lacking:
        raise RecipeError(
            f"`{name}` does not make an objective",
            why=f"it returned {type(objective).__name__}, which has no {', '.join(lacking)}",
            fix="derive from milescli.train.objectives.policy.Policy, or give it what is missing",
        )
    if unknown := sorted(set(objective.needs) - set(FROM_RANKS)):
        raise RecipeError(
            f"the objective `{name}` needs what no trainer rank can give",
            why=f"{', '.join(unknown)}; ranks compute {', '.join(FROM_RANKS)}",
            fix="make the other streams in `sequences` or `complete`",
        )
    return objective


@contextmanager
def failures_named(name: str) -> Iterator[None]:
    """Around calls of an objective: what one of the user's raises becomes a RecipeError with its
    traceback. What a built-in one raises is our fault, and flies."""
    try:
        yield
    except MilesError:
        raise
    except Exception as error:  # whatever the user's code raises
        if name in OBJECTIVES.builtin:
            raise
        raise RecipeError(
            f"the objective `{name}` failed",
            why=user_traceback(error, callers=(__file__,)),
            fix="mend it, then start or resume the run",
        ) from error
