"""Maps `quantization_config` of a config.json to the schemes in which the folder's tensors may be
stored. Knows names, reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from milescli.checkpoint.formats import fp4, fp8_block, int4, mxfp8
from milescli.checkpoint.formats.base import Codec, Scheme
from milescli.core.errors import CheckpointError
from milescli.models.base import quantization_config
from milescli.models.precision import Quantised

_SCALE_INV = {"values": ".weight", "scale": ".weight_scale_inv"}
_SCALE = {"values": ".weight", "scale": ".weight_scale"}
FP8 = Scheme(codec=fp8_block.codec(), suffixes=_SCALE_INV)
FP8_STACKED = Scheme(
    codec=fp8_block.codec(), suffixes={"values": "", "scale": "_scale_inv"}, plain_suffix=""
)
"""Experts that are stacked in one tensor, which has no `.weight`."""
MXFP8 = Scheme(codec=mxfp8.CODEC, suffixes=_SCALE_INV)
NVFP4 = Scheme(codec=fp4.NVFP4, suffixes={**_SCALE, "global_scale": ".weight_scale_2"})
MXFP4_STACKED = Scheme(
    codec=fp4.MXFP4,
    suffixes={"values": "_blocks", "scale": "_scales"},
    plain_suffix="",
    transposed=True,
    grouped=True,
)
"""gpt-oss: [experts, rows, groups, 16], which is [experts, columns, rows] in transformers."""
_V4_FP8 = Scheme(
    codec=fp8_block.codec(powers=True), suffixes={"values": ".weight", "scale": ".scale"}
)
_V4_EXPERTS = Scheme(
    codec=replace(fp4.MXFP4, values_dtypes=(torch.int8, torch.uint8)),
    suffixes={"values": ".weight", "scale": ".scale"},
)

DROPPED = (
    ".input_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".activation_scale",
    ".input_global_scale",
)
"""Suffixes of tensors that scale activations or caches, not weights."""


def int4_scheme(group: int) -> Scheme:
    """Return the scheme of compressed-tensors W4A16, `pack-quantized`."""
    return Scheme(
        codec=int4.codec(group),
        suffixes={"values": ".weight_packed", "scale": ".weight_scale", "shape": ".weight_shape"},
    )


SCHEMES: Mapping[Quantised, Scheme] = {
    "fp8": FP8,
    "mxfp8": MXFP8,
    "int4": int4_scheme(32),
    "nvfp4": NVFP4,
    "mxfp4": MXFP4_STACKED,
}
"""Schemes for writing."""
INPUT_CODECS: Mapping[Quantised, Codec] = {
    "fp8": fp8_block.codec((1, 128)),
    "mxfp8": MXFP8.codec,
    "nvfp4": NVFP4.codec,
}
"""Codecs of a layer's inputs [tokens, columns]: with FP8, 128 numbers of a token share a scale
(DeepSeek-V3 technical report, section 3.3)."""


def has_power_scales(config: Mapping[str, object]) -> bool:
    """Return True if a model's config.json says that its FP8 scales are powers of two
    (DeepSeek-V3.2's `scale_fmt`); exports keep them so."""
    return (quantization_config(config) or {}).get("scale_fmt") == "ue8m0"


def scheme_of(form: Quantised, config: Mapping[str, object]) -> Scheme:
    """Return the scheme in which a format is written; `config` is the model's config.json."""
    if form == "fp8" and has_power_scales(config):
        return replace(FP8, codec=fp8_block.codec(powers=True))
    return SCHEMES[form]


def schemes_of(config: Mapping[str, object]) -> tuple[Scheme, ...]:
    """Return the schemes that a folder with this config.json may use; none for plain weights.
    Raises CheckpointError for an unreadable quantisation."""
    quantised = quantization_config(config)
    if quantised is None:
        return ()
    method = str(quantised.get("quant_method") or "").lower()
    algorithm = str(quantised.get("quant_algo") or "").upper()
    if method == "fp8":
        # DeepSeek-V4's own first, where its config.json says so: an error names its scales
        return _fp8(quantised)[:: -1 if "expert_dtype" in config else 1]
    if method == "mxfp8":
        return (MXFP8,)
    if method == "mxfp4":
        return (MXFP4_STACKED,)
    if method == "compressed-tensors":
        return _compressed_tensors(quantised)
    if method.startswith("modelopt") or (not method and algorithm):
        return _modelopt(algorithm)
    raise _unreadable(
        method or "a method without a name",
        why="miles supports fp8, mxfp8, mxfp4, compressed-tensors and modelopt (NVFP4)",
    )


def _fp8(quantised: Mapping[str, object]) -> tuple[Scheme, ...]:
    size = quantised.get("weight_block_size")
    if size is None:
        return (
            Scheme(codec=fp8_block.codec((0, 0)), suffixes=_SCALE),
            Scheme(codec=fp8_block.codec((1, 0)), suffixes=_SCALE),
        )
    if not (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(n, int) and n > 0 for n in size)
    ):
        raise _unreadable("fp8", why=f"`weight_block_size` is {size!r}, not two whole numbers")
    codec = fp8_block.codec((size[0], size[1]), powers=quantised.get("scale_fmt") == "ue8m0")
    return (*(replace(scheme, codec=codec) for scheme in (FP8, FP8_STACKED, _V4_FP8)), _V4_EXPERTS)


