"""Several adapters that take turns in one model: the one whose turn it is lies in the model and its
optimizer, the others in host memory. Every rank changes turns at the same calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from milescli.backends.megatron.checkpoint import CheckpointIO
from milescli.backends.megatron.learner import Learner
from milescli.backends.megatron.reference import Reference
from milescli.backends.megatron.snapshot import Snapshot
from milescli.backends.megatron.trained import TrainedModel
from milescli.recipe.schema import Recipe

LearnerOf = Callable[[Recipe, Reference], Learner]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """One of them: what of it is never in another's place."""

    learner: Learner
    checkpoints: CheckpointIO
    state: Snapshot
    """Matrices, moments and random numbers, as they were at the end of its last turn."""


class AdapterTurns:
    """All adapters of a rank."""

    def __init__(
        self,
        policy: TrainedModel,
        recipes: Mapping[str, Recipe],
        *,
        learner_of: LearnerOf,
        device: torch.device,
    ) -> None:
        """Each begins as in a run of its own: by its recipe's seed, or from its `model.adapter`. It
        is the turn of the first."""
        assert recipes, "turns of nobody"
        self._policy = policy
        self._all = dict[str, _Adapter]()
        for name, recipe in recipes.items():
            folder = recipe.model.adapter
            policy.begin_adapter(recipe.run.seed, Path(folder).expanduser() if folder else None)
            state = Snapshot(
                [policy], Reference(policy.model), awake=lambda _: nullcontext(), device=device
            )
            state.take()
            self._all[name] = _Adapter(
                learner=learner_of(recipe, Reference(policy.model)),
                checkpoints=policy.new_checkpoints(),
                state=state,
            )
        self.name = name
        self.take(next(iter(recipes)))

    @property
    def learner(self) -> Learner:
        """Of the one whose turn it is."""
        return self._all[self.name].learner

    def take(self, name: str) -> None:
        """It is the turn of this one; a save of another goes on."""
        self._policy.checkpoints = self._all[name].checkpoints
        if name != self.name:
            self._all[self.name].state.take()
            self._all[name].state.put_back()
            self.name = name
