"""`adapters`: what each says of itself, and what cannot be one's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.layers import SettingsLayer
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.resolved import load_resolved, resolved_yaml
from milescli.recipe.several import (
    adapter_recipes,
    from_options,
    recipe_to_plan,
    to_options,
    with_common_steps,
)

BASE = """\
model: {path: somewhere}
data: {prompts: task:sums}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 32}
train: {steps: 5, lora: {rank: 4}, optimizer: {lr: 1e-3, weight_decay: 0.1}}
"""
TWO = """\
adapters:
  sums: {train: {optimizer: {lr: 3e-3}}, rollout: {samples_per_prompt: 8}}
  words:
    data: {prompts: words.jsonl, max_prompt_tokens: 700}
    train: {steps: 9, algorithm: gspo}
    run: {seed: 7}
"""


def _loaded(folder: Path, text: str = BASE + TWO, *options: str, sets: tuple = ()) -> LoadedRecipe:
    (folder / "base.yaml").write_text(text)
    return load(
        "base.yaml",
        sets=sets,
        further=from_options([option.replace("@", f"{folder}/") for option in options]),
        environ={},
        cwd=folder,
        home=folder,
    )


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_is_the_recipe_but_for_what_it_says(tmp_path: Path) -> None:
    each = adapter_recipes(_loaded(tmp_path))
    sums, words = each["sums"].recipe, each["words"].recipe
    assert (sums.train.optimizer.lr, words.train.optimizer.lr) == (3e-3, 1e-3)
    assert (sums.train.steps, words.train.steps) == (5, 9)
    assert (sums.rollout.samples_per_prompt, words.rollout.samples_per_prompt) == (8, 4)
    assert words.data.prompts == "words.jsonl" and words.run.seed == 7
    assert words.train.surrogate != sums.train.surrogate or words.train.ratio == "sequence"
    assert not sums.adapters and not words.adapters, "as if it were trained alone"
    assert each["words"].origins["train.steps"].where == "adapters.words:1"


def test_an_empty_recipe_has_none(tmp_path: Path) -> None:
    loaded = _loaded(tmp_path, BASE)
    assert adapter_recipes(loaded) == {}
    assert recipe_to_plan(loaded) is loaded


def test_the_command_line_gives_each_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train:\n  optimizer:\n    lr: 1e-2\n")
    loaded = _loaded(tmp_path, BASE, "a=@a.yaml", "b=@a.yaml")
    assert {n: one.recipe.train.optimizer.lr for n, one in adapter_recipes(loaded).items()} == {
        "a": 1e-2,
        "b": 1e-2,
    }
    origin = loaded.origins["adapters"]
    assert origin.layer is SettingsLayer.SET
    assert to_options(origin.where) == [["--adapter", f"{n}={tmp_path}/a.yaml"] for n in "ab"]


def test_a_run_s_record_has_them(tmp_path: Path) -> None:
    loaded = _loaded(tmp_path)
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(loaded))
    again = load_resolved(tmp_path / "recipe.yaml")
    assert again.recipe == loaded.recipe
    assert {n: one.recipe for n, one in adapter_recipes(again).items()} == {
        n: one.recipe for n, one in adapter_recipes(loaded).items()
    }


def test_room_is_planned_for_all(tmp_path: Path) -> None:
    loaded = _loaded(tmp_path, BASE.replace("task:sums", "task:sums, max_prompt_tokens: 90") + TWO)
    recipe = recipe_to_plan(loaded).recipe
    assert recipe.data.max_prompt_tokens == 700
    assert recipe.rollout.samples_per_prompt == 8
    assert recipe.rollout.prompts_per_step == 12, "8 x 8 and 8 x 4 samples, by eights"


def test_steps_of_all_beat_those_of_each_also_in_the_run_s_record(tmp_path: Path) -> None:
    loaded = with_common_steps(_loaded(tmp_path, sets=("train.steps=20",)))
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(loaded))
    again = load_resolved(tmp_path / "recipe.yaml")
    for one in (loaded, again):
        each = {name: own.recipe.train for name, own in adapter_recipes(one).items()}
        assert {name: train.steps for name, train in each.items()} == {"sums": 20, "words": 20}
        assert each["words"].algorithm == "gspo", "it keeps everything else"


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("{model: {path: other}}", "model.path"),
        ("{parallel: {tp: 2}}", "parallel.tp"),
        ("{train: {lora: {rank: 8}}}", "train.lora.rank"),
        ("{train: {optimizer: {weight_decay: 0.0}}}", "train.optimizer.weight_decay"),
        ("{rollout: {speculative: {kind: ngram}}}", "rollout.speculative.kind"),
        ("{rollout: {max_staleness: 1}}", "rollout.max_staleness"),
        ("{train: {credit: gae}}", "train.credit"),
        (
            "{data: {prompts: null, train: rows.jsonl}, train: {objective: supervised}}",
            "data.train",
        ),
        ("{run: {dir: elsewhere}}", "run.dir"),
        ("{rollout: {precision: bf16}}", "rollout.precision"),
        ("{train: {quantise_inputs: true}}", "train.quantise_inputs"),
        ("{train: {exempt: [lm_head]}}", "train.exempt"),
        ("{train: {on_policy: exact}}", "train.on_policy"),
        ("{train: {recompute: full}}", "train.recompute"),
        ("{train: {max_tokens_per_microbatch: 64}}", "train.max_tokens_per_microbatch"),
        ("{train: {expert_imbalance: 2.0}}", "train.expert_imbalance"),
        ("{eval: {engines: own}}", "eval.engines"),
        ("{checkpoint: {async_save: false}}", "checkpoint.async_save"),
        ("{trian: {steps: 2}}", "trian"),
    ],
)
def test_what_cannot_be_one_s_alone_is_refused(tmp_path: Path, own: str, named: str) -> None:
    with pytest.raises(RecipeError) as refused:
        adapter_recipes(_loaded(tmp_path, BASE + f"adapters: {{one: {own}}}\n"))
    assert named in refused.value.what and refused.value.fixes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.lora.rank=null", "all weights"),
        ("train.lora.publish=merged", "several adapters"),
        ("fault.copy_every=2", "fault.copy_every"),
        ("rollout.speculative.kind=ngram", "rollout.speculative.kind"),
    ],
)
def test_what_does_not_go_with_several_is_refused(tmp_path: Path, change: str, named: str) -> None:
    with pytest.raises(RecipeError) as refused:
        adapter_recipes(_loaded(tmp_path, sets=(change,)))
    assert named in refused.value.what


def test_over_a_model_from_scratch_they_are_refused(tmp_path: Path) -> None:
    text = BASE.replace("{path: somewhere}", "{scratch: {}}")
    with pytest.raises(RecipeError, match="from scratch"):
        adapter_recipes(_loaded(tmp_path, text + TWO))


@pytest.mark.parametrize("option", ["a", "a=", "=@a.yaml", "../a=@a.yaml"])
def test_an_option_that_names_no_adapter_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "a.yaml").write_text("{}")
    with pytest.raises(RecipeError):
        adapter_recipes(_loaded(tmp_path, BASE, option))
