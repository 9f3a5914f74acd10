"""Loads objectives by name: what an optimizer step minimises. `train.objective` names one: built in
here, an entry point, or an import path to a factory `(recipe) -> Objective`."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from milescli.core.errors import RecipeError
from milescli.core.plug_points import OBJECTIVES
from milescli.core.user_code import plugin_fix
from milescli.recipe.schema import Recipe
from milescli.train.streams import RANK_STREAMS
from milescli.workers.isolated import IsolatedPlugin

if TYPE_CHECKING:
    from milescli.train.base import Objective, TrainSequence


def load_objective(name: str, recipe: Recipe) -> Objective[Any]:
    """Make the objective called `name` for `recipe`. Raises RecipeError if the objective or one of
    its pieces cannot be loaded or does not fit."""
    factory = cast("Callable[..., Objective[Any]]", OBJECTIVES.resolve(name))
    with OBJECTIVES.guarded(name):
        objective = factory(recipe=recipe)
    lacking = [
        part for part in ("needs", "sequences", "complete", "loss") if not hasattr(objective, part)
    ]
    if lacking:
        raise RecipeError(
            f"`{name}` does not create an objective",
            why=f"it returned {type(objective).__name__}, which has no {', '.join(lacking)}",
            fix="derive from milescli.train.objectives.policy.Policy, or add what is missing",
        )
    if unknown := sorted(set(objective.needs) - set(RANK_STREAMS)):
        raise RecipeError(
            f"the objective `{name}` needs a stream that trainer ranks cannot compute",
            why=f"{', '.join(unknown)}; trainer ranks compute {', '.join(RANK_STREAMS)}",
            fix="compute the other streams in `sequences` or `complete`",
        )
    return objective


def load_in_driver(name: str, recipe: Recipe) -> Objective[Any]:
    """Make an objective for the driver, like `load_objective`. A user's objective makes its
    sequences and keeps its state in a separate process."""
    objective = load_objective(name, recipe)
    if name in OBJECTIVES.builtin:
        return objective
    isolated = IsolatedPlugin(
        OBJECTIVES.path_of(name),
        what=f"the objective `{name}`",
        plugin=objective,
        made_with={"recipe": recipe},
        live=("state",),
    )
    return cast("Objective[Any]", isolated)


def sequences_from(
    objective: Objective[Any], items: Sequence[Any], *, name: str
) -> list[TrainSequence]:
    """Return the sequences that the objective called `name` makes of `items`. Raises RecipeError if
    they cannot be packed."""
    sequences = objective.sequences(items)
    names = set(sequences[0].streams) if sequences else set()
    for number, sequence in enumerate(sequences):
        if fault := _sequence_fault(sequence, names):
            raise RecipeError(
                f"the objective `{name}` created a sequence that cannot be trained on",
                why=f"sequence {number} of {len(sequences)}: {fault}",
                fix=plugin_fix(
                    name, "milescli.train.base.TrainSequence says what `sequences` gives"
                ),
            )
    if not sequences:
        raise RecipeError(
            f"the objective `{name}` created no sequence",
            why=f"it received {len(items)} items, and a step needs something to learn from",
            fix=plugin_fix(name, "in `sequences`, a mask of zeros leaves a sequence out"),
        )
    return sequences


def _sequence_fault(sequence: TrainSequence, names: Set[str]) -> str | None:
    arrays = {"loss_mask": sequence.loss_mask, **sequence.streams}
    num_tokens = len(sequence.token_ids)
    for array, values in arrays.items():
        if len(values) != num_tokens:
            return f"`{array}` has {len(values)} values for {num_tokens} tokens"
    if set(sequence.streams) != names:
        return (
            f"its streams are {', '.join(sorted(sequence.streams)) or 'none'}, those of the first "
            f"sequence {', '.join(sorted(names)) or 'none'}"
        )
    if num_tokens and sequence.loss_mask[0]:
        return "its first token is trained on, and nothing stands before it"
    only_scored = sequence.share == sequence.token_weight == 0
    weighs = sequence.share > 0 or only_scored or not sequence.loss_mask.any()
    if not (weighs and isfinite(sequence.share) and isfinite(sequence.token_weight)):
        return f"its token_weight is {sequence.token_weight} and its share {sequence.share}"
    return None
