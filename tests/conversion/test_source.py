"""What SRC may be: folders, checkpoints, runs; and what is neither."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.core.errors import CheckpointError
from tests.checkpoint.making import add_checkpoint, make_run
from tests.conversion.making import change, make, same_bytes, to_hf, to_megatron


@pytest.mark.parametrize("name", ["nowhere/at/all", "./nowhere", "notes.txt"])
def test_sources_that_are_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="not a model folder"):
        to_megatron(name, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        to_hf(Path(name), tmp_path / "out")


def test_a_folder_of_megatrons_own_needs_the_model_and_takes_it(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    shutil.copytree(tmp_path / "megatron" / "release", tmp_path / "plain" / "iter_0000100")
    (tmp_path / "plain" / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match="the model of the checkpoint") as caught:
        to_hf(tmp_path / "plain", tmp_path / "back")
    assert "--model" in caught.value.fixes[0]
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(source / "config.json", config)
    to_hf(tmp_path / "plain", tmp_path / "back", model=str(config))
    expected = load_file(source / "model.safetensors")
    actual = load_file(tmp_path / "back" / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    with pytest.raises(CheckpointError, match="another model"):
        to_hf(
            tmp_path / "plain" / "iter_0000100",
            tmp_path / "wrong",
            model=str(make(tmp_path / "other", num_hidden_layers=2)),
        )
    with pytest.raises(CheckpointError, match="no checkpoint `7`"):
        to_hf(tmp_path / "plain", tmp_path / "wrong", model=str(config), step=7)


def test_a_run_gives_its_newest_checkpoint_or_the_step_that_is_asked_for(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    run = make_run(tmp_path / "run", model_dir=source)
    weights = {}
    for step, factor in ((3, 1.0), (5, 2.0)):
        weights[step] = tmp_path / f"weights{step}"
        shutil.copytree(source, weights[step])
        _multiply(weights[step], factor)
        to_megatron(weights[step], tmp_path / f"megatron{step}")
        add_checkpoint(run, step, tensors=tmp_path / f"megatron{step}" / "release")
    to_hf(run.path, tmp_path / "newest")
    assert same_bytes(weights[5], tmp_path / "newest", "model.safetensors", "tokenizer.json")
    to_hf(run.path, tmp_path / "third", step=3)
    assert same_bytes(weights[3], tmp_path / "third")
    to_hf(run.checkpoints / "step_3", tmp_path / "by-folder")
    assert same_bytes(weights[3], tmp_path / "by-folder")


def _multiply(folder: Path, factor: float) -> None:
    change(folder, lambda tensors: [tensor.mul_(factor) for tensor in tensors.values()])


def test_a_run_whose_model_is_gone_or_unknown_needs_it_named(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    run = make_run(tmp_path / "run", model_dir=source)
    add_checkpoint(run, 1, tensors=tmp_path / "megatron" / "release")
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="no longer exists") as caught:
        to_hf(run.path, tmp_path / "back")
    assert str(source) in caught.value.why and caught.value.fixes[0].startswith("--model DIR")
    run.manifest_file.unlink()
    with pytest.raises(CheckpointError, match="is unknown") as caught:
        to_hf(run.path, tmp_path / "back")
    assert any(fix.startswith("--model DIR") for fix in caught.value.fixes)
    to_hf(run.path, tmp_path / "back", model=str(moved))
    assert same_bytes(moved, tmp_path / "back")
