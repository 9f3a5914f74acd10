"""A model that is a run, one of its checkpoints, or a converted model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.checkpoint.hf_to_megatron import FILE_BYTES
from milescli.checkpoint.run_dir import RunDir
from milescli.conversion.verify import Verify
from milescli.core.errors import CheckpointError
from milescli.models import load_facts
from milescli.recipe.model import Model
from milescli.runtime.held_models import is_checkpoint
from milescli.runtime.inputs import facts_of_recipe, model_dir_of, require_model
from tests.checkpoint.making import add_checkpoint, make_run
from tests.conversion.making import to_megatron
from tests.export.models import QWEN3, make_base


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `base`, `converted` and the run `runs/mine`, which has the same weights at step 2."""
    place = tmp_path_factory.mktemp("models")
    make_base(place / "base", QWEN3)
    to_megatron(place / "base", place / "converted", verify=Verify.NONE, file_bytes=FILE_BYTES)
    made = make_run(place / "runs" / "mine", model_dir=place / "base")
    add_checkpoint(made, 2, tensors=place / "converted" / "release")
    return place


@pytest.mark.parametrize("named", ["converted", "runs/mine", "runs/mine/checkpoints/step_2"])
def test_a_run_begins_with_it(place: Path, tmp_path: Path, named: str) -> None:
    model = Model(path=str(place / named))
    require_model(model)
    assert facts_of_recipe(model) == load_facts(place / "base")
    folder = model_dir_of(model, RunDir(path=tmp_path / "new"))
    held, weights = (load_file(one / "model.safetensors") for one in (folder, place / "base"))
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], weights[name]) for name in weights)


def test_a_checkpoint_that_is_not_there_is_named(place: Path) -> None:
    (place / "runs/mine/checkpoints/step_9").mkdir()
    with pytest.raises(CheckpointError, match="step 9"):
        facts_of_recipe(Model(path=str(place / "runs/mine/checkpoints/step_9")))


def test_folders_beside_a_recipe_are_what_they_are(place: Path) -> None:
    """`recipe.yaml` may lie two folders above a model, where people keep their own."""
    (place / "models" / "mine").mkdir(parents=True)
    (place / "recipe.yaml").write_text("")
    assert not is_checkpoint(place / "models" / "mine")
    assert not is_checkpoint(place / "base")
