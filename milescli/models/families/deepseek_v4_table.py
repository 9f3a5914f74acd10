"""Makes DeepSeek-V4's weight table: every tensor with its name in the releases
(`layers.0.attn.wq_a.weight`), in transformers, and in Megatron's style. The family file calls
it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from milescli.models import layers
from milescli.models.base import (
    COLUMN,
    EXPERT_COLUMN,
    EXPERT_ROW,
    ROW,
    VOCABULARY,
    Rule,
    WeightTable,
    Where,
    every_layer,
)
from milescli.models.facts import Compressed, Indexer, ModelFacts
from milescli.models.tensor_rules import (
    Size,
    expert_ffn,
    hidden,
    num_experts,
    queries,
    tensor_rule,
    vocabulary,
)

_MODERN: tuple[tuple[str, str], ...] = (
    # the more special ones first
    (r"\.attn\.indexer\.compressor\.ape$", ".attn.compressor.indexer.position_bias"),
    (r"\.attn\.indexer\.compressor\.norm\.", ".attn.compressor.indexer.kv_norm."),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".attn.compressor.indexer."),
    (r"\.attn\.compressor\.ape$", ".attn.compressor.position_bias"),
    (r"\.attn\.compressor\.norm\.", ".attn.compressor.kv_norm."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.attn\.q_norm\.", ".attn.q_a_norm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"^hc_head_", "hc_head.hc_"),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"^embed\.", "embed_tokens."),
)
"""Patterns of names in the releases -> the names of transformers' modules; applied in this order.
"""


def modern_name(released: str) -> str:
    """Return transformers' name for a tensor of the releases."""
    name = released
    for pattern, modern in _MODERN:
        name = re.sub(pattern, modern, name)
    return "model." + name


_RELEASED = "layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."


def _compressed(facts: ModelFacts) -> Compressed:
    assert facts.compressed is not None, facts.family
    return facts.compressed


def _indexer(facts: ModelFacts) -> Indexer:
    assert facts.indexer is not None, facts.family
    return facts.indexer


def _head(facts: ModelFacts) -> int:
    return facts.head_dim


def _heads(facts: ModelFacts) -> int:
    return facts.num_heads


def _query_rank(facts: ModelFacts) -> int:
    return _compressed(facts).q_lora_rank


def _outputs(facts: ModelFacts) -> int:
    return _compressed(facts).output_groups * _compressed(facts).output_rank


def _streams(facts: ModelFacts) -> int:
    assert facts.hyper is not None, facts.family
    return facts.hyper.num_streams


def _all_streams(facts: ModelFacts) -> int:
    return _streams(facts) * facts.hidden_size


def _mixes(facts: ModelFacts) -> int:
    """Return the number of weights that read from the streams, write to them, and mix them."""
    return (2 + _streams(facts)) * _streams(facts)


def _sparse(facts: ModelFacts, layer: int) -> bool:
    return facts.layers[layer].compression == "sparse"


def _rule(hf: str | tuple[str, str], megatron: str, *dims: Size, **others: Any) -> Rule:
    """Return the rule of a layer's tensor, with its names in the releases and in transformers. The
    arguments are those of `tensor_rule`."""
    names = _RELEASED + hf if isinstance(hf, str) else (_RELEASED + hf[0], _RELEASED + hf[1])
    own = tensor_rule(names, _MEGATRON + megatron, *dims, **others)
    return replace(
        own, alternatives=(replace(own, hf=tuple(modern_name(name) for name in own.hf)),)
    )


def _compressor(
    hf: str, megatron: str, head: Size, rate: Size, *, width: int, where: Where
) -> tuple[Rule, ...]:
    """Return the rules of the module that compresses positions to entries. `width` is the number of
    series of entries that it makes."""

    def made(facts: ModelFacts) -> int:
        return width * head(facts)

    return (
        _rule(hf + "wkv.weight", megatron + "linear_kv.weight", made, hidden, where=where),
        _rule(hf + "wgate.weight", megatron + "linear_gate.weight", made, hidden, where=where),
        _rule(hf + "ape", megatron + "position_bias", rate, made, where=where, float32=True),
        _rule(hf + "norm.weight", megatron + "norm.weight", head, where=where),
    )


