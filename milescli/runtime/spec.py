"""Holds everything that launch, resume or eval pass on to the processes of a run: the run, its plan
and its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import StoredCheckpoint
from milescli.cluster.nodes import RunNodes
from milescli.plan.types import Plan
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.run_inputs import RunInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Holds everything that is known before anything starts; immutable."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    nodes: RunNodes
    """The computers of the run."""
    inputs: RunInputs
    past: StoredCheckpoint | None = None
    """Newest checkpoint, from which the run continues; None: a new run."""
    full_recipe: LoadedRecipe | None = None
    """The recipe with the number of nodes that the user wants, if the run continues with fewer
    because some are lost; None: it has all of them."""

    adapters: Mapping[str, RunSpec] = field(default_factory=dict)
    """Adapters of a run with several: each is a run of its own, within this one's directory. The
    run itself then learns nothing, and has neither prompts nor checkpoints."""
    evaluated: Sequence[Recipe] = ()
    """Recipes of the sets of an evaluation, which the same engines sample one after the other."""

    @property
    def sampled_by(self) -> list[Recipe]:
        """Return every recipe by which the engines sample: the run's own, those of its adapters,
        and those of evaluated sets."""
        return [self.recipe, *(one.recipe for one in self.adapters.values()), *self.evaluated]

    @property
    def checkpoint(self) -> StoredCheckpoint | None:
        """Return the checkpoint from which the steps continue; None if no step was taken yet."""
        return None if self.saved_in_warm_up is not None else self.past

    @property
    def saved_in_warm_up(self) -> StoredCheckpoint | None:
        """Return the checkpoint of a run stopped in its warm-up, or right after it; else None."""
        in_warm_up = self.past is not None and self.past.manifest.warmup_steps is not None
        return self.past if in_warm_up else None

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the run; with several adapters, the largest."""
        recipes = [one.recipe for one in self.adapters.values()] or [self.recipe]
        return max(recipe.train.steps for recipe in recipes)

    @property
    def first_step(self) -> int:
        """Return the number of RL steps that are done already."""
        return self.checkpoint.step if self.checkpoint else 0
