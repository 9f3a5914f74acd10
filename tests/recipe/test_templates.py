"""The recipes that ship: valid, short, deviations only, with sources and no layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe import layers
from milescli.recipe.keys import keys
from milescli.recipe.layers import SettingsLayer
from milescli.recipe.load import load
from milescli.recipe.templates import ALIASES, describe, find_recipe, template_names, templates_dir

MAX_LINES = 60
PROMISED = [
    "quickstart",
    "quickstart-distill",
    "quickstart-dpo",
    "quickstart-duo",
    "quickstart-game",
    "quickstart-moe",
    "quickstart-ppo",
    "quickstart-reward-model",
    "quickstart-rlhf",
    "quickstart-sft",
    "quickstart-tools",
    "quickstart-vision",
    "smollm2-135m",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-4b-python",
    "qwen3-4b-search",
    "qwen3-8b",
    "qwen3-vl-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen3-next-80b-a3b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "qwen3.6-27b",
    "qwen3.6-35b-a3b",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen2.5-vl-7b",
    "qwen2.5-32b",
    "glm-4.5",
    "glm-4.5-air",
    "glm-4.7-flash",
    "glm-5",
    "glm-5.1",
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "kimi-k2",
    "kimi-k2.5",
    "kimi-k2.6",
    "nemotron-3-nano",
    "nemotron-3-super",
    "gpt-oss-20b",
    "llama-3.1-8b",
    "llama-3.2-3b",
    "gemma-4-26b-a4b",
    "gemma-4-31b",
    "mimo-7b",
]
MADE_HERE = (*(name for name in PROMISED if name.startswith("quickstart")), "smollm2-135m")
LAYOUT = re.compile(r"^\s*(tp|pp|cp|ep|etp|dp|parallel|engines):", re.MULTILINE)
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
BRANCH_OR_COMMIT = re.compile(r"main|[0-9a-f]{40}")


def test_the_promised_recipes_ship() -> None:
    assert not set(PROMISED) - set(template_names())


@pytest.mark.parametrize("name", template_names())
def test_a_template_loads_without_warnings_and_tells_what_it_is(name: str, tmp_path: Path) -> None:
    loaded = load(name, environ={}, cwd=tmp_path, home=tmp_path)
    assert loaded.recipe.name == name
    assert loaded.recipe.description == describe(name) != ""
    assert loaded.warnings == []


@pytest.mark.parametrize("name", template_names())
def test_a_template_is_short_and_repeats_no_default(name: str) -> None:
    text = (templates_dir() / f"{name}.yaml").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    table = layers.from_yaml(text, source=name, layer=SettingsLayer.RECIPE)
    repeated = [
        key for key, entry in table.items() if key in keys() and entry.value == keys()[key].default
    ]
    assert not repeated, f"these are the defaults anyway: {repeated}"


@pytest.mark.parametrize("name", sorted(set(template_names()) - set(MADE_HERE)))
def test_a_recipe_for_a_published_model_names_hub_and_sources_and_leaves_the_layout_to_the_planner(
    name: str, tmp_path: Path
) -> None:
    text = (templates_dir() / f"{name}.yaml").read_text()
    assert not LAYOUT.search(text)
    assert "arXiv " in text
    assert "# Unverified" in text
    recipe = load(name, environ={}, cwd=tmp_path, home=tmp_path).recipe
    assert HUB_NAME.fullmatch(str(recipe.model.path))
    assert BRANCH_OR_COMMIT.fullmatch(str(recipe.model.revision))
    assert str(recipe.data.prompts).startswith("hf:")
    assert str(recipe.data.eval).startswith("hf:")


@pytest.mark.parametrize(("alias", "meant"), ALIASES.items())
def test_a_short_name_is_the_recipe_it_stands_for(alias: str, meant: str, tmp_path: Path) -> None:
    assert alias not in template_names()
    assert load(alias, environ={}, cwd=tmp_path, home=tmp_path).recipe.name == meant


def test_a_dotted_name_is_no_path_and_a_slip_names_the_nearest(tmp_path: Path) -> None:
    assert find_recipe("qwen3.6", cwd=tmp_path).name == "qwen3.6-35b-a3b.yaml"
    for slip, meant in {
        "qwen3.6-35b-a3": "qwen3.6-35b-a3b",
        "deepseek-v32": "deepseek-v3.2",
        "glm4.5": "glm-4.5",
    }.items():
        with pytest.raises(RecipeError) as caught:
            find_recipe(slip, cwd=tmp_path)
        assert f"miles launch --recipe {meant}" in caught.value.fixes
