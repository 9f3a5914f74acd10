"""A process that holds a reward model and scores what it is sent. Its methods are called as those
of `TrainerRank`; it is alone in its group, and learns nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from milescli.backends.megatron.device import take_device
from milescli.plan.types import Plan, TrainerLayout
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainShard
from milescli.train.streams import Stream


class ScoreRank:
    """Holds a reward model. `setup` first."""

    def __init__(
        self, *, recipe: Recipe, plan: Plan, model_dir: str, master_addr: str, master_port: int
    ) -> None:
        """`model_dir`: Hugging Face folder of a model that gives scores."""
        self.recipe, self.plan = recipe, plan
        self.model_dir = Path(model_dir)
        self.master = (master_addr, master_port)

    def setup(self) -> None:
        """Load the model. Raises CheckpointError, or WaitTimeout where its group is not made."""
        device = take_device(self.plan)
        from milescli.backends.megatron import mesh
        from milescli.backends.megatron.held import HeldModel

        limits = self.recipe.machine
        self.mesh = mesh.bring_up(
            layout=TrainerLayout(),
            rank=0,
            master=self.master,
            backend="gloo" if device.type == "cpu" else "nccl",
            device=device,
            timeouts_s=(limits.start_timeout_s, limits.step_timeout_s),
        )
        self.model = HeldModel(
            self.model_dir,
            mesh=self.mesh,
            dtype=torch.bfloat16 if self.plan.precision == "bf16" else torch.float32,
        )

    def score(self, shard: TrainShard, rounded_otherwise: bool = False) -> list[np.ndarray] | None:
        """Per sequence of the shard, [n] float32 score behind each token; 0.0 for the first."""
        assert not rounded_otherwise, "nobody compares a reward model with an engine"
        from milescli.backends.megatron.shard import RankShard

        own = RankShard(shard, mesh=self.mesh, facts=self.model.facts)
        own.fill(Stream.VALUES, self.model.passes.score(own.microbatches, temperature=1.0))
        return own.told(Stream.VALUES)
