"""Older versions of the policy that play roles: found, and held against the policy, before any
process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.models import ModelFacts, load_facts, scratch
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.tokenizer import load_tokenizer
from milescli.runtime.held_models import (
    by_role,
    policy_folders,
    policy_paths,
    require_policies,
    without_policies,
)
from milescli.runtime.inputs import RunInputs

SHAPE = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "ffn_hidden_size": 128}


def _model(folder: Path, *, text: str = "one and two", **shape: int) -> Path:
    make_scratch_tokenizer([text] * 3, 300, folder)
    scratch.make_model(ScratchModel(**{**SHAPE, "vocab_size": 300, **shape}), folder, 0)
    return folder


def _recipe(*policies: str, runs: Path = Path("runs")) -> Recipe:
    roles = {f"role{number}": {"policy": path} for number, path in enumerate(policies)}
    rollout = {"agent": "multi_agent", "roles": {**roles, "ours": {}}}
    return Recipe.model_validate({"rollout": rollout, "run": {"dir": str(runs)}})


def _inputs(place: Path) -> tuple[RunDir, ModelFacts, dict[str, object]]:
    own = _model(place / "own")
    facts = load_facts(own)
    asked = {"tokenizer": load_tokenizer(own, chat_template="chatml"), "facts": facts}
    return RunDir(path=place / "run"), facts, {**asked, "output": None}


def test_a_run_a_checkpoint_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.yaml").write_text("")
    recipe = _recipe("old@20", "old", "other/model", "some/folder@3", runs=tmp_path)
    known = [(path.path, path.step) for path in policy_paths(recipe)]
    run = str(tmp_path / "old")
    assert known == [(run, 20), (run, None), ("other/model", None), ("some/folder", 3)]


def test_roles_share_the_engine_of_the_policy_that_plays_them(tmp_path: Path) -> None:
    run, facts, asked = _inputs(tmp_path)
    one, two = str(_model(tmp_path / "one")), str(_model(tmp_path / "two"))
    recipe = _recipe(one, two, one)
    require_policies(recipe, facts)
    folders = policy_folders(recipe, run, **asked)  # type: ignore[arg-type]
    assert folders == (Path(one), Path(two)) and recipe.engines_apart == 2
    assert by_role(recipe, {one: 1, two: 2}) == {"role0": 1, "role1": 2, "role2": 1}
    assert without_policies(recipe).engines_apart == 0
    inputs = RunInputs(
        model_dir=tmp_path,
        prompts=None,
        heldout=[],
        demonstrations=[],
        reports={},
        policy_dirs=folders,
        **{key: asked[key] for key in ("tokenizer", "facts")},  # type: ignore[arg-type]
    )
    started_on = [inputs.model_dir_of(engine, num_engines=4) for engine in range(4)]
    assert started_on == [tmp_path, tmp_path, Path(one), Path(two)]


@pytest.mark.parametrize(
    ("shape", "told"),
    [({"num_layers": 3}, "its `num_layers` is 3"), ({}, "is not there")],
)
def test_what_is_no_version_of_the_policy_is_refused(
    tmp_path: Path, shape: dict[str, int], told: str
) -> None:
    _, facts, _ = _inputs(tmp_path)
    other = _model(tmp_path / "other", **shape) if shape else tmp_path / "nowhere"
    with pytest.raises(RecipeError) as caught:
        require_policies(_recipe(str(other)), facts)
    assert told in caught.value.what + caught.value.why and caught.value.fixes


def test_one_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run, _, asked = _inputs(tmp_path)
    other = _model(tmp_path / "other", text="zebras and ibexes")
    with pytest.raises(RecipeError, match="another tokenizer"):
        policy_folders(_recipe(str(other)), run, **asked)  # type: ignore[arg-type]
