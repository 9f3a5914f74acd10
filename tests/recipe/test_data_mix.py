"""Tests of `data.mix` in a recipe: read, written again, and refused where it cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.data import MixSource
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.resolved import load_resolved, resolved_yaml

MIX = """\
model: {scratch: {}}
data:
  mix:
    - {path: 007, weight: 2}
    - path: [b.jsonl, "c.jsonl[0:10]"]
      name: both
      weight: 1.5
      reward: exact_match
"""


def _load(folder: Path, text: str, *sets: str) -> LoadedRecipe:
    (folder / "my.yaml").write_text(text)
    return load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)


def _with(mix: str) -> str:
    return f"model: {{scratch: {{}}}}\ndata:\n  mix: {mix}\n"


def test_a_mix_is_read_and_written_without_loss(tmp_path: Path) -> None:
    loaded = _load(tmp_path, MIX)
    assert loaded.recipe.data.mix == [
        MixSource(path="007", weight=2),
        MixSource(path=["b.jsonl", "c.jsonl[0:10]"], name="both", weight=1.5, reward="exact_match"),
    ]
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(loaded))
    assert load_resolved(tmp_path / "resolved.yaml").recipe == loaded.recipe


def test_a_mix_on_the_command_line_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    loaded = _load(tmp_path, MIX, "data.mix=[{path: a.jsonl, quota: 3}]")
    assert loaded.recipe.data.mix == [MixSource(path="a.jsonl", quota=3)]
    loaded = _load(tmp_path, MIX, "data.mix=null", "data.prompts=task:sums")
    assert loaded.recipe.data.mix is None


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ("[{path: a, weight: 0}]", r"number 1 is wrong in `weight` \(a number > 0"),
        ("[{path: a}, {weight: 1}]", "number 2 is wrong in `path`"),
        ("[{path: a, wieght: 1}]", "number 1 is wrong in the unknown key `wieght`"),
        ("[a.jsonl]", "number 1 is not a mapping"),
        ("a.jsonl", "a list of mappings"),
        ("[{path: a, weight: 1, quota: 2}]", "a weight and a quota"),
        ("[{path: a, quota: 2}, {path: b}]", "quotas for some"),
        ("[{path: a}, {path: a}]", "two sources .* have the name `a`"),
        ("[{path: 'a[3:1]'}]", "without STOP"),
        ("[{path: ''}]", "does not name a file"),
        ("[]", "no prompts"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, mix: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        _load(tmp_path, _with(mix))


def test_prompts_beside_a_mix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="two sources of prompts"):
        _load(tmp_path, MIX, "data.prompts=a.jsonl")
