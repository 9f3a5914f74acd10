"""The list of recipes: sizes are measured, machines are the planner's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from milescli.models import FAMILIES, parse_facts
from milescli.recipe.load import load
from milescli.recipe.templates import MODELS_FILE, template_names, templates_dir
from milescli.runtime.recipe_list import recipe_rows, smallest_machine

CONFIGS = Path(os.environ.get("MILES_CONFIGS", Path(__file__).resolve().parents[3] / "shared" / "configs"))


def test_every_recipe_has_a_size_a_known_family_and_data() -> None:
    rows = {row.name: row for row in recipe_rows()}
    assert sorted(rows) == template_names()
    for row in rows.values():
        assert row.family in FAMILIES, row
        assert row.num_parameters, row
        assert row.prompts, row
    assert rows["qwen3.6-35b-a3b"].aliases == ["qwen3.6"]
    assert rows["quickstart"].smallest_machine == "cpu"
    assert rows["deepseek-v4-pro"].smallest_machine is None


def test_the_table_of_models_holds_what_recipes_name_and_nothing_else() -> None:
    known = json.loads((templates_dir() / MODELS_FILE).read_text())
    named = {row.model for row in recipe_rows()} - {"made here"}
    assert set(known["models"]) == named


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="published config.json files are not in the repository: set MILES_CONFIGS")
def test_the_table_of_models_is_what_their_configs_say(tmp_path: Path) -> None:
    from tests.recipe.measure_models import MEASURED_FROM

    known = json.loads((templates_dir() / MODELS_FILE).read_text())["models"]
    for model in ("Qwen/Qwen3.6-35B-A3B", "deepseek-ai/DeepSeek-V3.2", "google/gemma-4-26B-A4B-it"):
        source = MEASURED_FROM.get(model, model).replace("/", "--")
        facts = parse_facts(json.loads((CONFIGS / f"{source}.json").read_text()))
        assert known[model]["family"] == facts.family
    facts = parse_facts(json.loads((CONFIGS / "deepseek-ai--DeepSeek-V4-Flash.json").read_text()))
    recipe = load("deepseek-v4-flash", environ={}, cwd=tmp_path, home=tmp_path).recipe
    assert smallest_machine(recipe, facts) is None


def test_a_model_that_outgrows_one_gpu_gets_a_larger_machine(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 40960, "hidden_act": "silu",
    }  # fmt: skip
    recipe = load("qwen3-8b", environ={}, cwd=tmp_path, home=tmp_path).recipe
    small = parse_facts(config | {"num_hidden_layers": 4, "hidden_size": 1024, "tie_word_embeddings": True})
    assert smallest_machine(recipe, small) == "1xH100"
    assert smallest_machine(recipe, parse_facts(config | {"num_hidden_layers": 160})) not in (None, "1xH100")
