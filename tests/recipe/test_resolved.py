"""The resolved recipe says everything, and loads again without loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milescli.core.errors import CheckpointError, RecipeError
from milescli.recipe.keys import keys
from milescli.recipe.load import load
from milescli.recipe.resolved import load_resolved, resolved_yaml
from tests.recipe.conftest import SMALL, Place

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_every_key_stands_there_with_its_origin(place: Place) -> None:
    text = resolved_yaml(place.load(sets=["train.steps=7"], environ={"MILES_RUN__SEED": "3"}))
    lines = [line.strip() for line in text.splitlines()]
    assert "steps: 7  # --set train.steps=7" in lines
    assert "seed: 3  # env MILES_RUN__SEED" in lines
    assert 'prompts: "task:sums"  # recipe my.yaml:2' in lines
    for key in keys():
        assert any(line.startswith(f"{key.rpartition('.')[2]}:") for line in lines), key


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["model.scratch=null", "model.path=a/b", "model.revision=1e5"],
        ["rollout.stop=[null, '#', ': ']"],
        ["rollout.reward={math: 1, 'a#b.c:d': -0.5}"],
        ["rollout.environment.settings={a: [2, 3], b: [true, null, .5], c: [[1], {d: [-.inf]}]}"],
        ['rollout.stop=["\\ud83d\\ude00", "a\\u2028\\x7f"]'],
    ],
)
def test_recipe_and_origins_survive_the_way_to_disk_and_back(place: Place, sets: list[str]) -> None:
    loaded = place.load(sets=sets)
    (place.cwd / "recipe.yaml").write_text(resolved_yaml(loaded))
    from_disk = load_resolved(place.cwd / "recipe.yaml")
    assert from_disk.recipe == loaded.recipe
    assert from_disk.origins == loaded.origins


def test_a_character_in_two_escapes_is_one_and_half_of_one_is_refused(place: Place) -> None:
    stop = place.load(sets=['rollout.stop=["\\ud83d\\ude00"]']).recipe.rollout.stop
    assert stop == ["\N{GRINNING FACE}"]
    with pytest.raises(RecipeError, match="has no partner"):
        place.load(sets=['rollout.stop=["\\ud83d"]'])


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    prompt=TEXTS,
    stop=st.lists(TEXTS.filter(bool), max_size=3),
    lr=st.floats(min_value=1e-300, max_value=1e300),
)
def test_any_text_and_any_number_survive(
    place: Place, prompt: str, stop: list[str], lr: float
) -> None:
    loaded = place.load(SMALL)
    recipe = loaded.recipe
    data = recipe.data.model_copy(update={"system_prompt": prompt})
    rollout = recipe.rollout.model_copy(update={"stop": stop})
    train = recipe.train.model_copy(
        update={"optimizer": recipe.train.optimizer.model_copy(update={"lr": lr})}
    )
    changed = recipe.model_copy(update={"data": data, "rollout": rollout, "train": train})
    file = place.cwd / "recipe.yaml"
    file.write_text(
        resolved_yaml(type(loaded)(recipe=changed, origins=loaded.origins, source="")),
        encoding="utf-8",
    )
    assert load_resolved(file).recipe == changed


def test_the_resolved_recipe_is_itself_a_recipe(place: Place) -> None:
    loaded = place.load(sets=["train.steps=7"])
    (place.cwd / "again.yaml").write_text(resolved_yaml(loaded))
    assert load("again.yaml", environ={}, cwd=place.cwd, home=place.home).recipe == loaded.recipe


@pytest.mark.parametrize("text", [None, "train: [", "no_such_key: 1"])
def test_a_missing_or_spoilt_recipe_of_a_run_is_a_checkpoint_error(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "recipe.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckpointError) as refusal:
        load_resolved(file)
    assert str(file) in refusal.value.what
