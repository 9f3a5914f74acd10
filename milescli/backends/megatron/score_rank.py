"""A process that loads a reward model and scores sequences. Its methods are called like those of
`TrainerRank`; it is the only rank of its group, and trains nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from milescli.backends.megatron.cpu_compat import select_device
from milescli.plan.types import Plan, TrainerLayout
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainShard
from milescli.train.streams import Stream


class ScoreRank:
    """Scores sequences with one model. Call `setup` first."""

    def __init__(
        self, *, recipe: Recipe, plan: Plan, model_dir: str, master_addr: str, master_port: int
    ) -> None:
        """Take `model_dir`, the Hugging Face folder of a model that gives scores."""
        self.recipe, self.plan = recipe, plan
        self.model_dir = Path(model_dir)
        self.master = (master_addr, master_port)

    def setup(self) -> None:
        """Load the model. Raises CheckpointError, or WaitTimeout if its process group cannot be
        formed."""
        device = select_device(self.plan)
        from milescli.backends.megatron import mesh
        from milescli.backends.megatron.loaded_model import LoadedModel

        limits = self.recipe.machine
        self.mesh = mesh.bring_up(
            layout=TrainerLayout(),
            rank=0,
            master=self.master,
            backend="gloo" if device.type == "cpu" else "nccl",
            device=device,
            timeouts_s=(limits.start_timeout_s, limits.step_timeout_s),
        )
        self.model = LoadedModel(
            self.model_dir,
            mesh=self.mesh,
            dtype=torch.bfloat16 if self.plan.precision == "bf16" else torch.float32,
        )

    def score(
        self, shard: TrainShard, with_other_rounding: bool = False
    ) -> list[np.ndarray] | None:
        """Return for each sequence of the shard the score at each token, [n] float32; 0.0 for the
        first."""
        assert not with_other_rounding, "nobody compares a reward model with an engine"
        from milescli.backends.megatron.step.shard import RankShard

        own = RankShard(shard, mesh=self.mesh, facts=self.model.facts)
        own.fill(Stream.VALUES, self.model.passes.score(own.microbatches, temperature=1.0))
        return own.gathered(Stream.VALUES)
