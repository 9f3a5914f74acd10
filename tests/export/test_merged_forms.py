"""Merging an adapter into a base model whose folder has other names, or stacked experts, than the
first form of its table: the result is that of a folder in the first form."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.checkpoint.formats.schemes import scheme_of
from milescli.checkpoint.formats.stored import rounded
from milescli.console.output import Mode, Output
from milescli.export.adapter import Adapter, write_adapter, write_merged
from milescli.models import load_facts, table
from milescli.models.precision import choose, with_single_experts
from milescli.runtime.export import export_weights
from tests.backends.megatron.tiny_models import MODELS
from tests.export.models import QWEN3_MOE, make_base

Tensors = dict[str, torch.Tensor]
QWEN3_5 = {**MODELS["delta"], "dtype": "bfloat16"}


def _stacked(tensors: Tensors) -> Tensors:
    """As transformers 5 holds the experts: of each layer in two tensors."""
    stem, count = "model.layers.0.mlp.experts.", QWEN3_MOE["num_experts"]
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    gate, up, down = (
        [tensors[f"{stem}{n}.{part}_proj.weight"] for n in range(count)]
        for part in ("gate", "up", "down")
    )
    fused = [torch.cat(halves) for halves in zip(gate, up, strict=True)]
    return {
        **rest,
        f"{stem}gate_up_proj": torch.stack(fused),
        f"{stem}down_proj": torch.stack(down),
    }


def _nested(tensors: Tensors) -> Tensors:
    """As transformers saves the text model of a multimodal release."""
    return {_nested_name(name): tensor for name, tensor in tensors.items()}


def _nested_name(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def _two_bases(folder: Path, config: dict, form: Callable[[Tensors], Tensors]) -> tuple[Path, Path]:
    """The same weights in the first form of the table and in another."""
    first, other = folder / "first", folder / "other"
    tensors = make_base(first, config)
    shutil.copytree(first, other)
    save_file(form(tensors), other / "model.safetensors", metadata={"format": "pt"})
    return first, other


def _adapter(base: Path, *leaves: str) -> Adapter:
    """With a pair beside each matrix whose name ends so, named as in the table's first form."""
    generator = torch.Generator().manual_seed(3)
    pairs = {
        name.removesuffix(".weight"): (
            torch.randn(2, shape[1], generator=generator) / 8,
            torch.randn(shape[0], 2, generator=generator) / 8,
        )
        for name, shape in table(load_facts(base)).hf_shapes().items()
        if name.endswith(tuple(f"{leaf}.weight" for leaf in leaves))
    }
    return Adapter(pairs=pairs, alpha=4, rank=2, base_model=str(base))


def _merged(adapter: Adapter, base: Path, to: Path) -> Tensors:
    """What `miles export --merge` writes."""
    write_adapter(to.with_name(f"{to.name}-adapter"), adapter)
    export_weights(
        to.with_name(f"{to.name}-adapter"),
        to=to,
        format=None,
        step=None,
        base=base,
        merge=True,
        push=None,
        private=True,
        output=Output(Mode.QUIET),
    )
    return load_file(to / "model.safetensors")


def _require_equal(ours: Tensors, expected: Tensors) -> None:
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


@pytest.mark.parametrize(
    ("config", "form"), [(QWEN3_MOE, _stacked), (QWEN3_5, _nested)], ids=["stacked", "nested"]
)
def test_an_adapter_is_merged_into_a_base_in_another_form(
    tmp_path: Path, config: dict, form: Callable[[Tensors], Tensors]
) -> None:
    first, other = _two_bases(tmp_path, config, form)
    adapter = _adapter(first, "o_proj", "up_proj", "down_proj")
    expected = form(_merged(adapter, first, tmp_path / "of-first"))
    _require_equal(_merged(adapter, other, tmp_path / "of-other"), expected)
    write_merged(tmp_path / "whole", adapter, base=other)
    _require_equal(load_file(tmp_path / "whole" / "model.safetensors"), expected)


def test_an_adapter_may_have_the_names_of_its_base_in_another_form(tmp_path: Path) -> None:
    first, other = _two_bases(tmp_path, QWEN3_5, _nested)
    adapter = _adapter(first, "o_proj", "up_proj")
    named = replace(
        adapter, pairs={_nested_name(name): pair for name, pair in adapter.pairs.items()}
    )
    expected = _nested(_merged(adapter, first, tmp_path / "of-first"))
    _require_equal(_merged(named, other, tmp_path / "of-other"), expected)


def test_stacked_experts_of_a_quantised_base_are_rounded(tmp_path: Path) -> None:
    first, other = _two_bases(tmp_path, QWEN3_MOE, _stacked)
    choices = choose(with_single_experts(table(load_facts(first))), "mxfp8")
    rounds = partial(rounded, choices=choices, scheme=scheme_of("mxfp8", {}))
    adapter = replace(_adapter(first, "o_proj"), rounds_base=rounds)
    for base in (first, other):
        write_merged(tmp_path / f"merged-{base.name}", adapter, base=base)
    expected = _stacked(load_file(tmp_path / "merged-first" / "model.safetensors"))
    _require_equal(load_file(tmp_path / "merged-other" / "model.safetensors"), expected)
    assert not torch.equal(
        expected["model.layers.0.mlp.experts.down_proj"],
        load_file(other / "model.safetensors")["model.layers.0.mlp.experts.down_proj"],
    )
