"""The list of recipes: sizes are measured, machines are the planner's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from milescli.core.errors import CheckpointError
from milescli.listings.recipes import recipe_rows, smallest_machine
from milescli.models import FAMILIES, parse_facts, table
from milescli.recipe.load import load
from milescli.recipe.model import Model
from milescli.recipe.templates import MODELS_FILE, template_names, templates_dir
from milescli.runtime.inputs.model_facts import facts_of_recipe
from tests.recipe.measure_models import shapes

CONFIGS = Path(
    os.environ.get("MILES_CONFIGS", Path(__file__).resolve().parents[3] / "shared" / "configs")
)


def test_every_recipe_has_a_size_a_known_family_and_data() -> None:
    rows = {row.name: row for row in recipe_rows()}
    assert sorted(rows) == template_names()
    for row in rows.values():
        assert row.family in FAMILIES, row
        assert row.num_parameters, row
        assert row.prompts, row
    assert rows["qwen3.6-35b-a3b"].aliases == ["qwen3.6"]
    assert rows["quickstart"].smallest_machine == "cpu"
    assert rows["deepseek-v4-pro"].smallest_machine == "32x8xH100"


def test_the_table_of_models_holds_what_recipes_name_and_nothing_else() -> None:
    known = json.loads((templates_dir() / MODELS_FILE).read_text())
    named = {row.model for row in recipe_rows()} - {"made here"}
    assert set(known["models"]) == named


def test_every_recipe_is_planned_without_the_hub_by_the_shape_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "milescli.runtime.inputs.model_facts.fetch_config",
        lambda *a, **k: pytest.fail("the hub was asked"),
    )
    known = json.loads((templates_dir() / MODELS_FILE).read_text())["models"]
    for name in template_names():
        model = load(name, environ={}, cwd=tmp_path, home=tmp_path).recipe.model
        facts = facts_of_recipe(model)
        if model.path is not None:
            assert facts.family == known[model.path]["family"]
            assert table(facts).num_parameters == known[model.path]["parameters"], name


def test_another_revision_is_asked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(name: str, *, revision: str | None) -> Path:
        asked.append((name, revision))
        raise CheckpointError("no hub", why="a test", fix="-")

    monkeypatch.setattr("milescli.runtime.inputs.model_facts.fetch_config", refuse)
    for model in (Model(path="Qwen/Qwen3-8B", revision="abc"), Model(path="Qwen/Unknown-8B")):
        with pytest.raises(CheckpointError):
            facts_of_recipe(model)
    assert asked == [("Qwen/Qwen3-8B", "abc"), ("Qwen/Unknown-8B", None)]


@pytest.mark.skipif(
    not CONFIGS.is_dir(),
    reason="published config.json files are not in the repository: set MILES_CONFIGS",
)
def test_the_shapes_that_ship_are_what_the_published_configs_say() -> None:
    assert shapes(CONFIGS) == shapes(None)


def test_a_model_that_outgrows_one_gpu_gets_a_larger_machine(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
        "hidden_act": "silu",
    }  # fmt: skip
    recipe = load("qwen3-8b", environ={}, cwd=tmp_path, home=tmp_path).recipe
    small = parse_facts(
        config | {"num_hidden_layers": 4, "hidden_size": 1024, "tie_word_embeddings": True}
    )
    assert smallest_machine(recipe, small) == "1xH100"
    assert smallest_machine(recipe, parse_facts(config | {"num_hidden_layers": 160})) not in (
        None,
        "1xH100",
    )
