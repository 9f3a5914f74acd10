"""Who wins, and who is named as the origin."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.keys import keys
from milescli.recipe.load import LoadedRecipe, load, override, runs_dir, values_of
from milescli.recipe.machine import MachineSettings
from milescli.recipe.schema import Recipe
from tests.recipe.conftest import SMALL, Place


def test_each_layer_beats_the_one_below_it(place: Place) -> None:
    recipe = SMALL + "machine: {gpus: 1}\n"
    assert str(place.load().origins["machine.gpus"]) == "default"
    steps = [(place.load(recipe), 1, "recipe my.yaml:3")]
    place.config("machine:\n  gpus: 2\n")
    steps.append((place.load(recipe), 2, "file ~/.config/miles/config.yaml:2"))
    place.local("machine:\n  gpus: 3\n")
    steps.append((place.load(recipe), 3, "file miles.yaml:2"))
    environ = {"MILES_MACHINE__GPUS": "4"}
    steps.append((place.load(recipe, environ=environ), 4, "env MILES_MACHINE__GPUS"))
    steps.append(
        (place.load(recipe, environ=environ, sets=["machine.gpus=5"]), 5, "--set machine.gpus=5")
    )
    steps.append(
        (place.load(recipe, environ=environ, flags={"machine.gpus": "--gpus 6"}), 6, "--gpus 6")
    )
    for loaded, gpus, origin in steps:
        assert loaded.recipe.machine.gpus == gpus
        assert str(loaded.origins["machine.gpus"]) == origin


def test_every_key_has_an_origin(place: Place) -> None:
    assert set(place.load().origins) == set(keys())


def test_the_values_of_a_recipe_are_what_json_holds() -> None:
    values = values_of(Recipe())
    assert values["train.steps"] == Recipe().train.steps
    assert values["rollout.mcp"] == {} and values["model.scratch.vocab_size"] is None


def test_a_recipe_without_a_name_is_called_like_its_file(place: Place) -> None:
    assert place.load().recipe.name == "my"
    assert place.load(SMALL + "name: other\n").recipe.name == "other"


@pytest.mark.parametrize(
    ("override_text", "key", "value"),
    [
        ("train.optimizer.lr=1e-6", "train.optimizer.lr", 1e-6),
        ("train.optimizer.lr=1", "train.optimizer.lr", 1.0),
        ("run.name=007", "run.name", "007"),
        ("run.name=true", "run.name", "true"),
        ("run.name=null", "run.name", None),
        ("run.name=", "run.name", None),
        ("model.scratch.tie_embeddings=false", "model.scratch.tie_embeddings", False),
        (
            "data.system_prompt=Answer: yes, or [no] # always",
            "data.system_prompt",
            "Answer: yes, or [no] # always",
        ),
        ('data.system_prompt="a\\nb"', "data.system_prompt", "a\nb"),
        ("rollout.stop=[a, 'b c', 7]", "rollout.stop", ["a", "b c", "7"]),
        ("rollout.stop=[]", "rollout.stop", []),
        ("train.steps=1_000", "train.steps", 1000),
        ("train.steps=010", "train.steps", 10),
        ("data.prompts=a=b.jsonl", "data.prompts", "a=b.jsonl"),
        ("train.precision=bf16", "train.precision", "bf16"),
        ("rollout.filter=none", "rollout.filter", "none"),
    ],
)
def test_an_override_is_read_as_its_key_wants_it(
    place: Place, override_text: str, key: str, value: object
) -> None:
    from milescli.recipe.load import value_at

    read = value_at(place.load(sets=[override_text]).recipe, key)
    assert read == value and type(read) is type(value)


def test_a_section_can_be_set_to_null_and_filled_again(place: Place) -> None:
    loaded = place.load(sets=["model.scratch=null", "model.path=Qwen/Qwen3-0.6B"])
    assert loaded.recipe.model.scratch is None and loaded.recipe.model.path == "Qwen/Qwen3-0.6B"
    assert str(loaded.origins["model.scratch.hidden_size"]) == "--set model.scratch=null"
    text = "model: {scratch: null}\ndata: {prompts: task:sums}\n"
    assert (
        place.load(text, sets=["model.scratch.hidden_size=64"]).recipe.model.scratch.hidden_size
        == 64
    )  # type: ignore[union-attr]
    assert (
        place.load(sets=["train.optimizer={lr: 1e-3, beta1: 0.8}"]).recipe.train.optimizer.beta1
        == 0.8
    )


def test_a_section_whose_keys_are_all_comments_is_empty(place: Place) -> None:
    assert (
        place.load(SMALL + "train:\n  # steps: 3\n").recipe.train.steps
        == keys()["train.steps"].default
    )


def test_the_same_value_twice_is_no_conflict(place: Place) -> None:
    assert (
        place.load(
            sets=["train.steps=5", "train.steps=5"], flags={"train.steps": "--steps 5"}
        ).recipe.train.steps
        == 5
    )


def test_a_recipe_called_miles_yaml_is_not_also_a_user_file(place: Place) -> None:
    (place.cwd / "miles.yaml").write_text(SMALL)
    loaded = load("./miles.yaml", environ={}, cwd=place.cwd, home=place.home)
    assert loaded.recipe.data.prompts == "task:sums"


def test_a_user_file_in_a_closed_folder_is_told_of(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: object, **kwargs: object) -> bool:
        if path.name == "config.yaml":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return False

    monkeypatch.setattr(Path, "is_file", refuse)  # chmod does not stop root
    monkeypatch.setattr("milescli.recipe.layers.read_regular_text", refuse)
    with pytest.raises(RecipeError, match=r"user file .*config.yaml` cannot be read") as caught:
        runs_dir(environ={}, cwd=place.cwd, home=place.home)
    assert caught.value.why == "Permission denied"


def test_variables_of_others_are_left_alone(place: Place) -> None:
    place.load(
        environ={"MILES_RUN_TOKEN": "x", "MILESTONE": "1", "PATH": "/bin", "MILES_RUN__NAME": ""}
    )


def test_odd_wishes_are_warned_of(place: Place) -> None:
    loaded = place.load(sets=["data.eval=task:sums", "train.optimizer.min_lr=1e-9"])
    assert [warning.split("`")[1] for warning in loaded.warnings] == [
        "data.eval",
        "train.optimizer.min_lr",
    ]
    assert place.load().warnings == []


def test_a_key_that_others_could_read_is_warned_of(place: Place) -> None:
    key = "train.distill.server.api_key_env=MY_KEY"
    far, here, safe = (
        f"train.distill.teachers=[{{url: '{url}'}}]"
        for url in ("http://far.example:1", "http://127.0.0.1:1", "https://far.example")
    )
    (warning,) = place.load(sets=[key, far]).warnings
    assert "train.distill.server.api_key_env" in warning and "far.example" in warning
    for sets in ([key, here], [key, safe], [far]):
        assert place.load(sets=sets).warnings == []


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (["rollout.max_staleness=2", "train.old_logprobs=trainer"], "as if they were fresh"),
        (["train.kl_coef=0.1", "train.kl_estimator=k1"], "whose expectation is zero"),
    ],
)
def test_a_choice_that_does_not_do_what_it_seems_to_is_warned_of_with_the_reason(
    place: Place, sets: list[str], reason: str
) -> None:
    (warning,) = place.load(sets=sets).warnings
    assert reason in warning
    assert place.load(sets=sets[:1]).warnings == place.load(sets=sets[1:]).warnings == []


def test_override_changes_only_what_may_change(place: Place) -> None:
    loaded = place.load(sets=["train.steps=7"])
    resumed = override(
        loaded,
        sets=["parallel.tp=2"],
        flags={"train.steps": "--steps 9"},
        only=("parallel", "train.steps"),
    )
    assert (resumed.recipe.parallel.tp, resumed.recipe.train.steps) == (2, 9)
    assert str(resumed.origins["train.steps"]) == "--steps 9"
    assert str(resumed.origins["data.prompts"]) == "recipe my.yaml:2"
    with pytest.raises(RecipeError) as refusal:
        override(loaded, sets=["train.optimizer.lr=1"], only=("parallel", "train.steps"))
    assert "a different experiment" in refusal.value.why


def test_ray_address_names_the_cluster_where_nobody_else_does(place: Place) -> None:
    ray = {"RAY_ADDRESS": "10.0.0.1:6379"}
    named = place.load(environ=ray)
    assert (named.recipe.machine.address, str(named.origins["machine.address"])) == (
        "10.0.0.1:6379",
        "env RAY_ADDRESS",
    )
    assert (
        place.load(SMALL + "machine: {address: 'h:1'}\n", environ=ray).recipe.machine.address
        == "h:1"
    )
    assert (
        place.load(environ=ray, flags={"machine.address": "--address h:2"}).recipe.machine.address
        == "h:2"
    )
    assert place.load(environ=ray, sets=["machine.address=null"]).recipe.machine.address is None
    assert place.load(environ={"RAY_ADDRESS": "local"}).recipe.machine.address is None
    with pytest.raises(RecipeError) as refusal:
        place.load(environ={"RAY_ADDRESS": "http://10.0.0.1:8265"})
    assert "env RAY_ADDRESS" in refusal.value.why and refusal.value.fixes == [
        "--set machine.address=10.0.0.1:6379"
    ]


def test_a_resumed_run_asks_ray_address_again_and_keeps_what_was_said(place: Place) -> None:
    def again(loaded: LoadedRecipe, **environ: str) -> str | None:
        return override(loaded, sets=[], only=(), environ=environ).recipe.machine.address

    by_variable = place.load(environ={"RAY_ADDRESS": "h:1"})
    assert (again(by_variable, RAY_ADDRESS="h:2"), again(by_variable)) == ("h:2", None)
    assert again(place.load(), RAY_ADDRESS="h:2") == "h:2"
    by_flag = place.load(flags={"machine.address": "--address h:1"})
    assert again(by_flag, RAY_ADDRESS="h:2") == "h:1"


def test_runs_dir_follows_the_layers(place: Place) -> None:
    def runs(**environ: str) -> Path:
        return runs_dir(environ=environ, cwd=place.cwd, home=place.home)

    assert runs() == place.cwd / "runs"
    place.local("run: {dir: /data/runs}\n")
    assert runs() == Path("/data/runs")
    assert runs(MILES_RUN__DIR="elsewhere") == place.cwd / "elsewhere"


@pytest.mark.parametrize(("step_s", "request_s"), [(3600.0, 3570.0), (60.0, 30.0), (20.0, 10.0)])
def test_a_request_ends_before_the_step_that_waits_for_it(step_s: float, request_s: float) -> None:
    assert MachineSettings(step_timeout_s=step_s).request_timeout_s == request_s