def _compressed_tensors(quantised: Mapping[str, object]) -> tuple[Scheme, ...]:
    groups = quantised.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unreadable("compressed-tensors", why="it does not contain `config_groups`")
    return tuple(
        _compressed_group(group, str(_of(group, "format") or quantised.get("format")))
        for group in groups.values()
    )


def _compressed_group(group: object, form: str) -> Scheme:
    weights = _of(group, "weights")
    bits, kind, strategy = _of(weights, "num_bits"), _of(weights, "type"), _of(weights, "strategy")
    size = _of(weights, "group_size") or 0
    if form == "pack-quantized" and bits == 4 and kind == "int":
        if _of(weights, "symmetric") is False:
            raise _unreadable(
                "compressed-tensors", why="its INT4 weights have zero points (`symmetric: false`)"
            )
        if _of(weights, "actorder"):
            raise _unreadable(
                "compressed-tensors",
                why=f"its columns are reordered (`actorder: {_of(weights, 'actorder')}`)",
            )
        assert isinstance(size, int), size
        return int4_scheme(max(size, 0))
    if form in ("float-quantized", "naive-quantized") and bits == 8 and kind == "float":
        blocks = {
            "channel": (1, 0),
            "tensor": (0, 0),
            "block": tuple(_of(weights, "block_structure") or (128, 128)),
        }
        if strategy in blocks:
            rows, columns = blocks[str(strategy)]
            return Scheme(codec=fp8_block.codec((rows, columns)), suffixes=_SCALE)
    if form == "nvfp4-pack-quantized" and bits == 4 and kind == "float":
        suffixes = {
            "values": ".weight_packed",
            "scale": ".weight_scale",
            "global_scale": ".weight_global_scale",
        }
        return Scheme(codec=fp4.NVFP4_DIVIDED, suffixes=suffixes)
    if form == "mxfp8-quantized":
        return Scheme(codec=mxfp8.CODEC, suffixes=_SCALE)
    raise _unreadable(
        "compressed-tensors", why=f"its format is {form}, {kind} of {bits} bits by {strategy}"
    )


def _modelopt(algorithm: str) -> tuple[Scheme, ...]:
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return (NVFP4,)
    raise _unreadable(
        "modelopt",
        why=f"its `quant_algo` is {algorithm or 'missing'}; miles supports NVFP4 and W4A16_NVFP4",
    )


def _of(group: object, key: str) -> object:
    return group.get(key) if isinstance(group, Mapping) else None


def _unreadable(method: str, *, why: str) -> CheckpointError:
    return CheckpointError(
        f"weights quantised as `{method}` are not supported",
        why=why,
        fix="use the BF16 release, or the one in block-wise FP8 or INT4",
    )
