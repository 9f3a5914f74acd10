"""Tests of the checks of a recipe, with its faults planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.core.errors import DataError, RecipeError
from milescli.doctor.finding import Finding, Status, run_checks
from milescli.doctor.wish import check_material, check_reward_of, recipe_checks
from milescli.platform.machine import parse_machine
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe

SMALL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 32,
    "ffn_hidden_size": 32,
    "vocab_size": 300,
}


def _recipe(data: dict[str, object] | None = None, **sections: object) -> Recipe:
    return Recipe.model_validate({"model": {"scratch": SMALL}, "data": {"prompts": "task:sums", **(data or {})}, **sections})


def _checked(recipe: Recipe) -> dict[str, Finding]:
    loaded = LoadedRecipe(recipe=recipe, origins={}, source="test")
    found = run_checks(recipe_checks(loaded, machine=lambda: parse_machine("cpu")), environ={})
    return {each.check: each for each in found}


def test_a_good_recipe_is_ok_in_all_parts() -> None:
    found = _checked(_recipe({"eval": "task:sums-heldout"}))
    assert {name: each.status for name, each in found.items()} == dict.fromkeys(("reward", "plan", "data"), Status.OK)
    assert "8192 prompts" in found["data"].what and "columns prompt and label" in found["data"].what


def test_a_reward_that_cannot_be_imported_is_a_fail_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = _recipe(rollout={"reward": "broken_rewards:strict"})
    found = _checked(recipe)
    assert found["reward"].status is Status.FAIL and "no_such_package" in found["reward"].why
    with pytest.raises(RecipeError):
        check_reward_of(recipe)


def test_data_that_cannot_be_read_is_a_fail_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="line 2: `label` is missing"):
        check_material(_recipe({"prompts": str(path)}))


def test_many_dropped_prompts_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": "7" * length, "label": "1"}) + "\n" for length in (3, 500)))
    found = check_material(_recipe({"prompts": str(path)}))[0]
    assert found.status is Status.WARN and found.fix[0].startswith("--set data.max_prompt_tokens=")


def test_a_model_on_the_hub_is_skipped_and_not_downloaded() -> None:
    recipe = Recipe.model_validate({"model": {"path": "someone/some-model"}, "data": {"prompts": "task:sums"}})
    found = check_material(recipe)[0]
    assert found.status is Status.SKIP and "hf download someone/some-model" in found.why
