"""Images of Gemma 3 in an engine, without one: names of weights, expanded prompts, and which tokens
see each other. Log-probs of a real engine: tests/backends/sglang/test_vision.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from milescli.backends.sglang.inside.gemma_images import (
    expanded,
    images_of,
    released_name,
    see_themselves,
)

LAYER = "layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "released"),
    [
        (f"language_model.model.{LAYER}", f"language_model.model.{LAYER}"),
        (f"model.language_model.{LAYER}", f"language_model.model.{LAYER}"),
        (f"language_model.{LAYER}", f"language_model.model.{LAYER}"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("language_model.lm_head.weight", "language_model.lm_head.weight"),
        ("model.vision_tower.encoder.x", "vision_tower.vision_model.encoder.x"),
        ("vision_tower.vision_model.encoder.x", "vision_tower.vision_model.encoder.x"),
        ("model.multi_modal_projector.x", "multi_modal_projector.x"),
    ],
)
def test_every_name_of_a_weight_becomes_that_of_releases(name: str, released: str) -> None:
    assert released_name(name) == released


def test_each_image_token_becomes_as_many_as_the_image_has() -> None:
    assert expanded([5, 9, 6, 9, 9], image=9, num_tokens=3) == (
        [5, 9, 9, 9, 6, 9, 9, 9, 9, 9, 9],
        [(1, 3), (5, 7), (8, 10)],
    )
    assert expanded([5], image=9, num_tokens=3) == ([5], [])


def test_tokens_of_an_image_see_each_other_and_no_other_request() -> None:
    positions = torch.arange(6)
    queries = positions.expand(2, 6)
    causal = (positions <= queries[:, :, None]).clone()
    seen = see_themselves(causal, queries, [(1, 2, 4)])
    assert torch.equal(seen[0], causal[0])
    expected = causal[1].clone()
    expected[2:5, 2:5] = True
    assert torch.equal(seen[1], expected) and not torch.equal(seen[1], causal[1])


def test_images_of_a_kept_prefix_are_left_alone() -> None:
    shown = SimpleNamespace(mm_items=[SimpleNamespace(offsets=[(1, 3), (6, 8)])])
    batch = SimpleNamespace(mm_inputs=[None, shown], extend_prefix_lens=torch.tensor([0, 5]))
    assert list(images_of(batch)) == [(1, 6, 8)]
    assert not list(images_of(SimpleNamespace(mm_inputs=None, extend_prefix_lens=None)))
    # a decode step, which knows the images of its requests too
    assert not list(images_of(SimpleNamespace(mm_inputs=[shown], extend_prefix_lens=None)))
