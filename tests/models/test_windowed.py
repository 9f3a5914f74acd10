"""gpt-oss, Gemma 3 and Gemma 4: configs as releases wrote them, and what is refused by name."""

from __future__ import annotations

import pytest

from milescli.core.errors import CheckpointError
from milescli.models import parse_facts
from milescli.models.facts import Rope, RopeScaling

_GEMMA3 = {"model_type": "gemma3_text"}
_GPT_OSS = {"model_type": "gpt_oss"}
_GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


def test_a_release_of_gemma_3_says_little_and_leaves_the_rest_to_the_class() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    facts = parse_facts(
        {
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": text,
            "torch_dtype": "bfloat16",
        }
    )
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.vocab_size) == (
        8,
        4,
        256,
        262_208,
    )
    assert facts.tied_embeddings
    assert [layer.mixer for layer in facts.layers[:7]] == ["sliding"] * 5 + ["full", "sliding"]
    scaling = RopeScaling(kind="linear", factor=8.0, original_max_positions=131_072)
    assert facts.rope == Rope(theta=1e6, scaling=scaling)
    assert facts.rope_sliding == Rope(theta=1e4)
    assert facts.attention_scale == 256**-0.5
    assert (facts.dtype, facts.eos_token_ids) == ("bfloat16", (1, 106))


def test_the_base_of_sliding_layers_stands_by_itself_in_old_configs() -> None:
    facts = parse_facts(
        {"model_type": "gemma3_text", "rope_theta": 500_000.0, "rope_local_base_freq": 20_000.0}
    )
    assert (facts.rope, facts.rope_sliding) == (Rope(theta=500_000.0), Rope(theta=20_000.0))


def test_global_layers_of_gemma_4_have_heads_of_their_own() -> None:
    config = {
        **_GEMMA4,
        "num_hidden_layers": 6,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    }
    facts = parse_facts(config)
    sliding, full = facts.at(0), facts.at(5)
    assert (sliding.head_dim, sliding.num_kv_heads, facts.layers[0].key_is_value) == (256, 4, False)
    assert (full.head_dim, full.num_kv_heads, facts.layers[5].key_is_value) == (512, 2, True)
    assert facts.common_kv_heads == 2
    assert facts.rope == Rope(theta=1e6, share=0.25, proportional=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma4_text"}, "hidden_size_per_layer_input: 256"),
        ({**_GEMMA4, "num_kv_shared_layers": 2}, "num_kv_shared_layers: 2"),
        ({**_GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention: all"),
        ({**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 5,
          "moe_intermediate_size": 8}, "5 of 4 experts"),
        ({**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3}, "8 query heads"),
        ({**_GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({**_GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
        ({**_GEMMA3, "sliding_window_pattern": 0}, "groups of 0"),
        ({"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}},
         "in the stand-alone text model"),
        ({**_GPT_OSS, "swiglu_limit": 10.0}, "swiglu_limit: 10.0"),
        ({**_GPT_OSS, "attention_bias": False}, "attention_bias: False"),
        ({**_GPT_OSS, "num_hidden_layers": 2, "layer_types": ["full_attention"]},
         "2 layers need one type each, but"),
        ({**_GPT_OSS, "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
         "chunked_attention"),
    ],
)  # fmt: skip
def test_what_was_never_checked_is_refused_by_name(config: dict, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_facts(config)
    assert words in f"{caught.value.what} {caught.value.why}"
