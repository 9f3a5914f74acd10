"""The recipes that ship: valid, short, deviations only."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.recipe import layers
from milescli.recipe.keys import keys
from milescli.recipe.layers import Layer
from milescli.recipe.load import load
from milescli.recipe.templates import describe, template_names, templates_dir

MAX_LINES = 60


def test_the_promised_recipes_ship() -> None:
    assert {"quickstart", "quickstart-moe", "qwen3-0.6b-gsm8k"} <= set(template_names())


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
    table = layers.from_yaml(text, source=name, layer=Layer.RECIPE)
    repeated = [key for key, entry in table.items() if key in keys() and entry.value == keys()[key].default]
    assert not repeated, f"these are the defaults anyway: {repeated}"
