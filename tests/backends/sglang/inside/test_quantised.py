"""The order of calls around an update of quantised weights, with layers that do on a CPU what
SGLang's do on accelerators; and the comparison of bytes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Module, Parameter

from milescli.backends.sglang.inside import quantised, verify


class Method:
    """Doubles what was loaded, in one of the ways of SGLang's formats."""

    def __init__(self, way: str) -> None:
        self.way, self.calls = way, []

    def restore_weights_before_loading(self, layer: Module) -> None:
        self.calls.append("restore")
        if self.way == "resized":
            layer.weight.resize_(4, 2)

    def process_weights_after_loading(self, layer: Module) -> None:
        self.calls.append("process")
        doubled = (layer.weight.data.float() * 2).reshape(2, 4)
        if self.way == "beside":
            layer.derived = doubled
        elif self.way == "marked":  # once, as scales for DeepGEMM
            if not getattr(layer.weight, "format_ue8m0", False):
                layer.weight.data, layer.weight.format_ue8m0 = doubled, True
        elif self.way == "replaced":  # without a loader, as Marlin's dense parameters are
            layer.weight = Parameter(doubled, requires_grad=False)
        else:  # in place, under another shape, as Marlin's experts are
            layer.weight.resize_(2, 4).copy_(doubled)


class UnquantizedMethod(Method):
    """By its name a method that SGLang loads directly."""


def model_of(method: Method) -> Module:
    model, layer = Module(), Module()
    layer.quant_method = method
    layer.weight = Parameter(torch.ones(4, 2), requires_grad=False)
    layer.weight.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)
    model.layer = layer
    return model


def load(model: Module, tensor: torch.Tensor) -> None:
    """As `load_weights` does."""
    quantised.begin(model)
    model.layer.weight.weight_loader(model.layer.weight, tensor)


def process(model: Module) -> None:
    """As SGLang's loader does, as the engine has it."""

    def stock(model: Module, device: torch.device) -> None:
        model.layer.quant_method.process_weights_after_loading(model.layer)

    quantised.noting(stock)(model, torch.device("cpu"))


@pytest.mark.parametrize("way", ["beside", "marked", "replaced", "resized"])
def test_an_update_restores_before_its_first_bucket_and_processes_after_its_last(way):
    method = Method(way)
    model = model_of(method)
    process(model)  # as the engine's start does
    layer = model.layer
    place = layer.weight.data_ptr()
    for turn in (3.0, 5.0):
        method.calls.clear()
        for _ in range(3):  # buckets
            load(model, torch.full((4, 2), turn))
        assert method.calls == ["restore"]
        process(model)
        assert method.calls == ["restore", "process"]
        served = layer.derived if way == "beside" else layer.weight
        assert torch.equal(served, torch.full((2, 4), 2 * turn))
        assert layer.weight.data_ptr() == place, "a graph that was captured reads another place"


def test_what_is_not_sent_of_a_replaced_parameter_is_not_a_number():
    model = model_of(Method("replaced"))
    process(model)
    quantised.begin(model)
    assert bool(model.layer.weight.isnan().all()) and model.layer.weight.shape == (4, 2)


def test_plain_weights_are_neither_restored_nor_processed_by_an_update():
    method = UnquantizedMethod("beside")
    model = model_of(method)
    process(model)
    load(model, torch.zeros(4, 2))
    assert method.calls == ["process"]


@pytest.mark.parametrize("way", ["beside", "marked", "replaced", "resized"])
def test_verify_compares_what_was_made_of_the_bytes(way):
    model = model_of(Method(way))
    process(model)
    for sent, expected in ((1.0, None), (1.5, "layer.weight: 8 of 8 values")):
        verify.begin(list(model.named_parameters()))
        load(model, torch.full((4, 2), sent))
        process(model)
        finding = verify.end(list(model.named_parameters()))
        assert finding is None if expected is None else finding.startswith(expected), finding


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_verify_names_a_wrong_byte_and_what_was_not_sent(dtype):
    held = torch.arange(1, 13).to(dtype).reshape(3, 4)
    parameter = held.clone()
    weights = [("experts.w2_weight", parameter), ("attn.k_scale", torch.tensor(1.0))]
    for change, says in (
        (None, None),
        (lambda: parameter[1].fill_(7), "experts.w2_weight: 3 of 12 values, the first at"),
        ("nothing", "experts.w2_weight: 12 of 12 values were not sent"),
    ):
        verify.begin(weights)
        if change != "nothing":
            parameter.copy_(held)
        if callable(change):
            change()
        finding = verify.end(weights)
        assert finding is None if says is None else finding.startswith(says), finding
        assert torch.equal(parameter.view(torch.uint8), held.view(torch.uint8))


def test_scales_of_blocks_reach_llama_too_each_to_its_part():
    """Whose own reader renames them to what no parameter is called."""
    loaded, others = {}, []
    model, layers = Module(), Module()
    model.layers = torch.nn.ModuleList([layers])
    for fused in ("qkv_proj", "gate_up_proj", "o_proj"):
        layer = Module()
        layer.weight_scale_inv = Parameter(torch.zeros(1), requires_grad=False)
        layer.weight_scale_inv.weight_loader = lambda parameter, scale, shard=None, fused=fused: (
            loaded.__setitem__((fused, shard), scale.item())
        )
        layers.add_module(fused, layer)
    model.load_weights = lambda weights: others.extend(name for name, _ in weights)
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj")
    named = [
        (f"layers.0.{part}.weight_scale_inv", torch.tensor(float(at)))
        for at, part in enumerate(parts)
    ]
    weights = [("q_proj.weight", torch.ones(1)), *named, ("none.weight_scale_inv", torch.ones(1))]
    quantised.loading_block_scales(model)(weights)
    assert loaded == {
        ("qkv_proj", "q"): 0,
        ("qkv_proj", "k"): 1,
        ("qkv_proj", "v"): 2,
        ("gate_up_proj", 0): 3,
        ("gate_up_proj", 1): 4,
        ("o_proj", None): 5,
    }
    assert others == ["q_proj.weight", "none.weight_scale_inv"]
