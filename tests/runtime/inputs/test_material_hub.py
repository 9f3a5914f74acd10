"""A run whose model and data are on the hub, against a hub on loopback."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.model_facts import facts_of_recipe
from milescli.runtime.inputs.run_inputs import prepare_inputs
from tests.backends.hub.conftest import parquet_of
from tests.loopback_hub import COMMIT, client_of, loopback_hub

TRAIN = {
    "train-00000-of-00002.parquet": parquet_of("1+0?", "0+1?"),
    "train-00001-of-00002.parquet": parquet_of("2-1?"),
}


def test_a_run_takes_model_and_data_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32}
    made = prepare_inputs(
        Recipe.model_validate(
            {
                "data": {"prompts": "task:sums"},
                "model": {"scratch": scratch},
                "rollout": {"reward": "gsm8k"},
            }
        ),
        RunDir(path=tmp_path / "made"),
    )
    recipe = Recipe.model_validate(
        {
            "model": {"path": "org/tiny"},
            "data": {"prompts": "hf:org/sums:train", "eval": "hf:org/sums:test"},
            "rollout": {"reward": "gsm8k"},
        }
    )
    with loopback_hub() as hub:
        client_of(hub, cache=tmp_path / "cache", monkeypatch=monkeypatch)
        hub.files["datasets/org/sums"] = TRAIN | {"test.parquet": parquet_of("1*1?")}
        hub.files["models/org/tiny"] = {
            file.name: file.read_bytes() for file in made.model_dir.iterdir()
        }
        assert facts_of_recipe(recipe.model).num_layers == 1
        assert hub.fetched == ["config.json"]
        fetched = prepare_inputs(recipe, RunDir(path=tmp_path / "run"))
    assert fetched.facts == made.facts
    assert [prompt.text for prompt in fetched.prompts.prompts] == ["1+0?", "0+1?", "2-1?"]
    assert [prompt.text for prompt in fetched.heldout] == ["1*1?"]
    joined = Path(fetched.reports["prompts"].path)
    assert joined.parent == RunDir(path=tmp_path / "run").data_dir
    assert pq.read_table(joined).num_rows == 3
    assert COMMIT in fetched.reports["eval"].path
