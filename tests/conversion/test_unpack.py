"""A converted model as a folder for engines, as a run makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.conversion.unpack import unpack
from milescli.core.errors import CheckpointError
from milescli.models import load_facts
from milescli.recipe.model import Model
from milescli.runtime.inputs.model_facts import facts_of_recipe
from milescli.runtime.inputs.run_inputs import model_dir_of
from tests.conversion.making import interrupted_after, make, nothing_but, same_bytes, to_megatron


def test_a_converted_model_becomes_the_folder_that_it_was(tmp_path: Path) -> None:
    source, made = make(tmp_path / "hf"), tmp_path / "megatron"
    to_megatron(source, made)
    unpack(made / "release", tmp_path / "back", model_dir=made / "hf")
    assert same_bytes(source, tmp_path / "back", "model.safetensors", "tokenizer.json")
    nothing_but(tmp_path, "hf", "megatron", "back")


def test_what_ctrl_c_left_is_gone_on_with(tmp_path: Path) -> None:
    source, made = make(tmp_path / "hf"), tmp_path / "megatron"
    to_megatron(source, made)
    with interrupted_after(1), pytest.raises(KeyboardInterrupt):
        unpack(made / "release", tmp_path / "back", model_dir=made / "hf")
    nothing_but(tmp_path, "hf", "megatron", ".back.part")
    unpack(made / "release", tmp_path / "back", model_dir=made / "hf")
    assert same_bytes(source, tmp_path / "back")
    nothing_but(tmp_path, "hf", "megatron", "back")


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "megatron"
    to_megatron(make(tmp_path / "hf"), made)
    file = made / "release" / "__0_1.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="corrupt"):
        unpack(made / "release", tmp_path / "back", model_dir=made / "hf")
    nothing_but(tmp_path, "hf", "megatron")


def test_a_recipe_may_begin_from_a_converted_model(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    model, run = Model(path=str(tmp_path / "megatron")), RunDir(tmp_path / "run")
    assert facts_of_recipe(model) == load_facts(source)
    run.path.mkdir()
    folder = model_dir_of(model, run)
    assert run.path in folder.parents and folder == model_dir_of(model, run)
    assert same_bytes(source, folder, "model.safetensors", "tokenizer.json")
