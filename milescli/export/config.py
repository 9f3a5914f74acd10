"""Makes config.json of an exported folder: the base model's, with the dtype and the
`quantization_config` of what was written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from milescli import __version__
from milescli.models.precision import FP8_BLOCK, Quantised

_TIE = "tie_word_embeddings"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_LEFT_BY_CALIBRATION = ("compression_config",)


def exported_config(
    base: Mapping[str, object],
    *,
    dtype: str,
    form: Quantised | None,
    plain_modules: Sequence[str],
    power_scales: bool = False,
) -> dict[str, object]:
    """Return the folder's config.json. `form` None means plain weights, without the base's
    quantisation. `plain_modules` are the modules that are not quantised."""
    config = {key: value for key, value in base.items() if key not in _LEFT_BY_CALIBRATION}
    nested = isinstance(config.get("text_config"), Mapping)
    text = dict(config["text_config"]) if nested else {}  # type: ignore[arg-type]
    was_nested = "quantization_config" in text
    for holder in (config, text):
        holder.pop("quantization_config", None)
        for key in _DTYPE_KEYS:
            if key in holder:
                holder[key] = dtype
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = dtype
    # DeepSeek-V4 says so of its experts alone, beside the quantisation
    config.pop("expert_dtype", None)
    if form is not None:
        holder = text if was_nested else config
        holder["quantization_config"] = quantization_config(
            form, plain_modules, power_scales=power_scales
        )
    if nested:
        config["text_config"] = text
    return config


def with_untied_embeddings(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config of a model whose output layer has weights of its own."""
    text = config.get("text_config")
    nested = {"text_config": {**text, _TIE: False}} if isinstance(text, Mapping) else {}
    return {**config, **nested, _TIE: False}


def quantization_config(
    form: Quantised, plain_modules: Sequence[str], *, power_scales: bool = False
) -> dict[str, object]:
    """Return the quantisation section as SGLang and transformers read it."""
    plain = list(plain_modules)
    if form == "fp8":
        scales = {"scale_fmt": "ue8m0"} if power_scales else {}
        return {**_fp8("fp8", [FP8_BLOCK, FP8_BLOCK]), **scales, "modules_to_not_convert": plain}
    if form == "mxfp8":
        return {**_fp8("mxfp8", [1, 32]), "scale_fmt": "ue8m0", "modules_to_not_convert": plain}
    if form == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    if form == "int4":
        return _compressed_tensors(plain)
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        # activations were not calibrated, so that they stay in 16 bits
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": plain,
        "producer": {"name": "miles", "version": __version__},
    }


def _fp8(method: str, block: list[int]) -> dict[str, object]:
    return {
        "quant_method": method,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
    }


def _compressed_tensors(plain: list[str]) -> dict[str, object]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plain, *_fused(plain)],
        "kv_cache_scheme": None,
    }


_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Module of the engines -> the modules on disk that it joins."""


def _fused(plain: Sequence[str]) -> list[str]:
    """Return the names of joined modules whose parts are all plain. SGLang's DeepSeek models look
    for these names in compressed-tensors, and not for those of the parts."""
    known = set(plain)
    return [
        f"{above}.{joined}"
        for joined, (first, *others) in _FUSED.items()
        for above, _, last in (name.rpartition(".") for name in plain)
        if last == first and all(f"{above}.{other}" in known for other in others)
    ]


def patterns_of_passed(names: Iterable[str], form: Quantised) -> list[str]:
    """Return entries for modules that were passed through: one per tower, in the form that the
    format's readers match."""
    stems = sorted({".".join(name.split(".")[:2]) for name in names})
    if form == "int4":
        return [f"re:^{re.escape(stem)}\\..*" for stem in stems]
    return [f"{stem}*" if form == "nvfp4" else stem for stem in stems]
