"""`train.epochs` becomes steps when the rows are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.load import LoadedRecipe, load, with_steps

SETS = ["train.objective=supervised", "data.prompts=null", "data.train=a.jsonl"]


def _load(tmp_path: Path, *sets: str) -> LoadedRecipe:
    (tmp_path / "my.yaml").write_text("model: {scratch: {}}\n")
    return load("my.yaml", sets=[*SETS, *sets], environ={}, cwd=tmp_path, home=tmp_path)


def test_epochs_become_steps_and_say_who_set_them(tmp_path: Path) -> None:
    loaded = _load(tmp_path, "train.epochs=1.5", "train.batch_size=10")
    assert loaded.recipe.train.steps == 100
    made = with_steps(loaded, 101)
    assert made.recipe.train.steps == 16
    assert str(made.origins["train.steps"]) == "--set train.epochs=1.5"
    assert made.recipe.train.epochs is None, "a run's recipe can be launched again"
    assert with_steps(loaded, 1).recipe.train.steps == 1
    tenth = _load(tmp_path, "train.epochs=1.1", "train.batch_size=10")
    assert with_steps(tenth, 100).recipe.train.steps == 11, "100 * 1.1 is a little more in binary"
    plain = _load(tmp_path, "train.steps=7")
    assert with_steps(plain, 1000) is plain


@pytest.mark.parametrize(
    ("own", "word", "length"),
    [
        ("steps: 400", "train.epochs=2", (100, 2.0)),
        ("epochs: 2", "train.steps=7", (7, None)),
        ("epochs: 2", "train.epochs=null", (100, None)),
    ],
)
def test_the_command_line_replaces_the_length_of_the_recipe(
    tmp_path: Path, own: str, word: str, length: tuple[int, float | None]
) -> None:
    (tmp_path / "long.yaml").write_text(f"model: {{scratch: {{}}}}\ntrain: {{{own}}}\n")
    made = load("long.yaml", sets=[*SETS, word], environ={}, cwd=tmp_path, home=tmp_path)
    assert (made.recipe.train.steps, made.recipe.train.epochs) == length


def test_two_lengths_are_refused_and_steps_that_do_not_go_with_the_rest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the length of the training twice"):
        _load(tmp_path, "train.epochs=2", "train.steps=7")
    long = _load(tmp_path, "train.epochs=1", "train.optimizer.warmup_steps=120")
    assert with_steps(long, 6400).recipe.train.steps > 120
    warm = _load(tmp_path, "train.epochs=1", "train.optimizer.warmup_steps=50")
    with pytest.raises(RecipeError, match="never reach its value"):
        with_steps(warm, 64)
