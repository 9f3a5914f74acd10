"""Decides which models SGLang can serve: on a CPU those that were compared with transformers,
elsewhere those whose architecture it has. Reads facts, config.json and the names in SGLang's files;
imports nothing of SGLang."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from milescli.core.errors import MachineError
from milescli.models.base import quantization_config
from milescli.models.facts import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFamily:
    """Describes how a family is served on a CPU."""

    module: str
    """Module of SGLang's model zoo; the others are not loaded."""
    architecture: str
    """Architecture's name if config.json has none; SGLang needs one."""
    pieces: tuple[str, ...] = ()
    """Modules of `cpu/` that it needs besides those that every engine has."""
    arguments: tuple[str, ...] = ()
    """Arguments of `sglang.launch_server` on a CPU."""
    output_layer: Literal["any", "own", "tied"] = "any"
    """own: SGLang leaves an output layer that is tied to the embeddings empty. tied: it uses the
    embeddings, whatever the config says."""
    windows: bool = False
    """True if SGLang applies the family's sliding windows; else it attends to everything."""
    dense: Literal["anywhere", "first", "nowhere"] = "anywhere"
    """Where SGLang supports layers without experts in a model with experts."""
    mlp_bias: bool = False
    """True if SGLang applies biases of MLPs; else it ignores them."""
    num_deepstack: int | None = None
    """Levels of a vision tower's features that SGLang adds to the decoder; None: any number."""
    patch_numbers: int | None = None
    """Numbers per patch of pixels that SGLang supports; None: any."""
    sees_images: bool = False
    """True if its vision tower is served, too."""

    @property
    def is_plain(self) -> bool:
        """Return True if its layers use full attention and only the pieces that every engine
        has."""
        return not (self.pieces or self.windows)


CPU_FAMILIES: dict[str, CpuFamily] = {
    "deepseek_v3": CpuFamily(
        module="deepseek_v2",
        architecture="DeepseekV3ForCausalLM",
        pieces=("latent",),
        dense="first",
    ),
    "gemma3": CpuFamily(
        module="gemma3_mm",
        architecture="Gemma3ForConditionalGeneration",
        output_layer="tied",
        windows=True,
        sees_images=True,
    ),
    "gemma3_text": CpuFamily(
        module="gemma3_causal",
        architecture="Gemma3ForCausalLM",
        output_layer="tied",
        windows=True,
    ),
    "glm4": CpuFamily(module="glm4", architecture="Glm4ForCausalLM"),
    "glm4_moe": CpuFamily(
        module="glm4_moe", architecture="Glm4MoeForCausalLM", output_layer="own", dense="first"
    ),
    "glm4_moe_lite": CpuFamily(
        module="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        pieces=("latent",),
        output_layer="own",
        dense="first",
    ),
    "gpt_oss": CpuFamily(
        module="gpt_oss",
        architecture="GptOssForCausalLM",
        pieces=("sinks",),
        arguments=("--disable-hybrid-swa-memory", "--moe-runner-backend", "triton"),
        output_layer="own",
        windows=True,
        mlp_bias=True,
    ),
    "hy_v3": CpuFamily(
        module="hunyuan_v3", architecture="HYV3ForCausalLM", output_layer="own", dense="first"
    ),
    "llama": CpuFamily(module="llama", architecture="LlamaForCausalLM"),
    "minimax_m2": CpuFamily(
        module="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        pieces=("minimax",),
        output_layer="own",
        dense="nowhere",
    ),
    "mimo": CpuFamily(module="mimo", architecture="MiMoForCausalLM", pieces=("mimo",)),
    "mistral": CpuFamily(module="mistral", architecture="MistralForCausalLM"),
    "qwen2": CpuFamily(module="qwen2", architecture="Qwen2ForCausalLM"),
    # SGLang's processor of images imports Qwen3.5's model, which wants the piece `delta`
    "qwen2_5_vl": CpuFamily(
        module="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        pieces=("delta",),
        patch_numbers=1176,
        sees_images=True,
    ),
    "qwen3": CpuFamily(module="qwen3", architecture="Qwen3ForCausalLM"),
    "qwen3_5": CpuFamily(
        module="qwen3_5", architecture="Qwen3_5ForConditionalGeneration", pieces=("delta",)
    ),
    "qwen3_5_moe": CpuFamily(
        module="qwen3_5",
        architecture="Qwen3_5MoeForConditionalGeneration",
        pieces=("delta",),
        dense="nowhere",
    ),
    "qwen3_5_moe_text": CpuFamily(
        module="qwen3_5_text",
        architecture="Qwen3_5MoeForCausalLM",
        pieces=("delta",),
        dense="nowhere",
    ),
    "qwen3_5_text": CpuFamily(
        module="qwen3_5_text", architecture="Qwen3_5ForCausalLM", pieces=("delta",)
    ),
    "qwen3_next": CpuFamily(
        module="qwen3_next", architecture="Qwen3NextForCausalLM", pieces=("delta",), dense="nowhere"
    ),
    "qwen3_vl": CpuFamily(
        module="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        pieces=("delta",),
        sees_images=True,
    ),
    "qwen3_vl_moe": CpuFamily(
        module="qwen3_vl_moe",
        architecture="Qwen3VLMoeForConditionalGeneration",
        pieces=("delta",),
        dense="nowhere",
        num_deepstack=3,
        sees_images=True,
    ),
    "qwen3_moe": CpuFamily(
        module="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        output_layer="own",
        dense="nowhere",
    ),
}
"""model_type -> how it is served on a CPU. Each was compared with transformers in float32:
log-probs of prompts and responses, before and after new weights were sent
(tests/backends/sglang/test_families.py)."""


