"""Rotary embeddings as config.json writes them, in its old and its new form, and what contradicts
itself."""

from __future__ import annotations

import pytest

from milescli.core.errors import CheckpointError, ExitCode
from milescli.models import fields
from milescli.models.facts import Rope, RopeScaling

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_old_and_the_new_place_say_the_same() -> None:
    new = fields.rope({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    old = fields.rope({"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}})
    assert new == old
    assert new.scaling == RopeScaling(
        kind="llama3",
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_both_places_may_be_there_if_they_agree() -> None:
    both = {
        "rope_theta": 10000,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }
    assert fields.rope(both).scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_positions=32
    )


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        (
            {
                "rope_parameters": {"rope_theta": 1e4},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "rope_type",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "factor",
        ),
        (
            {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "low_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ],
)
def test_what_contradicts_itself_or_cannot_be_computed_is_refused_by_name(
    config: dict, word: str
) -> None:
    with pytest.raises(CheckpointError, match=word) as caught:
        fields.rope(config)
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    assert caught.value.why
    assert caught.value.fixes


def test_a_family_may_have_defaults_of_its_own() -> None:
    assert fields.rope({}, theta=150_000.0, default_share=0.5, interleaved=True) == Rope(
        theta=150_000.0, share=0.5, interleaved=True
    )
    # as transformers saves a GLM-4 whose rope_parameters say 0.25
    saved = {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
    }
    assert fields.rope(saved, default_share=0.5).share == 0.25


def test_yarn_may_leave_its_factor_to_the_lengths() -> None:
    rope = fields.rope(
        {
            "max_position_embeddings": 128,
            "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32},
        }
    )
    assert rope.scaling is not None
    assert rope.scaling.factor == 4.0


def test_one_object_per_type_of_layer() -> None:
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    full, sliding = (
        fields.rope(config, layer_type=kind) for kind in ("full_attention", "sliding_attention")
    )
    assert (full.theta, full.scaling.factor) == (1e6, 8.0)
    assert sliding == Rope(theta=1e4)
