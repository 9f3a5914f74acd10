"""The recipe as others may see it."""

from __future__ import annotations

from pathlib import Path

from milescli.report.subject import read_keys
from tests.report.run_folders import make_run


def test_each_key_has_its_value_and_who_set_it(tmp_path: Path) -> None:
    keys = {key.name: key for key in read_keys(make_run(tmp_path / "one") / "recipe.yaml")}
    rate = keys["train.optimizer.lr"]
    assert (rate.value, rate.origin, rate.is_set) == ("1e-06", "--set", True)
    assert keys["train.steps"].origin == "recipe sums.yaml:3"
    assert not keys["rollout.temperature"].is_set
    assert keys["model.path"].value == "…/Qwen3"


def test_secrets_are_shown_neither_as_values_nor_as_origins(tmp_path: Path) -> None:
    keys = read_keys(make_run(tmp_path / "one") / "recipe.yaml")
    assert "s3cret" not in repr(keys)
    shown = {key.name: key.value for key in keys}
    assert shown["eval.endpoint.api_key"] == "[removed]"
    assert shown["rollout.mcp"] == '{"servers": [{"env": {"SERVICE_TOKEN": "[removed]"}}]}'


def test_a_secret_that_is_no_yaml_is_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text('eval:\n  api_key: "s3cret\n  note: "see /data/alice/x\n')
    key, note = read_keys(file)
    assert key.value == "[removed]" and note.value == '"see …/x'


def test_a_recipe_that_a_real_launch_writes_is_read_key_by_key(tmp_path: Path) -> None:
    from milescli.recipe.load import load
    from milescli.recipe.resolved import resolved_yaml

    loaded = load(
        "quickstart", sets=["train.steps=7"], flags={}, environ={}, cwd=tmp_path, home=tmp_path
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(resolved_yaml(loaded))
    keys = {key.name: key for key in read_keys(file)}
    assert set(keys) >= {name for name in loaded.origins if not name.startswith("rollout.")}
    assert keys["train.steps"].value == "7" and keys["train.steps"].origin == "--set"
    assert keys["train.optimizer.lr"].origin.startswith("recipe quickstart.yaml")


def test_no_file_is_no_key(tmp_path: Path) -> None:
    assert read_keys(tmp_path / "nothing") == []
