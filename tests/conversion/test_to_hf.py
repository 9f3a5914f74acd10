"""From a checkpoint to a Hugging Face folder: shards, dtypes, what the checkpoint lacks."""

from __future__ import annotations

import json
import shutil
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


def test_shards_are_as_large_as_asked_and_are_listed(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=60_000)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 70_000 for path in files)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    expected, actual = load_file(source / "model.safetensors"), {}
    for path in files:
        tensors = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in tensors)
        actual |= tensors
    assert actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in actual
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def test_another_dtype_is_written_and_said_in_the_config(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    done = to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bf16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert any("rounded from F32 to BF16" in note for note in done.notes)
    expected, actual = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert all(torch.equal(actual[name], expected[name].bfloat16()) for name in expected)


def test_mtp_layers_that_a_checkpoint_lacks_come_from_the_model_and_are_told_of(
    tmp_path: Path,
) -> None:
    source = make(tmp_path / "hf", "glm4-moe-mtp")
    trained = make(tmp_path / "trained", "glm4-moe-mtp", num_nextn_predict_layers=0)
    change(trained, lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    to_megatron(trained, tmp_path / "megatron")
    done = to_hf(tmp_path / "megatron" / "release", tmp_path / "back", model=str(source))
    assert any("taken from the model" in note for note in done.notes)
    expected = load_file(source / "model.safetensors")
    expected |= load_file(trained / "model.safetensors")
    actual = load_file(tmp_path / "back" / "model.safetensors")
    assert actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in actual
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    done = to_hf(tmp_path / "megatron" / "release", tmp_path / "without", model=str(bare))
    assert any("written without" in note for note in done.notes)
    assert (
        load_file(tmp_path / "without" / "model.safetensors").keys()
        == load_file(trained / "model.safetensors").keys()
    )


def test_a_torn_checkpoint_and_one_with_nan_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    torn = tmp_path / "torn"
    shutil.copytree(tmp_path / "megatron", torn)
    data = torn / "release" / "__0_1.distcp"
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="corrupt"):
        to_hf(torn, tmp_path / "back")
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tmp_path / "megatron", spoilt)
    data = spoilt / "release" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    first = load_file(source / "model.safetensors")["model.embed_tokens.weight"].numpy().tobytes()
    at = bytes(content).index(first[:64])
    content[at : at + 4] = b"\x00\x00\xc0\x7f"
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        to_hf(spoilt, tmp_path / "back")
    nothing_but(tmp_path, "hf", "megatron", "torn", "spoilt")
