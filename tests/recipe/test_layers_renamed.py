"""Older recipes say who watches a run by other keys, which are understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.resolved import load_resolved, resolved_yaml


def loaded(folder: Path, text: str, *sets: str, **environ: str) -> LoadedRecipe:
    (folder / "old.yaml").write_text("data: {prompts: task:sums}\nmodel: {scratch: {}}\n" + text)
    return load("old.yaml", sets=sets, environ=environ, cwd=folder, home=folder)


@pytest.mark.parametrize(
    ("text", "trackers", "project"),
    [
        ("run: {tensorboard: false}", [], "miles"),
        ("run: {tensorboard: true, wandb_project: null}", ["tensorboard"], "miles"),
        ("run: {wandb_project: sums}", ["tensorboard", "wandb"], "sums"),
        ("run: {tensorboard: false, wandb_project: 007}", ["wandb"], "007"),
        ("run: {trackers: [mlflow]}", ["mlflow"], "miles"),
        ("", ["tensorboard"], "miles"),
    ],
)
def test_an_old_name_means_what_it_meant(
    text: str, trackers: list[str], project: str, tmp_path: Path
) -> None:
    run = loaded(tmp_path, text).recipe.run
    assert (run.trackers, run.project) == (trackers, project)


def test_a_run_of_before_is_read_again_and_written_anew(tmp_path: Path) -> None:
    old = loaded(tmp_path, "run:\n  wandb_project: sums  # set --set run.wandb_project=sums\n")
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(old))
    again = load_resolved(tmp_path / "recipe.yaml")
    assert again.recipe == old.recipe
    assert "wandb_project:" not in (tmp_path / "recipe.yaml").read_text()


def test_the_environment_and_the_command_line_may_use_them(tmp_path: Path) -> None:
    by_environment = loaded(tmp_path, "", MILES_RUN__WANDB_PROJECT="sums")
    assert by_environment.recipe.run.project == "sums"
    assert str(by_environment.origins["run.trackers"]) == "env MILES_RUN__WANDB_PROJECT"
    assert loaded(tmp_path, "", "run.tensorboard=false").recipe.run.trackers == []


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("run.trackers=[wandb]", "run.tensorboard=false"), "are both set"),
        (("run.tensorboard=often",), "cannot be `often`"),
    ],
)
def test_what_has_no_meaning_is_refused(sets: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        loaded(tmp_path, "", *sets)
