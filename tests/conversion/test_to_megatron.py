"""From a Hugging Face folder to a checkpoint: forms that a folder may have, and those that are
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.core.errors import CheckpointError
from tests.conversion.making import (
    change,
    make,
    nothing_but,
    to_hf,
    to_megatron,
)


def test_an_output_layer_that_repeats_the_tied_embedding_is_used_once_and_comes_back(
    tmp_path: Path,
) -> None:
    source = make(tmp_path / "hf", "qwen3-tied")
    change(
        source,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    done = to_megatron(source, tmp_path / "megatron")
    assert any("lm_head.weight" in note and "once" in note for note in done.notes)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


def test_a_quantised_source_becomes_bfloat16_and_its_config_says_so_no_longer(
    tmp_path: Path,
) -> None:
    from milescli.checkpoint.formats import fp8_block
    from milescli.checkpoint.source import open_source

    source = make(tmp_path / "hf", dtype=torch.bfloat16)
    codec = fp8_block.codec()

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "proj.weight" in name]:
            parts = codec.quantise(tensors.pop(name).float(), None)
            tensors |= {
                name: parts["values"],
                name.replace(".weight", ".weight_scale_inv"): parts["scale"],
            }

    change(source, quantise)
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    _config(quantization_config=method, dtype="bfloat16")(source)
    with open_source(source) as opened:
        plain = {name: opened.read(name) for name in opened.names()}
    done = to_megatron(source, tmp_path / "megatron")
    assert any("dequantised to bfloat16" in note for note in done.notes)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    actual = load_file(tmp_path / "back" / "model.safetensors")
    assert actual.keys() == plain.keys()
    assert all(
        actual[name].dtype is torch.bfloat16 and torch.equal(actual[name], plain[name])
        for name in plain
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_mtp_layers_that_only_the_config_names_are_told_of(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "glm4-moe-mtp", num_nextn_predict_layers=0)
    _config(num_nextn_predict_layers=1)(source)
    done = to_megatron(source, tmp_path / "megatron")
    assert any("names 1 MTP layer" in note for note in done.notes)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


def _missing(source: Path) -> None:
    change(source, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def _extra(source: Path) -> None:
    change(source, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(3)}))


def _misshapen(source: Path) -> None:
    change(source, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))


def _nan(source: Path) -> None:
    change(
        source,
        lambda tensors: tensors["model.layers.2.self_attn.o_proj.weight"].__setitem__(
            (3, 5), float("nan")
        ),
    )


def _infinity(source: Path) -> None:
    change(
        source,
        lambda tensors: tensors["model.embed_tokens.weight"].__setitem__((130, 0), float("-inf")),
    )


def _truncated(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _absent_shard(source: Path) -> None:
    index = {
        "metadata": {},
        "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"},
    }
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickle(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def _untied(source: Path) -> None:
    change(source, lambda tensors: tensors.pop("lm_head.weight"))


def _config(**fields: object) -> Callable[[Path], None]:
    def edit(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **fields}))

    return edit


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_missing, ["lacks 1 tensor", "model.layers.1.mlp.up_proj.weight"]),
        (_extra, ["does not explain", "model.layers.0.extra.weight"]),
        (_misshapen, ["model.norm.weight", "[7]", "[48]"]),
        (_nan, ["model.layers.2.self_attn.o_proj.weight", "NaN", "[3, 5]"]),
        (_infinity, ["model.embed_tokens.weight", "infinite", "[130, 0]"]),
        (_truncated, ["model.safetensors", "truncated"]),
        (_absent_shard, ["model-00002-of-00002.safetensors", "not there"]),
        (_pickle, ["pytorch_model.bin", "pickle"]),
        (_untied, ["tie_word_embeddings: false", "lm_head.weight"]),
        (_config(tie_word_embeddings=True), ["tie_word_embeddings: true", "lm_head.weight"]),
        (_config(model_type="qwen33"), ["qwen33", "nearest is `qwen3`"]),
        (_config(rope_theta=500_000.0), ["contradicts itself", "rope_theta"]),
        (_config(hidden_size="many"), ["hidden_size"]),
        (lambda source: (source / "config.json").unlink(), ["not a model folder"]),
        (lambda source: (source / "config.json").write_text("{"), ["cannot read"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bad_sources_are_refused_by_name_and_nothing_is_left(
    tmp_path: Path, spoil: Callable, words: list[str]
) -> None:
    source = make(tmp_path / "hf")
    spoil(source)
    with pytest.raises(CheckpointError) as caught:
        to_megatron(source, tmp_path / "megatron")
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.exit_code == 6 and caught.value.why and caught.value.fixes
    nothing_but(tmp_path, "hf")
