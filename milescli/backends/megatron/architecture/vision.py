"""GPTModel of Megatron-Core behind a vision tower: transformers' module turns images into features,
which replace the embeddings of the image tokens. For Qwen3-VL, features of the tower's inner layers
are also added after the first decoder layers (deepstack). Every rank of the first pipeline stage
holds the whole tower. Called by `model`."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region as scatter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from milescli.backends.megatron.layers.heads import ScaledEmbeddings
from milescli.backends.megatron.step.images import RowImages
from milescli.core.files import parse_json
from milescli.models.facts import ModelFacts, Vision

_TOWERS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel"),
    "siglip": ("siglip", "SiglipVisionModel"),
}
"""Tower -> (module of transformers, its class)."""


def build_tower(
    vision: Vision, *, dtype: torch.dtype, device: torch.device, recomputes: bool
) -> torch.nn.Module:
    """Build the tower. Its weights are undefined until they are loaded; those that `vision` does
    not train are frozen. With `recomputes`, trained blocks are recomputed in the backward pass."""
    family, name = _TOWERS[vision.tower]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, name)
    with torch.device(device):
        # not `.to(dtype)`: the frequencies of its rotary embedding stay in float32
        config = kind.config_class(**parse_json(vision.config))
        if vision.tower == "siglip":
            config.vision_use_head = False
        tower = kind._from_config(config, dtype=dtype)
        if vision.tower == "siglip":
            tower = SquareTower(tower, vision)
    for weight, parameter in tower.named_parameters():
        parameter.requires_grad_(vision.trains(f"vision.{weight}"))
    if recomputes and vision.trained == "all":
        blocks = getattr(tower, "vision_tower", tower)
        blocks.gradient_checkpointing_enable({"use_reentrant": False})
    return tower


class SquareTower(torch.nn.Module):
    """Wraps Gemma 3's tower and projector in the interface of the towers of the Qwen line."""

    def __init__(self, tower: torch.nn.Module, vision: Vision) -> None:
        """`tower` is a SiglipVisionModel."""
        super().__init__()
        from transformers import Gemma3Config
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        rows = math.isqrt(vision.num_positions)
        config = Gemma3Config(
            text_config={"hidden_size": vision.out_hidden_size},
            vision_config=parse_json(vision.config),
            mm_tokens_per_image=(rows // vision.merge_size) ** 2,
        )
        self.vision_tower = tower
        self.multi_modal_projector = Gemma3MultiModalProjector(config).to(tower.dtype)
        self._patch_shape = vision.patch_shape

    def forward(self, patches: torch.Tensor, *, grid_thw: torch.Tensor, return_dict: bool):
        """Compute features of [patches, numbers of a patch]; VisionGpt calls this."""
        channels, _, high, wide = self._patch_shape
        _, rows, columns = grid_thw[0].tolist()
        pixels = patches.view(-1, rows, columns, channels, high, wide)
        pixels = pixels.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * high, columns * wide)
        seen = self.vision_tower(pixel_values=pixels, return_dict=return_dict).last_hidden_state
        return SimpleNamespace(pooler_output=self.multi_modal_projector(seen).flatten(0, 1))


class DeepstackLayer(TransformerLayer):
    """Adds this layer's part of the tower's inner features to its output. The features are the
    block's `context` [layers, S, 1, hidden_size], which Megatron passes from layer to layer and
    treats as an input when it recomputes a layer."""

    def forward(self, hidden_states, context=None, **others):
        """Run the layer and add its features; Megatron calls this."""
        hidden_states, context = super().forward(
            hidden_states=hidden_states, context=context, **others
        )
        if context is not None and self.layer_number <= len(context):
            hidden_states = hidden_states + context[self.layer_number - 1]
        return hidden_states, context


def adapt(spec: ModuleSpec, facts: ModelFacts) -> ModuleSpec:
    """Return the spec of a layer, changed to accept features of the tower's inner layers if the
    model has them."""
    if facts.vision is not None and facts.vision.deepstack:
        spec.module = DeepstackLayer
    return spec


class VisionGpt(ScaledEmbeddings):
    """Implements the first stage of a vision-language model. Its `vision` is the tower."""

    def __init__(self, *, vision: Vision, scale: float | None = None, **options) -> None:
        """`scale` multiplies the embeddings of text; features of images are not scaled."""
        super().__init__(scale=scale, **options)
        config = self.config
        device = torch.device("cpu" if config.use_cpu_initialization else "cuda")
        self.vision = build_tower(
            vision,
            dtype=config.params_dtype,
            device=device,
            recomputes=config.recompute_granularity == "full",
        )
        self._facts = vision
        self._is_frozen = vision.trained == "frozen"

    def forward(self, input_ids, position_ids, *others, images: RowImages | None = None, **more):
        """Compute as GPTModel does, with the embeddings of image tokens replaced by the features of
        `images`."""
        if images is None or not images.grids:
            return super().forward(input_ids, position_ids, *others, **more)
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
        place = images.place.to(embedded.device)
        seen = (place >= 0)[:, None, None]
        dense = [
            torch.where(seen, features[place.clamp(min=0)][:, None], 0)
            for features in self._features(images)
        ]
        if self.config.sequence_parallel:
            seen = scatter(seen.to(embedded.dtype)) > 0
            dense = [scatter(features) for features in dense]
        return super().forward(
            input_ids,
            position_ids,
            *others,
            decoder_input=torch.where(seen, dense[0], embedded),
            extra_block_kwargs={"context": torch.stack(dense[1:])} if dense[1:] else None,
            **more,
        )

    def _features(self, images: RowImages) -> list[torch.Tensor]:
        """Return [image tokens of the row, hidden_size] for the embeddings, and for each decoder
        layer with deepstack features. A frozen tower processes each image once per step."""
        if not self._is_frozen:
            return self._computed(images, list(images.grids))
        known = images.step.features.setdefault(id(self), {})
        missing = [image for image in images.grids if image not in known]
        if missing:
            with torch.no_grad():
                fresh = self._computed(images, missing)
            sizes = [self._num_tokens(images.grids[image]) for image in missing]
            parts = zip(*(features.split(sizes) for features in fresh), strict=True)
            known.update(zip(missing, parts, strict=True))
        parts = zip(*(known[image] for image in images.grids), strict=True)
        return [torch.cat(part) for part in parts]

    def _computed(self, images: RowImages, wanted: list[str]) -> list[torch.Tensor]:
        weight = next(self.vision.parameters())
        patches = torch.cat([images.step.patches(image) for image in wanted])
        grids = torch.tensor([images.grids[image] for image in wanted], device=weight.device)
        made = self.vision(
            patches.to(weight.device, weight.dtype), grid_thw=grids, return_dict=True
        )
        return [made.pooler_output, *(getattr(made, "deepstack_features", None) or [])]

    def _num_tokens(self, grid: tuple[int, int, int]) -> int:
        frames, rows, columns = grid
        return frames * rows * columns // self._facts.merge_size**2
