"""What travels together from launch, resume or eval to the last process: the run, decided and
prepared."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Holds everything that is known before anything starts, and stays unchanged."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    nodes: RunNodes
    """The computers that the run takes."""
    inputs: RunInputs
    past: StoredCheckpoint | None = None
    """Newest checkpoint, from which it goes on; None: it begins."""
    wished: LoadedRecipe | None = None
    """The recipe with the number of nodes that the user wants, where the run goes on with fewer, as
    some are lost; None: it has all."""

    adapters: Mapping[str, RunSpec] = field(default_factory=dict)
    """Adapters of a run of several: each is a run of its own, within this one's directory. Then the
    run itself learns nothing, and has neither prompts nor checkpoints."""

    @property
    def checkpoint(self) -> StoredCheckpoint | None:
        """The checkpoint of the step from which it goes on; None: its steps begin."""
        return None if self.saved_in_warm_up is not None else self.past

    @property
    def saved_in_warm_up(self) -> StoredCheckpoint | None:
        """What a run that was stopped in its warm-up, or right after it, has saved of it."""
        in_warm_up = self.past is not None and self.past.manifest.warmup_steps is not None
        return self.past if in_warm_up else None

    @property
    def num_steps(self) -> int:
        """Return the number of steps to do; of several adapters, that of the one with the most."""
        recipes = [one.recipe for one in self.adapters.values()] or [self.recipe]
        return max(recipe.train.steps for recipe in recipes)

    @property
    def first_step(self) -> int:
        """Return the number of RL steps that are done."""
        return self.checkpoint.step if self.checkpoint else 0