_WITHOUT_CPU = {
    "deepseek_v4": "SGLang 0.5.20 caches this family's entries in FP8 alone, which it has no "
    "kernels for on a CPU",
}
"""Families that no engine can serve on a CPU, and why (read in SGLang's source, and tried)."""


def servable_on_cpu(facts: ModelFacts) -> tuple[bool, str]:
    """Return (True if SGLang serves this model correctly on a CPU, the reason)."""
    if facts.family in _WITHOUT_CPU:
        return False, _WITHOUT_CPU[facts.family]
    if cpu_family(facts) is None:
        return False, f"only {', '.join(CPU_FAMILIES)} were compared with transformers there"
    fault = fault_of_sglang(facts)
    return fault is None, fault or "compared with transformers"


def cpu_family(facts: ModelFacts) -> CpuFamily | None:
    """Return how a model is served on a CPU, or None if it is not. Text models of families with
    multimodal releases have their own `model_type`."""
    text = f"{facts.family}_text"
    return CPU_FAMILIES.get(text if text in CPU_FAMILIES and not facts.multimodal else facts.family)


def is_served_on_cpu(family: str) -> bool:
    """Return True if at least the text models of a family are served on a CPU."""
    return not CPU_FAMILIES.keys().isdisjoint((family, f"{family}_text"))


