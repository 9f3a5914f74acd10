"""Positions of tokens of text and images are those of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from milescli.backends.megatron.step.images import rotary_positions
from milescli.core.types import ImageSpan

MERGE = 2
VISION = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
SIDES = st.integers(1, 5)


def of_transformers(model: type, kinds: list[int], grids: list[tuple[int, int, int]]) -> np.ndarray:
    """[3, tokens] of a model without weights."""
    bare = SimpleNamespace(config=SimpleNamespace(vision_config=VISION))
    bare.get_vision_position_ids = model.get_vision_position_ids.__get__(bare)
    positions, _ = model.get_rope_index(
        bare,
        torch.zeros(1, len(kinds), dtype=torch.long),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    return positions[:, 0].numpy()


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    sides=st.lists(st.tuples(SIDES, SIDES), max_size=4),
    begins_with_image=st.booleans(),
)
def test_positions_are_those_of_transformers(texts, sides, begins_with_image) -> None:
    kinds: list[int] = []
    spans, grids = [], []
    for number, text in enumerate(texts):
        if number or not begins_with_image:
            kinds += [0] * text
        if number < len(sides):
            rows, columns = sides[number]
            grid = (1, MERGE * rows, MERGE * columns)
            spans.append(
                ImageSpan(start=len(kinds), num_tokens=rows * columns, grid=grid, sha256="")
            )
            grids.append(grid)
            kinds += [1] * (rows * columns)
    kinds += [0]
    ours = rotary_positions(len(kinds), spans, merge_size=MERGE)
    for model in (Qwen2_5_VLModel, Qwen3VLModel):
        np.testing.assert_array_equal(ours, of_transformers(model, kinds, grids))
