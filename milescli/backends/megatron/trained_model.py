"""One model that is trained on a rank, with its optimizer and its checkpoints. A rank has one for
the policy, and one for a critic."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from milescli.backends.megatron.architecture.lora import Adapters
from milescli.backends.megatron.architecture.quantised import PolicyFormats
from milescli.backends.megatron.loaded_model import LoadedModel
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state import optimizer
from milescli.backends.megatron.state.checkpoint import CheckpointIO
from milescli.backends.megatron.state.gathering import hf_buckets, merged_buckets
from milescli.backends.megatron.state.saving import release_state
from milescli.backends.megatron.state.shards import ShardPlan
from milescli.backends.megatron.state.sleeping import Sleeper
from milescli.backends.megatron.state.update_rules import Weights
from milescli.backends.megatron.state.weights import TIED_OUTPUT
from milescli.backends.megatron.step import stepping
from milescli.backends.megatron.step.microbatch import Microbatch
from milescli.models import load_facts
from milescli.models.adapter import adapter_table
from milescli.models.base import WeightTable
from milescli.plan.memory import bucket_bytes, shape_of
from milescli.plan.types import Plan
from milescli.recipe.lora import Lora
from milescli.recipe.schema import Recipe
from milescli.recipe.speculative import Mtp
from milescli.recipe.train import Optimizer
from milescli.weights.base import Bucket
from milescli.weights.shards import Shards


class TrainedModel(LoadedModel):
    """Holds a model that is trained, which starts from a Hugging Face folder's weights."""

    def __init__(
        self,
        folder: Path,
        *,
        recipe: Recipe,
        plan: Plan,
        mesh: Mesh,
        dtype: torch.dtype,
        rule: Optimizer,
        lora: Lora | None = None,
        mtp: Mtp | None = None,
        is_policy: bool = False,
    ) -> None:
        """Load the folder. `rule`: the optimizer, which may differ from the recipe's; `lora`: train
        an adapter, and no weight of the folder; `mtp`: train the MTP layer; `is_policy`: use the
        plan's number formats, in which only the policy multiplies and is published. Raises
        CheckpointError for a folder that cannot be trained, RecipeError if the adapter does not
        fit."""
        super().__init__(
            folder,
            mesh=mesh,
            dtype=dtype,
            recompute=plan.trainer.recompute,
            layer_spec=recipe.model.layer_spec,
            own_layers=lora is not None or (is_policy and plan.trainer_format is not None),
            mtp=mtp,
            vision=recipe.model.vision if is_policy else "frozen",
            indexer=recipe.model.indexer if is_policy else "frozen",
            replays_routing=recipe.train.routing_replay and not load_facts(folder).scores,
        )
        self._bucket_bytes = bucket_bytes(
            recipe.weights.bucket_mib, on_cpu=plan.device_kind == "cpu"
        )
        self._shard_plans: dict[object, ShardPlan | None] = {}
        self.merges_adapter = plan.merges_adapter
        self.formats = PolicyFormats(self.table, plan, recipe, folder=folder) if is_policy else None
        self.rounded = (
            self.formats.round_layers(self.model, self.weights, mesh=mesh)
            if self.formats is not None
            else None
        )
        self.adapters = None
        if lora is not None:
            self.adapters = Adapters(
                self.model,
                self.weights,
                adapter_table(self.table, shape_of(lora)),
                shape=shape_of(lora),
                mesh=mesh,
                folder=folder,
                seed=recipe.run.seed,
                dropout=lora.dropout,
            )
            self.passes.adapters = self.adapters
            if recipe.model.adapter is not None:
                self.adapters.load_peft(Path(recipe.model.adapter).expanduser())
        self.model = self.passes.model = optimizer.wrap(self.model)
        self.optimizer = optimizer.make_optimizer(
            self.model,
            rule,
            weights=Weights(local=self.weights, mesh=mesh),
            dtype=dtype,
            on_host=plan.trainer.offload_optimizer,
        )
        self.sleeper = Sleeper(self.model, self.optimizer)
        self._save_timeout_s = recipe.machine.step_timeout_s
        self.checkpoints = self.new_checkpoints()

    def new_checkpoints(self) -> CheckpointIO:
        """Return another writer of checkpoints, which may run beside the others."""
        return CheckpointIO(
            self.model,
            self.optimizer,
            timeout_s=self._save_timeout_s,
            adapters=self.adapters,
        )

    def begin_adapter(self, seed: int, folder: Path | None) -> None:
        """Replace the adapter, which must not be trained yet, by a new one, or by that of a PEFT
        `folder`."""
        assert self.adapters is not None, "a model without an adapter"
        release_state()
        self.adapters.reset(seed)
        if folder is not None:
            self.adapters.load_peft(folder)
        self.optimizer.reload_model_params()

    def gradients(
        self,
        microbatches: Sequence[Microbatch],
        loss: stepping.UpdateLoss,
        *,
        temperature: float,
    ) -> None:
        """Compute the gradients of one update over all ranks. Raises NotFiniteError if they are not
        finite."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.passes.train(microbatches, loss, temperature=temperature, candidates=loss.candidates)
        loss.require_finite()
        optimizer.require_finite_gradients(self.model, device=self.mesh.device)

    def update(self, lr: float) -> float:
        """Make one optimizer step. Return the gradient norm before clipping. Raises WaitTimeout if
        a checkpoint in progress delays it too long."""
        release_state()
        optimizer.set_lr(self.optimizer, lr)
        _, grad_norm, _ = self.optimizer.step()
        return float(grad_norm)

    def reset_optimizer(self) -> None:
        """Reset the moments."""
        optimizer.reset_moments(self.optimizer)

    @torch.no_grad()
    def copy_trunk(self, other: TrainedModel) -> None:
        """Copy the weights of another model of the same family and layout, with its adapter merged
        in, except the head. The layers of the models may be of different kinds."""
        release_state()
        theirs = {weight.entry.megatron: weight for weight in other.weights}
        for weight in self.weights:
            if weight.name != TIED_OUTPUT:
                source = theirs[weight.entry.megatron]
                adapters = other.adapters
                weight.parameter.copy_(adapters.merged(source) if adapters else source.parameter)
        self.optimizer.reload_model_params()

    def buckets(self) -> Iterator[Bucket]:
        """Yield the whole model under Hugging Face names, or its adapter under PEFT's, in one
        bucket. Collective: all ranks consume all of it."""
        if self.adapters is not None:
            adapters = self.adapters
            return hf_buckets(
                adapters.weights, adapters.table, mesh=self.mesh, bucket_bytes=sys.maxsize
            )
        return self._whole_model(self.table)

    def buckets_for_engines(self, *, for_check: bool = False) -> Iterator[Bucket]:
        """Yield what engines receive: the same as `buckets`, or the whole model with its adapter
        merged in, in the engines' number format, according to the plan. Frozen weights of a vision
        tower are left out, except `for_check`, which includes everything that an engine holds.
        Collective."""
        if self.adapters is not None and not self.merges_adapter:
            return self.buckets()
        table = self.formats.table if self.formats else self.table
        whole = self._whole_model(table if for_check else table.without_frozen_tower())
        if self.adapters is not None:
            (adapter,) = self.buckets()
            scaling = self.adapters.shape.scaling
            whole = merged_buckets(whole, adapter, self.adapters.table, scaling=scaling)
        return self.formats.for_engines(whole) if self.formats else whole

    def shards_for_engines(
        self,
        groups: Sequence[Sequence[int]],
        *,
        for_check: bool = False,
        num_receivers: int | None = None,
    ) -> Iterator[Shards] | None:
        """Yield the content of `buckets_for_engines` as pieces that ranks hold, each sent once by
        each of `groups` (ranks that reach the same engines); return None if whole tensors must be
        sent. `num_receivers`: engine ranks that share a bucket, if each needs memory of its own for
        it. Collective."""
        blocks = self.formats.blocks if self.formats is not None else {}
        if self.adapters is not None or blocks is None:
            return None
        key = (for_check, tuple(map(tuple, groups)), num_receivers)
        if key not in self._shard_plans:
            table = self.formats.table if self.formats is not None else self.table
            try:
                self._shard_plans[key] = ShardPlan(
                    self.weights,
                    table if for_check else table.without_frozen_tower(),
                    mesh=self.mesh,
                    bucket_bytes=self._bucket_bytes,
                    groups=groups,
                    blocks=blocks,
                    total_bytes=self._bucket_bytes * num_receivers
                    if num_receivers
                    else sys.maxsize,
                )
            except LookupError:  # a node of engines whose trainer ranks hold a part of the model
                self._shard_plans[key] = None
        plan = self._shard_plans[key]
        if plan is None:
            return None
        return self.formats.shards_for_engines(plan.shards()) if self.formats else plan.shards()

    def _whole_model(self, table: WeightTable) -> Iterator[Bucket]:
        return hf_buckets(self.weights, table, mesh=self.mesh, bucket_bytes=self._bucket_bytes)
