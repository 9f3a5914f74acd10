"""Reading parts of safetensors, and writing shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milescli.checkpoint.hf_folder import HfReader, write_tensors
from milescli.checkpoint.weight_files import INDEX_NAME
from milescli.core.errors import CheckpointError


def test_what_is_written_in_shards_is_read_back(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.randn(5, 4) for number in range(6)}
    size = write_tensors(tmp_path, tensors.items(), max_shard_bytes=170)
    assert size == 6 * 80
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == size
    assert len(set(index["weight_map"].values())) == 3
    with HfReader(tmp_path) as reader:
        assert reader.names() == sorted(tensors)
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
    assert not list(tmp_path.glob("*.part"))


def test_a_small_model_is_one_file_without_index(tmp_path: Path) -> None:
    write_tensors(tmp_path, [("a", torch.ones(2))])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_parts_are_read_along_either_dim(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    with HfReader(tmp_path) as reader:
        assert torch.equal(reader.read("w", dim=0, start=1, end=3), whole[1:3])
        assert torch.equal(reader.read("w", dim=1, start=2, end=4), whole[:, 2:4])
        assert torch.equal(reader.read_row("w", row=2), whole[2])
        assert reader.shape("w") == (4, 6)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with HfReader(tmp_path) as reader, pytest.raises(CheckpointError, match="lm_head"):
        reader.read("lm_head.weight")


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no usable weights"):
        HfReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot read"):
        HfReader(tmp_path)


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ("{", "cannot read"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: str, word: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=word):
        HfReader(tmp_path)
