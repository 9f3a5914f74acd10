"""Paths that a run records hold from every folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.recipe.load import load
from milescli.recipe.resolved import load_resolved, resolved_yaml
from milescli.runtime.launch import with_absolute_paths


def test_relative_paths_become_absolute_and_everything_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    sets = [
        *("model.scratch=null", "model.path=sft", "data.prompts=a.jsonl[0:4]"),
        *("data.demonstrations=missing.jsonl", "data.eval=task:sums-heldout"),
    ]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    anchored = with_absolute_paths(loaded)
    assert anchored.recipe.model.path == str(tmp_path / "sft")
    assert anchored.recipe.data.prompts == f"{tmp_path}/a.jsonl[0:4]"
    assert anchored.recipe.data.demonstrations == "missing.jsonl"
    assert anchored.recipe.data.eval == "task:sums-heldout"
    assert with_absolute_paths(anchored) is anchored
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(anchored))
    assert load_resolved(tmp_path / "recipe.yaml").recipe == anchored.recipe


def test_paths_in_lists_are_made_absolute_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    mix = "data.mix=[{path: a.jsonl, weight: 2}, {path: 'task:sums', weight: 1}]"
    loaded = load(
        "quickstart", sets=[mix, "data.prompts=null"], environ={}, cwd=tmp_path, home=tmp_path
    )
    sources = with_absolute_paths(loaded).recipe.data.mix
    assert sources is not None
    assert [source.path for source in sources] == [str(tmp_path / "a.jsonl"), "task:sums"]