def fault_of_sglang(facts: ModelFacts) -> str | None:
    """Return why SGLang serves this model incorrectly on any device; None if no fault is known."""
    family = cpu_family(facts)
    if family is None:
        return None
    if facts.tied_embeddings and family.output_layer == "own":
        return (
            "its output layer is tied to its embeddings, and SGLang 0.5.20 then leaves the "
            "output layer empty"
        )
    if not facts.tied_embeddings and family.output_layer == "tied":
        return (
            "its output layer has weights of its own, and SGLang 0.5.20 uses the embeddings in "
            "their place in this family"
        )
    if not family.windows and any(layer.mixer == "sliding" for layer in facts.layers):
        return "its layers use a window, which SGLang 0.5.20 ignores in this family"
    if facts.mlp_bias and not family.mlp_bias:
        return "its MLPs have biases, which SGLang 0.5.20 leaves out in this family"
    kinds = [layer.mlp for layer in facts.layers]
    if family.dense == "nowhere" and "dense" in kinds:
        return (
            "some of its layers have no experts, which SGLang 0.5.20 does not know of in this "
            "family"
        )
    if family.dense == "first" and kinds != sorted(kinds):
        return (
            "it has layers without experts behind layers with them, which SGLang 0.5.20 does "
            "not know of in this family"
        )
    full = [index for index, layer in enumerate(facts.layers, start=1) if layer.mixer == "full"]
    step = full[0] if full else facts.num_layers + 1
    if facts.gated_delta is not None and full != list(range(step, facts.num_layers + 1, step)):
        return (
            "its layers of full attention do not come at one interval, as SGLang 0.5.20 takes "
            "them to"
        )
    depth = len(facts.vision.deepstack) if facts.vision is not None else 0
    if family.num_deepstack not in (None, depth):
        return (
            f"its tower has {depth} deepstack layers, and SGLang 0.5.20 takes this family to have "
            f"{family.num_deepstack}: the first image would end the engine"
        )
    numbers = math.prod(facts.vision.patch_shape) if facts.vision is not None else None
    if facts.vision is not None and family.patch_numbers not in (None, numbers):
        return (
            f"a patch of its images has {numbers} numbers, and SGLang 0.5.20 takes all but "
            f"{family.patch_numbers} (14 x 14 pixels) for what a tower has said already"
        )
    if facts.vision is not None and family.patch_numbers == facts.vision.hidden_size:
        return (
            f"its tower has width {facts.vision.hidden_size}, and SGLang 0.5.20 then takes pixels "
            "for what a tower has said already"
        )
    scaling = facts.rope.scaling if facts.rope is not None else None
    if scaling is not None and scaling.attention_factor is not None:
        return "its rotary embedding has an `attention_factor`, which SGLang 0.5.20 ignores"
    return None


def fault_of_quantised(config: Mapping[str, object]) -> str | None:
    """Return why a CPU cannot serve the quantised weights of a model with this config.json; None if
    it can, or if they are plain."""
    quantised = quantization_config(config)
    if quantised is None:
        return None
    method = str(quantised.get("quant_method") or quantised.get("quant_algo") or "")
    name, groups = method.lower(), quantised.get("config_groups")
    served = name == "mxfp8" or (name == "fp8" and quantised.get("weight_block_size") is not None)
    if name == "compressed-tensors" and isinstance(groups, Mapping):
        served = all(_is_int4(group, quantised.get("format")) for group in groups.values())
    if name.startswith("modelopt") or "quant_algo" in quantised:
        served = str(quantised.get("quant_algo")).upper() in ("NVFP4", "W4A16_NVFP4")
    if served:
        return None
    return (
        f"its weights are quantised as `{method}` in a form of which there is none but for GPUs; "
        "FP8 and MXFP8 in blocks, symmetric INT4 in groups (compressed-tensors, pack-quantized) "
        "and NVFP4 (ModelOpt) have one"
    )