def _hyper_connection(hf: str, megatron: str) -> tuple[Rule, ...]:
    return (
        _rule(hf + "fn", megatron + "fn", _mixes, _all_streams, float32=True),
        _rule(hf + "base", megatron + "base", _mixes, float32=True),
        _rule(hf + "scale", megatron + "scale", lambda f: 3, float32=True),
    )


_WINDOW = (
    _rule("attn_norm.weight", "input_layernorm.weight", hidden),
    _rule("attn.wq_a.weight", "self_attention.linear_q_down_proj.weight", _query_rank, hidden),
    _rule("attn.q_norm.weight", "self_attention.q_layernorm.weight", _query_rank),
    _rule(
        "attn.wq_b.weight",
        "self_attention.linear_q_up_proj.weight",
        queries,
        _query_rank,
        sharding=COLUMN,
    ),
    _rule("attn.wkv.weight", "self_attention.linear_kv_proj.weight", _head, hidden),
    _rule("attn.kv_norm.weight", "self_attention.kv_layernorm.weight", _head),
    _rule(
        "attn.attn_sink",
        "self_attention.core_attention.softmax_offset",
        _heads,
        sharding=COLUMN,
        float32=True,
    ),
    _rule(
        "attn.wo_a.weight",
        "self_attention.linear_grouped_proj.weight",
        _outputs,
        lambda f: queries(f) // _compressed(f).output_groups,
        sharding=COLUMN,
    ),
    _rule("attn.wo_b.weight", "self_attention.linear_proj.weight", hidden, _outputs, sharding=ROW),
)
_CORE = "self_attention.core_attention."
_COMPRESSED = (
    *_compressor(
        "attn.compressor.",
        _CORE + "compressor.",
        _head,
        lambda f: _compressed(f).sparse_rate,
        width=2,
        where=_sparse,
    ),
    *_compressor(
        "attn.compressor.",
        _CORE + "compressor.",
        _head,
        lambda f: _compressed(f).heavy_rate,
        width=1,
        where=lambda f, layer: f.layers[layer].compression == "heavy",
    ),
    _rule(
        "attn.indexer.wq_b.weight",
        _CORE + "indexer.linear_wq_b.weight",
        lambda f: _indexer(f).num_heads * _indexer(f).head_dim,
        _query_rank,
        where=_sparse,
    ),
    _rule(
        "attn.indexer.weights_proj.weight",
        _CORE + "indexer.linear_weights_proj.weight",
        lambda f: _indexer(f).num_heads,
        hidden,
        where=_sparse,
    ),
    *_compressor(
        "attn.indexer.compressor.",
        _CORE + "indexer.compressor.",
        lambda f: _indexer(f).head_dim,
        lambda f: _compressed(f).sparse_rate,
        width=2,
        where=_sparse,
    ),
)
_CORRECTION = _rule(
    "ffn.gate.bias",
    "mlp.router.expert_bias",
    num_experts,
    where=lambda f, layer: not f.layers[layer].hash_routing,
    float32=True,
    buffer=True,
)
_TOKENS = _rule(
    "ffn.gate.tid2eid",
    "mlp.router.tid2eid",
    vocabulary,
    lambda f: f.topk,
    where=lambda f, layer: f.layers[layer].hash_routing,
    buffer=True,
    integers=True,
)


def _experts() -> tuple[Rule, ...]:
    local = "mlp.experts.local_experts.{expert}."
    names = tuple("ffn.experts.{expert}." + f"{name}.weight" for name in ("w1", "w3"))
    up = _rule(names, local + "linear_fc1.weight", expert_ffn, hidden, sharding=EXPERT_COLUMN)
    down = _rule(
        "ffn.experts.{expert}.w2.weight",
        local + "linear_fc2.weight",
        hidden,
        expert_ffn,
        sharding=EXPERT_ROW,
    )
    # as transformers holds all in one in memory
    return tuple(
        replace(
            rule,
            alternatives=(*rule.alternatives, replace(usual.alternatives[0], where=every_layer)),
        )
        for rule, usual in ((up, layers.EXPERT_UP), (down, layers.EXPERT_DOWN))
    )


