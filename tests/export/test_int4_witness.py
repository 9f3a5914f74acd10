"""An INT4 export as the compressed-tensors library reads it: by its own reading of config.json, it
decodes every tensor of the folder to the numbers that we read, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.checkpoint.source import QuantisedReader, open_source
from milescli.export.config import quantization_config
from milescli.export.folder import write_folder
from tests.export.models import (
    DEEPSEEK_V3,
    QWEN3,
    QWEN3_MOE,
    make_base,
    reader_of,
    table_of,
    trained,
)


def _export(tmp_path: Path, config: dict) -> Path:
    """Trained weights as INT4, in several files."""
    weights = trained(make_base(tmp_path / "base", config))
    return write_folder(
        tmp_path / "out",
        table=table_of(config),
        read=reader_of(weights),
        base=tmp_path / "base",
        format="int4",
        card=lambda written: {},
        max_shard_bytes=100_000,
    ).path


def _decode(folder: Path) -> dict[str, torch.Tensor]:
    """By compressed-tensors alone."""
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    witness = CompressedTensorsDequantizer(folder, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    witness.validate(tensors)
    return witness.process(tensors)


@pytest.mark.parametrize(
    "config", [QWEN3, QWEN3_MOE, DEEPSEEK_V3], ids=lambda config: config["model_type"]
)
def test_compressed_tensors_decodes_the_folder_to_what_we_read(
    tmp_path: Path, config: dict
) -> None:
    folder = _export(tmp_path, config)
    decoded = _decode(folder)
    with open_source(folder) as source:
        assert isinstance(source, QuantisedReader) and source.quantised_names()
        assert decoded.keys() == set(source.names())
        for name in source.names():
            ours = source.read(name)
            assert decoded[name].dtype == ours.dtype and torch.equal(decoded[name], ours), name


def test_the_witness_goes_by_config_json(tmp_path: Path) -> None:
    folder = _export(tmp_path, QWEN3)
    config = json.loads((folder / "config.json").read_text())
    quantised = config["quantization_config"]
    quantised["ignore"] = [*quantised["ignore"], "model.layers.0.mlp.down_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    decoded = _decode(folder)
    assert "model.layers.0.mlp.down_proj.weight" not in decoded


def test_modules_that_engines_join_are_plain_where_all_their_parts_are() -> None:
    """Else SGLang's DeepSeek models expect packed numbers, and do not start."""
    parts = ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    plain = [*(f"model.layers.0.{part}" for part in parts), "model.layers.1.mlp.gate_proj"]
    ignored = quantization_config("int4", plain)["ignore"]
    assert ignored == [
        *plain,
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa",
    ]
