"""One model that is trained on a rank, whole: its part of the weights, the optimizer, its passes,
its place in checkpoints and on the device. A rank has one for the policy, and one for a critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from milescli.backends.megatron import model, optimizer, replay, stepping, weights
from milescli.backends.megatron.checkpoint import CheckpointIO
from milescli.backends.megatron.forward import Passes
from milescli.backends.megatron.gathering import hf_buckets
from milescli.backends.megatron.layer_specs import load_layer_spec
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.microbatch import Microbatch
from milescli.backends.megatron.sleeping import Sleeper
from milescli.backends.megatron.weights import TIED_OUTPUT
from milescli.models import load_facts, table
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Optimizer
from milescli.weights.base import Bucket

_MIB = 2**20


class TrainedModel:
    """Made of a Hugging Face folder; its weights are the folder's."""

    def __init__(
        self,
        folder: Path,
        *,
        recipe: Recipe,
        plan: Plan,
        mesh: Mesh,
        dtype: torch.dtype,
        rule: Optimizer,
    ) -> None:
        """`rule`: the optimizer, which may be another than the recipe's. Raises CheckpointError for
        a folder that cannot be trained."""
        self.folder, self.mesh = folder, mesh
        self.facts = load_facts(folder)
        self.table = table(self.facts)
        self._bucket_bytes = recipe.weights.bucket_mib * _MIB
        config = model.build_config(
            self.facts,
            plan.trainer,
            dtype=dtype,
            device=mesh.device,
            recompute=plan.trainer.recompute,
            routing_replay=recipe.train.routing_replay and not self.facts.scores,
        )
        change = load_layer_spec(recipe.model.layer_spec)
        gpt = model.build_model(config, self.facts, mesh, change_layer=change)
        self.weights = weights.local_weights(gpt, self.table, mesh)
        weights.load_hf(self.weights, self.table, folder=folder, mesh=mesh)
        self.model = optimizer.wrap(gpt)
        self.optimizer = optimizer.make_optimizer(
            self.model, rule, dtype=dtype, on_host=plan.trainer.offload_optimizer
        )
        self.sleeper = Sleeper(self.model, self.optimizer)
        self.checkpoints = CheckpointIO(
            self.model, self.optimizer, timeout_s=recipe.machine.step_timeout_s
        )
        self.passes = Passes(
            model=self.model,
            mesh=mesh,
            vocab_size=self.facts.vocab_size,
            gives_scores=self.facts.scores,
            routers=replay.own_routers(gpt),
        )

    def gradients(
        self,
        microbatches: Sequence[Microbatch],
        loss: stepping.UpdateLoss,
        *,
        temperature: float,
    ) -> None:
        """Of one update, over all ranks. Raises NotFiniteError where they would spoil the
        weights."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.passes.train(microbatches, loss, temperature=temperature)
        loss.require_finite()
        optimizer.require_finite_gradients(self.model, device=self.mesh.device)

    def update(self, lr: float) -> float:
        """One step of the optimizer along the gradients. Returns their norm before clipping."""
        optimizer.set_lr(self.optimizer, lr)
        _, grad_norm, _ = self.optimizer.step()
        return float(grad_norm)

    def reset_optimizer(self) -> None:
        """Forget the moments."""
        optimizer.forget_moments(self.optimizer)

    @torch.no_grad()
    def take_trunk(self, other: TrainedModel) -> None:
        """The other model's weights, but for the head: of the same family and layout."""
        theirs = dict(other.model.module.named_parameters())
        for name, parameter in self.model.module.named_parameters():
            if name != TIED_OUTPUT:
                parameter.copy_(theirs[name])
        self.optimizer.reload_model_params()

    def buckets(self) -> Iterator[Bucket]:
        """The whole model under Hugging Face names. Collective: all ranks consume all of it."""
        return hf_buckets(self.weights, self.table, mesh=self.mesh, bucket_bytes=self._bucket_bytes)
