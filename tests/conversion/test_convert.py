"""Conversions both ways: what comes out is what went in, what the manifest says, and how much
memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.checkpoint.files import StreamFile
from milescli.core.errors import CheckpointError
from tests.conversion.making import (
    ROOT,
    change,
    make,
    nothing_but,
    to_hf,
    to_megatron,
)


def test_a_model_comes_back_byte_for_byte_with_what_lay_beside_it(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "qwen3-moe", dtype=torch.bfloat16)
    done = to_megatron(source, tmp_path / "megatron")
    assert done.proof.num_source_tensors == len(load_file(source / "model.safetensors"))
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    nothing_but(tmp_path, "hf", "megatron", "back")


def test_every_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", dtype=torch.bfloat16)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
            tensors[name] = tensors[name].float() + 1e-6
        tensors["model.layers.1.input_layernorm.weight"] = tensors[
            "model.layers.1.input_layernorm.weight"
        ].half()

    change(source, widen)
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


def test_the_manifest_says_what_was_shown_and_lists_every_file(tmp_path: Path) -> None:
    from milescli.checkpoint.files import crc32_of_file

    to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    manifest = json.loads((tmp_path / "megatron" / "manifest.json").read_text())
    files = {
        str(path.relative_to(tmp_path / "megatron"))
        for path in (tmp_path / "megatron").rglob("*")
        if path.is_file()
    }
    assert files == {*manifest["files"], "manifest.json"}
    for name, recorded in manifest["files"].items():
        assert f"{crc32_of_file(tmp_path / 'megatron' / name):08x}" == recorded["crc32"]
    assert manifest["family"] == "qwen3" and manifest["proof"]["num_source_tensors"] == 36


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    target.mkdir()
    to_megatron(source, target)  # an empty folder is nothing
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="there already"):
        to_megatron(source, target)
    with pytest.raises(CheckpointError, match="there already"):
        to_hf(target, source)
    assert (target / "manifest.json").read_bytes() == before
    nothing_but(tmp_path, "hf", "megatron")


def test_a_disk_that_gives_other_bytes_back_is_found_and_the_tensor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "hf")
    plain = StreamFile.close

    def spoil(self: StreamFile) -> None:
        plain(self)
        with self.path.open("r+b") as file:
            file.seek(4000)
            byte = file.read(1)
            file.seek(4000)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(StreamFile, "close", spoil)
    with pytest.raises(CheckpointError, match="gave back other bytes") as caught:
        to_megatron(source, tmp_path / "megatron")
    assert "embedding.word_embeddings.weight" in caught.value.why
    nothing_but(tmp_path, "hf")


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 500 MiB in small tensors: what its process takes beyond its imports stays far
    below."""
    source = make(
        tmp_path / "hf",
        num_hidden_layers=48,
        hidden_size=512,
        intermediate_size=1800,
        dtype=torch.float32,
    )
    assert (source / "model.safetensors").stat().st_size > 500 * 2**20
    script = (
        "import resource, sys; from pathlib import Path; import tests.conversion.making as t;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "t.to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), file_bytes=2**26); "
        "t.to_hf(Path(sys.argv[2]), Path(sys.argv[3]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(source),
        str(tmp_path / "megatron"),
        str(tmp_path / "back"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, timeout=600, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 400 * 2**20, f"{int(done.stdout) / 1024:.0f} MiB"
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()
