"""Holds one model on a rank: its part of the weights, its passes, its place on the device. Models
that are not trained (teachers, reward models) need nothing more."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from milescli.backends.megatron.architecture import model
from milescli.backends.megatron.layer_specs import DEFAULT
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state import weights
from milescli.backends.megatron.state.sleeping import FrozenSleeper, Sleeper
from milescli.backends.megatron.step import replay
from milescli.backends.megatron.step.forward import Passes
from milescli.backends.megatron.step.images import ReadPatches
from milescli.core.plug_points import LAYER_SPECS
from milescli.models import load_facts, table
from milescli.models.latent import with_indexer
from milescli.models.mtp import with_mtp
from milescli.models.vision import with_vision
from milescli.recipe.model import IndexerMode, VisionMode
from milescli.recipe.speculative import Mtp


class LoadedModel:
    """Holds this rank's part of a model, with the weights of a Hugging Face folder."""

    def __init__(
        self,
        folder: Path,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        recompute: str = "none",
        replays_routing: bool = False,
        layer_spec: str = DEFAULT,
        own_layers: bool = False,
        mtp: Mtp | None = None,
        vision: VisionMode = "frozen",
        indexer: IndexerMode = "frozen",
    ) -> None:
        """Load the folder. The last seven arguments are for a model that is trained, according to
        plan and recipe. `own_layers`: never use TransformerEngine, which fuses norms into linear
        layers, so that adapters cannot be added and inputs cannot be rounded. Raises
        CheckpointError if the folder is not one of a model."""
        self.folder, self.mesh = folder, mesh
        self.facts = load_facts(folder)
        if mtp is not None:
            self.facts = with_mtp(self.facts)
        self.facts = with_indexer(with_vision(self.facts, vision), indexer)
        self.replays_routing = replays_routing
        self.table = table(self.facts)
        engine = not own_layers and model.uses_engine(self.facts, mesh.device)
        config = model.build_config(
            self.facts,
            mesh.layout,
            dtype=dtype,
            device=mesh.device,
            recompute=recompute,
            routing_replay=replays_routing,
            engine=engine,
        )
        change = LAYER_SPECS.load(layer_spec)
        gpt = model.build_model(
            config,
            self.facts,
            mesh,
            engine=engine,
            change_layer=change,
            mtp_trains_trunk=mtp is not None and mtp.trains_trunk,
        )
        self.weights = weights.local_weights(gpt, self.table, mesh)
        weights.load_hf(self.weights, self.table, folder=folder, mesh=mesh)
        self.model: torch.nn.Module = gpt
        self.sleeper: Sleeper | FrozenSleeper = FrozenSleeper(list(gpt.parameters()))
        self.passes = Passes(
            model=gpt,
            mesh=mesh,
            facts=self.facts,
            vocab_size=self.facts.vocab_size,
            routers=replay.own_routers(gpt, self.facts),
            recomputes=recompute == "full",
            mtp_trains_head=mtp is not None and mtp.trains_trunk,
        )

    @cached_property
    def read_patches(self) -> ReadPatches | None:
        """Return the reader of the model's images; None if it sees none."""
        if self.facts.vision is None:
            return None
        from milescli.data.image_processor import load_processor

        return load_processor(self.folder).patches
