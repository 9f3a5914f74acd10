"""Tests of the checks of a recipe, with its faults planted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from milescli.agents import mcp_tools
from milescli.core.errors import DataError, RecipeError
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.doctor.finding import Status
from milescli.doctor.recipe_checks import (
    check_material,
    check_model,
    check_reward_of,
)
from milescli.models.scratch import config_of
from milescli.platform.machine import parse_machine
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from tests.doctor.small_model import SMALL, checked, small_recipe
from tests.loopback_hub import loopback_hub


def test_a_good_recipe_is_ok_in_all_parts() -> None:
    findings = checked(small_recipe({"eval": "task:sums-heldout"}))
    assert {name: finding.status for name, finding in findings.items()} == dict.fromkeys(
        ("model", "checkpoints", "download", "reward", "roles", "plan", "data"), Status.OK
    )
    assert (
        "8192 prompts" in findings["data"].what
        and "columns prompt and label" in findings["data"].what
    )


def test_a_reward_that_cannot_be_imported_is_a_fail_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = small_recipe(rollout={"reward": "broken_rewards:strict"})
    findings = checked(recipe)
    assert findings["reward"].status is Status.FAIL and "no_such_package" in findings["reward"].why
    assert {findings[name].status for name in ("plan", "data")} == {Status.SKIP}
    with pytest.raises(RecipeError):
        check_reward_of(recipe)


def test_an_mcp_server_that_cannot_be_used_is_a_fail_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollout = {"tools": ["calculator"], "agent": "tools"}
    mcp = {"files": {"command": [sys.executable, "-c", "exit('no licence')"]}}
    monkeypatch.setattr(mcp_tools, "find_spec", lambda name: None)
    finding = checked(small_recipe(rollout={**rollout, "mcp": mcp}))["mcp"]
    assert finding.status is Status.FAIL and "miles-cli[agents]" in str(finding.fix)
    monkeypatch.undo()
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    finding = checked(small_recipe(rollout={**rollout, "mcp": mcp}))["mcp"]
    assert finding.status is Status.FAIL and "no licence" in finding.why


def test_data_that_cannot_be_read_is_a_fail_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="line 2: `label` is missing"):
        check_material(small_recipe({"prompts": str(path)}), "my.yaml")


def test_many_dropped_prompts_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "7" * length, "label": "1"}) + "\n" for length in (3, 500))
    )
    finding = check_material(small_recipe({"prompts": str(path)}), "my.yaml")[0]
    assert finding.status is Status.WARN and finding.fix[0].startswith(
        "--set data.max_prompt_tokens="
    )


def test_a_model_on_the_hub_is_judged_by_config_and_tokenizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_scratch_tokenizer(
        [str(number) for number in range(99)], 300, tmp_path / "tokenizer"
    )
    config = json.dumps(config_of(ScratchModel.model_validate(SMALL))).encode()
    with loopback_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.files["models/org/tiny"] = {
            **{path.name: path.read_bytes() for path in folder.iterdir()},
            "config.json": config,
            "model.safetensors": b"x" * 4096,
        }
        recipe = Recipe.model_validate(
            {"model": {"path": "org/tiny"}, "data": {"prompts": "task:sums"}}
        )
        finding = check_material(recipe, "my.yaml")[0]
        assert finding.status is Status.OK and "8192 prompts" in finding.what
        assert check_model(recipe, parse_machine("cpu"))[0].status is Status.OK
        assert "model.safetensors" not in hub.fetched and "config.json" in hub.fetched


def test_a_family_that_cannot_be_served_on_this_machine_is_a_fail_with_its_reason() -> None:
    tied = {**SMALL, "family": "qwen3_moe", "num_experts": 4, "tie_embeddings": True}
    recipe = Recipe.model_validate({"model": {"scratch": tied}, "data": {"prompts": "task:sums"}})
    finding = check_model(recipe, parse_machine("cpu"))[0]
    assert finding.status is Status.FAIL and "tied" in finding.why


def test_a_model_that_cannot_be_had_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    recipe = Recipe.model_validate(
        {"model": {"path": "org/tiny"}, "data": {"prompts": "task:sums"}}
    )
    findings = checked(recipe)
    assert findings["model"].status is Status.FAIL and "org/tiny" in findings["model"].what
    assert {findings[name].status for name in ("checkpoints", "plan")} == {Status.SKIP}
