"""Family Nemotron-H (arXiv 2504.03624), which includes Nemotron 3: each layer has one part
(Mamba-2, attention without positions, MLP or experts), in the order of a pattern. Facts from its
config; its weight table is in `nemotron_h_table`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from milescli.core.errors import CheckpointError
from milescli.models import fields
from milescli.models.facts import Mamba, ModelFacts
from milescli.models.families.nemotron_h_table import KINDS, table

__all__ = ["facts", "table"]

_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `nemotron_h` config. Raises CheckpointError for what the trainer
    cannot compute."""
    _refuse_unreleased(config)
    kinds = _pattern(config, "layers_block_type", "hybrid_override_pattern")
    if not kinds:
        raise fields.unusable_field(
            "hybrid_override_pattern",
            why="neither it nor `layers_block_type` describes the layers of the model",
        )
    hidden_size = fields.number(config, "hidden_size", kind=int)
    num_heads = fields.number(config, "num_attention_heads", kind=int)
    model = ModelFacts(
        family="nemotron_h",
        num_layers=len(kinds),
        layers=tuple(KINDS[kind] for kind in kinds),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.number(config, "num_key_value_heads", default=num_heads, kind=int),
        head_dim=fields.number(config, "head_dim", default=128, kind=int),
        ffn_hidden_size=fields.number(config, "intermediate_size", kind=int)
        if "mlp" in kinds
        else 0,
        vocab_size=fields.number(config, "vocab_size", kind=int),
        tied_embeddings=False,
        rope=None,
        norm_eps=fields.number(config, "layer_norm_epsilon", default=1e-5, kind=float),
        max_position_embeddings=fields.number(
            config, "max_position_embeddings", default=4096, kind=int
        ),
        qk_norm=False,
        qkv_bias=False,
        mamba=_mamba(config),
        activation="relu2",
        gated_mlp=False,
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )
    model = replace(model, **_mtp(config))
    return replace(model, **_experts(config)) if "moe" in kinds else model


def _refuse_unreleased(config: Mapping[str, object]) -> None:
    unlike = "no release has it, so nothing could be compared with"
    for name, usual in (
        ("mamba_hidden_act", "silu"),
        ("mlp_hidden_act", "relu2"),
        ("use_bias", False),
        ("mamba_proj_bias", False),
        ("mlp_bias", False),
        ("attention_bias", False),
        ("residual_in_fp32", False),
        ("sliding_window", None),
        ("n_shared_experts", 1),
    ):
        fields.refuse(config, name, unless=usual, why=unlike)
    _require_free_time_steps(config)
    fields.refuse(
        config,
        "tie_word_embeddings",
        unless=False,
        why="transformers always gives this family a separate output layer, SGLang does not, "
        "and no release has it",
    )


def _require_free_time_steps(config: Mapping[str, object]) -> None:
    limit = config.get("time_step_limit", config.get("mamba_dt_limit"))
    # strict JSON has no word for infinity: transformers writes an object, the releases the bare
    # word
    plain = (
        [float(bound["__float__"]) if isinstance(bound, dict) else bound for bound in limit]
        if isinstance(limit, list)
        else None
    )
    if limit is not None and plain != [0.0, float("inf")]:
        raise CheckpointError(
            f"a model with `time_step_limit: {limit}` is not supported",
            why="the trainer does not limit time steps, and no release limits them",
            fix="use a model with `time_step_limit: [0.0, Infinity]`",
        )


def _pattern(config: Mapping[str, object], listed: str, symbols: str) -> tuple[str, ...]:
    """Return the kinds of layers, from a list of words (transformers 5) or a string of symbols (the
    releases); empty if there is neither."""
    words = config.get(listed)
    kinds = (
        words
        if isinstance(words, list)
        else [_SYMBOLS.get(symbol, symbol) for symbol in str(config.get(symbols) or "")]
    )
    for kind in kinds:
        if kind not in KINDS:
            raise fields.unusable_field(
                symbols,
                why=f"`{kind}` is not a kind of layer; the kinds are "
                f"{', '.join(f'{word} ({sign})' for sign, word in _SYMBOLS.items())}",
            )
    return tuple(cast("list[str]", kinds))


def _mamba(config: Mapping[str, object]) -> Mamba:
    return Mamba(
        num_heads=fields.number(config, "mamba_num_heads", kind=int),
        head_dim=fields.number(config, "mamba_head_dim", kind=int),
        num_groups=fields.number(config, "n_groups", "mamba_n_groups", default=8, kind=int),
        state_size=fields.number(config, "ssm_state_size", default=128, kind=int),
        conv_kernel=fields.number(config, "conv_kernel", "mamba_d_conv", default=4, kind=int),
        conv_bias=fields.number(
            config, "use_conv_bias", "mamba_conv_bias", default=True, kind=bool
        ),
    )


def _experts(config: Mapping[str, object]) -> dict[str, object]:
    num_experts = fields.number(config, "n_routed_experts", kind=int)
    return {
        "num_experts": num_experts,
        "topk": fields.topk(config, "num_experts_per_tok", num_experts=num_experts),
        "moe_ffn_hidden_size": fields.number(config, "moe_intermediate_size", kind=int),
        "normalize_topk": fields.number(config, "norm_topk_prob", default=True, kind=bool),
        "shared_expert_ffn_hidden_size": fields.number(
            config, "moe_shared_expert_intermediate_size", kind=int
        ),
        "router_score": "sigmoid",
        "router_bias": True,
        "router_groups": fields.number(config, "n_group", default=1, kind=int),
        "router_topk_groups": fields.number(config, "topk_group", default=1, kind=int),
        "router_scaling": fields.number(config, "routed_scaling_factor", default=1.0, kind=float),
        "moe_latent_size": fields.number(config, "moe_latent_size", default=0, kind=int),
    }


def _mtp(config: Mapping[str, object]) -> dict[str, object]:
    num_layers = fields.number(config, "num_nextn_predict_layers", default=0, kind=int)
    kinds = _pattern(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or (
        "attention",
        "moe",
    )
    if num_layers > 1 and len(kinds) > 1:
        raise CheckpointError(
            f"a model with `num_nextn_predict_layers: {num_layers}` is not supported",
            why="Nemotron-H releases have one multi-token-prediction layer, and the names of "
            "further ones are unknown",
            fix="use a model with `num_nextn_predict_layers: 1`",
        )
    return {
        "num_mtp_layers": num_layers,
        "mtp_layers": tuple(KINDS[kind] for kind in kinds) if num_layers else (),
    }
