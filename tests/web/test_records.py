"""Recipe, plan and manifest, with their reasons."""

from __future__ import annotations

import json
from pathlib import Path

from starlette.testclient import TestClient

from milescli.recipe.keys import keys
from milescli.recipe.load import load, value_at
from milescli.recipe.resolved import resolved_yaml
from tests.commands.test_verbs import PLAN
from tests.web.written import WrittenRun


def test_a_recipe_has_every_key_with_its_origin(
    run: WrittenRun, client: TestClient, tmp_path: Path
) -> None:
    loaded = load("quickstart", sets=["train.steps=7"], environ={}, cwd=tmp_path, home=tmp_path)
    run.run.recipe_file.write_text(resolved_yaml(loaded))
    told = {one["key"]: one for one in client.get("/api/runs/tiny-1/recipe").json()["keys"]}
    assert told["train.steps"] == {
        "key": "train.steps",
        "value": 7,
        "origin": "--set train.steps=7",
    }
    assert told["rollout.stop"]["origin"] == "default"
    shown = [name for name in keys() if value_at(loaded.recipe, name) is not None]
    assert set(shown) <= set(told)


def test_a_recipe_that_is_no_yaml_is_read_from_the_manifest(
    run: WrittenRun, client: TestClient
) -> None:
    run.run.recipe_file.write_text("a: [\n")
    run.run.manifest_file.write_text(json.dumps({"recipe": {"train.steps": 9}, "seed": 1}))
    told = client.get("/api/runs/tiny-1/recipe").json()
    assert told == {"keys": [{"key": "train.steps", "value": 9, "origin": ""}]}
    assert client.get("/api/runs/tiny-1/manifest").json() == {"seed": 1}


def test_a_plan_has_its_reasons(run: WrittenRun, client: TestClient) -> None:
    run.run.plan_file.write_text(PLAN.to_json())
    told = client.get("/api/runs/tiny-1/plan").json()
    assert told["decisions"] == [
        {"key": "trainer.tp", "value": "2", "reason": "pinned by parallel.tp"}
    ]
    assert told["trainer"]["tp"] == 2 and len(told["slots"]) == 2 and told["alternatives"] == []


def test_an_adapter_without_a_plan_shows_that_of_its_run(
    run: WrittenRun, client: TestClient
) -> None:
    run.run.plan_file.write_text(PLAN.to_json())
    WrittenRun(path=run.run.adapters_dir / "sums")
    assert client.get("/api/runs/tiny-1:sums/plan").json()["trainer"]["tp"] == 2
