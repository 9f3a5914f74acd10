"""Builds the models of one trainer rank from the recipe, and switches between several adapters of
one model. Called by `worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milescli.backends.megatron.layer_specs import DEFAULT
from milescli.backends.megatron.learner import Learner
from milescli.backends.megatron.loaded_model import LoadedModel
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.checkpoint import CheckpointIO
from milescli.backends.megatron.state.snapshot import Reference, Snapshot
from milescli.backends.megatron.trained_model import TrainedModel
from milescli.models import ModelFacts, load_facts
from milescli.plan.legal import check_layout
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModels:
    """Holds the models of a rank. Except on a CPU, all but the policy wait in host memory."""

    policy: TrainedModel
    critic: TrainedModel | None
    draft: TrainedModel | None
    teachers: list[LoadedModel]


def build_models(
    *,
    policy: Path,
    critic: Path | None,
    draft: Path | None,
    teachers: Sequence[Path],
    recipe: Recipe,
    plan: Plan,
    mesh: Mesh,
    dtype: torch.dtype,
    facts: ModelFacts,
) -> RankModels:
    """Build the models from their folders. `facts`: those of the policy. Raises FitError for a
    model that does not fit the layout, CheckpointError for a folder that cannot be read."""
    made: dict[str, Any] = {"recipe": recipe, "plan": plan, "mesh": mesh, "dtype": dtype}
    train = recipe.train
    frozen = list[LoadedModel]()
    for folder in teachers:
        check_layout(plan.trainer, load_facts(folder))
        frozen.append(LoadedModel(folder, mesh=mesh, dtype=dtype))
    its_critic = TrainedModel(critic, rule=train.optimizer, **made) if critic is not None else None
    its_draft = None
    if draft is not None:
        check_layout(plan.trainer, load_facts(draft))
        plain = recipe.model.model_copy(update={"layer_spec": DEFAULT})
        own = {**made, "recipe": recipe.model_copy(update={"model": plain})}
        its_draft = TrainedModel(draft, rule=train.optimizer, **own)
    for model in filter(None, (*frozen, its_draft)):
        # rows beyond are padding, of which the policy's output layer may have fewer
        model.passes.vocab_size = facts.vocab_size
    for model in filter(None, (*frozen, its_critic)):
        if mesh.device.type != "cpu":
            model.sleeper.sleep()
    # the policy last: replay finds the routers of the model that was built last
    lora = train.lora if train.lora.is_on else None
    mtp = train.mtp if train.mtp.is_on else None
    its_policy = TrainedModel(
        policy, rule=train.optimizer, lora=lora, mtp=mtp, is_policy=True, **made
    )
    return RankModels(policy=its_policy, critic=its_critic, draft=its_draft, teachers=frozen)


LearnerOf = Callable[[Recipe, Reference], Learner]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """Holds what belongs to one adapter alone."""

    learner: Learner
    checkpoints: CheckpointIO
    state: Snapshot
    """Matrices, moments and random state at the end of the adapter's last turn."""


class AdapterSwitcher:
    """Switches between all adapters of a rank."""

    def __init__(
        self,
        policy: TrainedModel,
        recipes: Mapping[str, Recipe],
        *,
        learner_of: LearnerOf,
        device: torch.device,
    ) -> None:
        """Start each adapter as a run of its own would: from its recipe's seed, or from its
        `model.adapter`. The first one is active."""
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
        """Return the learner of the active adapter."""
        return self._all[self.name].learner

    def take(self, name: str) -> None:
        """Activate an adapter. A save of another adapter continues."""
        self._policy.checkpoints = self._all[name].checkpoints
        if name != self.name:
            self._all[self.name].state.take()
            self._all[name].state.restore()
            self.name = name
