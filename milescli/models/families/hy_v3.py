"""Family Hunyuan 3: GLM-4.5's layers under other names, with queries and keys normalised per head.
Conversions copy a multi-token-prediction layer, which transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from milescli.models import fields, layers
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts, plain_layers
from milescli.models.families import glm4_moe


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `hy_v3` config. Raises CheckpointError for what the trainer cannot
    compute."""
    for name in ("attention_bias", "mlp_bias"):
        fields.refuse(
            config, name, unless=False, why="no release has it, so miles could not verify it"
        )
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    own = glm4_moe.facts(
        {
            **config,
            "n_routed_experts": config.get("num_experts"),
            "n_shared_experts": config.get("num_shared_experts"),
            "routed_scaling_factor": fields.number(
                config, "router_scaling_factor", default=2.826, kind=float
            ),
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        }
    )
    return replace(
        own,
        family="hy_v3",
        layers=plain_layers(num_layers, moe=fields.sparse_layers(kinds, num_layers=num_layers)),
        rope=fields.rope(config, theta=11_158_840.0),
    )


_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.gate.": ".mlp.router.gate.",
    ".shared_experts.": ".shared_mlp.",
}
"""Names of GLM-4.5 -> this family's."""


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    base = glm4_moe.table(facts)
    rules = tuple(rule for rule in base.rules if rule.block != "mtp")
    beyond = rf"^model\.layers\.{facts.num_layers}\."
    return replace(base, rules=layers.renamed(rules, _NAMES), passthrough=(beyond,))