_MLP = (
    _rule("ffn_norm.weight", "pre_mlp_layernorm.weight", hidden),
    _rule("ffn.gate.weight", "mlp.router.weight", num_experts, hidden),
    _CORRECTION,
    _TOKENS,
    *_experts(),
    _rule(
        ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
        "mlp.shared_experts.linear_fc1.weight",
        expert_ffn,
        hidden,
        sharding=COLUMN,
    ),
    _rule(
        "ffn.shared_experts.w2.weight",
        "mlp.shared_experts.linear_fc2.weight",
        hidden,
        expert_ffn,
        sharding=ROW,
    ),
)
_CONNECTIONS = (
    *_hyper_connection("hc_attn_", "self_attention_hyper_connection."),
    *_hyper_connection("hc_ffn_", "mlp_hyper_connection."),
)


def _outside(hf: str, megatron: str, *dims: Size, **others: Any) -> Rule:
    own = tensor_rule(hf, megatron, *dims, block="outside", **others)
    return replace(own, alternatives=(replace(own, hf=(modern_name(hf),)),))


def _output_layer() -> Rule:
    own = _outside("head.weight", "output_layer.weight", vocabulary, hidden, sharding=VOCABULARY)
    return replace(own, alternatives=(replace(own, hf=("lm_head.weight",), alternatives=()),))


def _mtp_rules() -> tuple[Rule, ...]:
    """Return the rules of a multi-token-prediction layer, which sees only its window. Only releases
    hold it; transformers omits it."""
    hf, megatron = "mtp.{mtp}.", layers.MTP
    within = (*_WINDOW, *(rule for rule in _MLP if rule is not _TOKENS), *_CONNECTIONS)
    rules = [
        replace(
            rule,
            hf=tuple(hf + name.removeprefix(_RELEASED) for name in rule.hf),
            megatron=megatron + "transformer_layer." + rule.megatron.removeprefix(_MEGATRON),
            block="mtp",
            where=every_layer,
            alternatives=(),
        )
        for rule in within
    ]
    around = (
        _outside("enorm.weight", "enorm.weight", hidden),
        _outside("hnorm.weight", "hnorm.weight", hidden),
        _outside("e_proj.weight", "e_proj.weight", hidden, hidden),
        _outside("h_proj.weight", "h_proj.weight", hidden, hidden),
        _outside("hc_head_fn", "hyper_head.fn", _streams, _all_streams, float32=True),
        _outside("hc_head_base", "hyper_head.base", _streams, float32=True),
        _outside("hc_head_scale", "hyper_head.scale", lambda f: 1, float32=True),
        _outside("norm.weight", "final_layernorm.weight", hidden),
    )
    copies = (
        ("emb.tok_emb.weight", "embedding.word_embeddings.weight"),
        ("head.weight", "output_layer.weight"),
    )
    frame = (
        *around,
        *(
            _outside(hf, name, vocabulary, hidden, sharding=VOCABULARY, optional=True)
            for hf, name in copies
        ),
    )
    return (
        *rules,
        *(
            replace(
                rule,
                hf=(hf + rule.hf[0],),
                megatron=megatron + rule.megatron,
                block="mtp",
                alternatives=(),
            )
            for rule in frame
        ),
    )


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    rules = (
        _outside(
            "embed.weight",
            "embedding.word_embeddings.weight",
            vocabulary,
            hidden,
            sharding=VOCABULARY,
        ),
        *_WINDOW,
        *_COMPRESSED,
        *_MLP,
        *_CONNECTIONS,
        *_mtp_rules(),
        _outside("hc_head_fn", "decoder.hyper_head.fn", _streams, _all_streams, float32=True),
        _outside("hc_head_base", "decoder.hyper_head.base", _streams, float32=True),
        _outside("hc_head_scale", "decoder.hyper_head.scale", lambda f: 1, float32=True),
        _outside("norm.weight", "decoder.final_layernorm.weight", hidden),
        *(() if facts.tied_embeddings else (_output_layer(),)),
    )
    return WeightTable(facts=facts, rules=rules)
