"""Stretched rotary embeddings, frequency by frequency, against those of transformers."""

from __future__ import annotations

import pytest
import torch

from milescli.backends.megatron.layers.rope import (
    inverse_frequencies,
    rotation_factor,
)
from milescli.models import fields

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
CASES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn whole": {
        **YARN,
        "truncate": False,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
        "rope_theta": 150000.0,
    },
    "yarn deepseek": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn given": {**YARN, "attention_factor": 1.25},
    "yarn tiny": {**YARN, "original_max_position_embeddings": 8},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("head_dim", [10, 64])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_factor_equal_those_of_transformers(name: str, head_dim: int) -> None:
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = CASES[name]
    rope = fields.rope({"rope_parameters": parameters, "max_position_embeddings": 163840})
    frequencies = inverse_frequencies(rope, head_dim)
    if name == "default":
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        expected, factor = plain, 1.0
    else:
        theirs = PreTrainedConfig(
            head_dim=head_dim,
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            max_position_embeddings=163840,
        )
        theirs.rope_parameters = dict(parameters)
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
    assert torch.allclose(frequencies, expected, rtol=1e-6, atol=0)
    assert rotation_factor(rope.scaling) == pytest.approx(factor, rel=1e-7)
