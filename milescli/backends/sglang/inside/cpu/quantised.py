"""Quantised weights on a CPU: FP8 in blocks, MXFP8, INT4 in groups and NVFP4, dense and experts.
SGLang's kernels for them are for accelerators.

A layer holds the bytes and scales as they were loaded, so that an update finds them. From them it
makes plain weights once, where SGLang would repack them for its kernels, and then computes as an
unquantised layer does. Inputs are rounded where the trainer rounds them. No memory is saved: a
weight takes its bytes and the plain copy.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from milescli.backends.sglang.inside.cpu.layers import experts_in_order
from milescli.backends.sglang.plugin import INPUTS_VARIABLE
from milescli.checkpoint.formats import fp4, fp8_block, int4, mxfp8
from milescli.checkpoint.formats.base import Codec, dequantise_by_rows, rounded_by_rows
from milescli.checkpoint.formats.schemes import INPUT_CODECS
from milescli.models.precision import Quantised

_QUANTISATION = "sglang.srt.layers.quantization"
_MODELOPT = f"{_QUANTISATION}.modelopt_quant"
_SCHEMES = f"{_QUANTISATION}.compressed_tensors.schemes.compressed_tensors_wNa16"
_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
_PLAIN = "plain_weights"
"""Attribute of a layer that holds its `_Plain`."""


@functools.cache
def _input_codec() -> Codec | None:
    """Return the codec of inputs in this process; None if they stay unrounded."""
    form = os.environ.get(INPUTS_VARIABLE)
    return None if form is None else INPUT_CODECS[cast("Quantised", form)]


class _Plain:
    """Stands for a layer, with the weights that SGLang's methods of unquantised layers read."""

    def __init__(self, layer: torch.nn.Module) -> None:
        """Take the layer; weights are set as attributes."""
        self._layer = layer

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return the inputs [tokens, columns] as the layer multiplies them."""
        codec = _input_codec()
        return x if codec is None else rounded_by_rows(codec, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


Dequantise = Callable[[Any, torch.nn.Module, str], Tensor]
"""(SGLang's method, layer, plain name of a weight) -> [..., rows, columns]"""


def _fp8(method: Any, layer: torch.nn.Module, name: str) -> Tensor:
    block = tuple(method.quant_config.weight_block_size)
    codec = mxfp8.CODEC if method.use_mxfp8 else fp8_block.codec(block)
    return _dequantised(codec, layer, getattr(layer, name), getattr(layer, f"{name}_scale_inv"))


def _int4(method: Any, layer: torch.nn.Module, name: str) -> Tensor:
    values, scale = getattr(layer, f"{name}_packed"), getattr(layer, f"{name}_scale")
    if values.dim() > 2:  # experts lie as [E, columns / 8, rows]
        values, scale = values.transpose(1, 2), scale.transpose(1, 2)
    return _dequantised(int4.codec(method.group_size), layer, values, scale)


def _nvfp4(method: Any, layer: torch.nn.Module, name: str) -> Tensor:
    """Dequantise NVFP4; each part of a fused matrix has its own global scale."""
    values, scale = getattr(layer, name), getattr(layer, f"{name}_scale")
    whole = getattr(layer, f"{name}_scale_2")
    if values.dim() > 2:
        matrices = zip(values, scale, whole.reshape(len(values), -1), strict=True)
        return torch.stack([_nvfp4_parts(layer, *matrix, None) for matrix in matrices])
    return _nvfp4_parts(layer, values, scale, whole, layer.logical_widths)


def _nvfp4_parts(
    layer: torch.nn.Module, values: Tensor, scale: Tensor, whole: Tensor, widths: list[int] | None
) -> Tensor:
    widths = widths or [len(values) // len(whole)] * len(whole)
    parts = zip(values.split(widths), scale.split(widths), whole, strict=True)
    return torch.cat(
        [_dequantised(fp4.NVFP4, layer, *part, global_scale=of) for *part, of in parts]
    )


def _dequantised(
    codec: Codec, layer: torch.nn.Module, values: Tensor, scale: Tensor, **more: Tensor
) -> Tensor:
    columns = (0, values.shape[-1] * codec.per_element)
    parts = {"values": values, "scale": scale, **more}
    return dequantise_by_rows(codec, parts, dtype=layer.params_dtype, columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    """Describes one of SGLang's classes that hold a kind of quantised layer."""

    module: str
    name: str
    dequantise: Dequantise
    apply: str = "apply"
    """Name of its forward method."""
    weights: tuple[str, ...] = ("weight",)
    """Plain names of a layer's weights."""


_EXPERTS = ("w13_weight", "w2_weight")
_METHODS = (
    _Method(module=f"{_QUANTISATION}.fp8", name="Fp8LinearMethod", dequantise=_fp8),
    _Method(module=f"{_QUANTISATION}.fp8", name="Fp8MoEMethod", dequantise=_fp8, weights=_EXPERTS),
    _Method(
        module=_SCHEMES, name="CompressedTensorsWNA16", dequantise=_int4, apply="apply_weights"
    ),
    _Method(
        module=f"{_SCHEMES}_moe",
        name="CompressedTensorsWNA16MoE",
        dequantise=_int4,
        apply="apply_weights",
        weights=_EXPERTS,
    ),
    _Method(module=_MODELOPT, name="ModelOptFp4LinearMethod", dequantise=_nvfp4),
    _Method(module=_MODELOPT, name="ModelOptNvFp4A16LinearMethod", dequantise=_nvfp4),
    _Method(
        module=_MODELOPT,
        name="ModelOptNvFp4FusedMoEMethod",
        dequantise=_nvfp4,
        weights=_EXPERTS,
    ),
)


def install() -> None:
    """Let SGLang's quantised layers compute on a CPU."""
    from sglang.srt.layers.moe import fused_moe_native

    _accept_cpu()
    for method in _METHODS:
        _install_method(getattr(import_module(method.module), method.name), method)
    _install_nvfp4_experts()
    _install_latent()
    if _input_codec() is not None:
        fused_moe_native.moe_forward_native = experts_in_order


def _accept_cpu() -> None:
    """Take away SGLang's refusals of float32, of a device without CUDA, and of blocks that are not
    square, whose columns it then pads intermediate sizes to."""
    from sglang.srt.configs import update_config
    from sglang.srt.layers.quantization import fp8, modelopt_quant
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    for config in (fp8.Fp8Config, CompressedTensorsConfig, modelopt_quant.ModelOptFp4Config):
        config.get_supported_act_dtypes = classmethod(lambda cls: _DTYPES)
    CompressedTensorsConfig._check_scheme_supported = lambda self, *_, **__: True
    padding = update_config.get_moe_padding_size
    update_config.get_moe_padding_size = lambda block: padding(block and [block[-1]])


def _install_method(stock: type, method: _Method) -> None:
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )

    @torch.no_grad()
    def make_plain(self, layer):
        plain = vars(layer).setdefault(_PLAIN, _Plain(layer))
        for name in method.weights:
            weight = method.dequantise(self, layer, name)
            if name in vars(plain):
                getattr(plain, name).copy_(weight)
            else:
                setattr(plain, name, weight)

    def multiply(self, layer, x, bias=None):
        plain = getattr(layer, _PLAIN)
        return UnquantizedLinearMethod.apply(self, plain, plain.rounded_input(x), bias)

    def create_runner(self, layer, moe_runner_config):
        self.moe_runner_config = moe_runner_config

    def run_experts(self, layer, dispatch_output):
        return UnquantizedFusedMoEMethod.forward_cpu(self, getattr(layer, _PLAIN), dispatch_output)

    stock.process_weights_after_loading = make_plain
    has_experts = method.weights == _EXPERTS
    setattr(stock, method.apply, run_experts if has_experts else multiply)
    if has_experts:
        stock.create_moe_runner = create_runner


def _install_nvfp4_experts() -> None:
    """Make NVFP4 experts without asking for a device, and without room for swizzled scales. The
    model scales what they return, as that of other formats: SGLang would leave that to the choice
    of experts, which on a CPU does not."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.quantization import modelopt_quant

    layer._fuses_routed_scaling_factor_in_topk = lambda method: False

    def __init__(self, quant_config):
        self.quant_config, self.enable_flashinfer_trtllm_moe = quant_config, True

    modelopt_quant.ModelOptNvFp4FusedMoEMethod.__init__ = __init__


def _install_latent() -> None:
    """Split the plain form of a latent attention's `kv_b_proj`, which SGLang would quantise a
    second time, by one scale."""
    from sglang.srt.layers.quantization import fp8_utils

    def dequantised(values: Tensor, scale: Tensor, block: list[int]) -> tuple[Tensor, None]:
        codec = fp8_block.codec((block[0], block[1]))
        parts, columns = {"values": values, "scale": scale}, (0, values.shape[1])
        dtype = torch.get_default_dtype()
        return dequantise_by_rows(codec, parts, dtype=dtype, columns=columns), None

    # the piece of latent attention may have imported the reader that calls it
    reader = sys.modules.get("sglang.srt.models.deepseek_common.deepseek_weight_loader")
    for module in filter(None, (fp8_utils, reader)):
        module.block_quant_to_tensor_quant = dequantised