def _is_int4(group: object, form: object) -> bool:
    """Return True for a group of compressed-tensors that packs symmetric INT4 in groups."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or (group.get("format") or form) != "pack-quantized":
        return False
    size = weights.get("group_size")
    whole = (weights.get("num_bits"), weights.get("type")) == (4, "int")
    in_groups = isinstance(size, int) and size > 0 and not weights.get("actorder")
    return whole and in_groups and weights.get("symmetric") is not False


_NO_LAYER = "SGLang 0.5.20 does not tell this family's routers which layer they are in"
_UNRECORDED = {
    "hy_v3": _NO_LAYER,
    "minimax_m2": _NO_LAYER,
    "gemma4": "SGLang 0.5.20 sizes the record by `num_experts_per_tok`, which this family's "
    "config.json calls `top_k_experts`",
    "nemotron_h": _NO_LAYER,
}
"""Families with experts whose choices SGLang does not record, and why. Read in its source; an
engine of Hunyuan 3 or MiniMax-M2 that was asked for a record died."""


def fault_of_record(facts: ModelFacts) -> str | None:
    """Return why no engine can record its chosen experts; None if no fault is known."""
    if not facts.num_moe_layers:
        return "no layer of the model has experts"
    return _UNRECORDED.get(facts.family)


def fault_of_images(facts: ModelFacts, *, is_exact: bool) -> str | None:
    """Return why no engine can show images to the model; None if no fault is known."""
    if is_exact and facts.vision is not None and facts.vision.tower == "siglip":
        return (
            "`train.on_policy=exact` sums each query over what stands before it, and tokens of an "
            "image of Gemma 3 see those behind them, too"
        )
    return None


_DEEPSEEK: dict[str, object] = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_SILENT: dict[str, dict[str, object]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": {**_DEEPSEEK, "first_k_dense_replace": 1},
    "gpt_oss": {"swiglu_limit": 7.0},
    "hy_v3": {"route_norm": True, "qk_norm": True},
    "minimax_m2": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
}
"""Fields that SGLang requires, and that releases of the families contain, but that transformers
does not write, as they are constants there."""


def _hybrid_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that SGLang reads and transformers does not write: SGLang expects full
    attention in every n-th layer, where transformers lists the layers, and reads a head's rotated
    share only in its old place in config.json."""
    fields: dict[str, object] = {}
    mixers, rope = config.get("layer_types"), config.get("rope_parameters")
    if isinstance(mixers, list):
        fields["full_attention_interval"] = (
            mixers.index("full_attention") if "full_attention" in mixers else len(mixers)
        ) + 1
    if isinstance(rope, Mapping) and "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return fields


ADAPTER_FAMILIES = (
    "gemma3",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Families that are served with a LoRA adapter on a CPU, and were compared with the merged
model."""
_ADAPTER_UNIT = 32
"""On a CPU SGLang pads the inner sizes of MLPs to a multiple of this, but not an adapter's
matrices."""


def fault_of_adapter(facts: ModelFacts) -> str | None:
    """Return why an engine on a CPU cannot serve an adapter over this model; None if it can."""
    if facts.family not in ADAPTER_FAMILIES:
        return f"only {', '.join(ADAPTER_FAMILIES)} were compared with merged models there"
    sizes = (facts.ffn_hidden_size, facts.moe_ffn_hidden_size, facts.shared_expert_ffn_hidden_size)
    odd = [size for size in sizes if size % _ADAPTER_UNIT]
    if odd:
        return f"SGLang pads an inner size of {odd[0]} to a multiple of {_ADAPTER_UNIT} there"
    return None


def missing_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return fields that SGLang requires and config.json omits, with transformers' defaults."""
    model_type = str(config.get("model_type"))
    fields = {
        name: value for name, value in _SILENT.get(model_type, {}).items() if name not in config
    }
    if model_type in CPU_FAMILIES and not config.get("architectures"):
        fields["architectures"] = [CPU_FAMILIES[model_type].architecture]
    family = CPU_FAMILIES.get(model_type)
    if family is not None and "delta" in family.pieces and not family.sees_images:
        inner = config.get("text_config")
        hybrid = _hybrid_fields(inner if isinstance(inner, Mapping) else config)
        # the tower of a multimodal release is neither trained nor loaded
        fields |= (
            {"text_config": hybrid, "language_model_only": True}
            if isinstance(inner, Mapping)
            else hybrid
        )
    rope = config.get("rope_parameters")
    if model_type == "minimax_m2" and "rotary_dim" not in config and isinstance(rope, Mapping):
        # the share of a head that turns, which SGLang reads in the old place alone
        fields["rotary_dim"] = int(
            float(str(config.get("head_dim", 128))) * rope.get("partial_rotary_factor", 1.0)
        )
    kinds = config.get("mlp_layer_types")
    if model_type in ("glm4_moe_lite", "hy_v3") and isinstance(kinds, list):
        fields["first_k_dense_replace"] = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    return fields


def model_zoo() -> Path:
    """Return SGLang's folder of models. Raises MachineError if SGLang is not installed."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise MachineError(
            "SGLang is not installed",
            why="`import sglang` finds no such module",
            fix="make install   # or: pip install sglang",
        )
    return Path(package.submodule_search_locations[0]) / "srt" / "models"
