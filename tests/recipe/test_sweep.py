"""sweep.yaml: what it means, and each refusal with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.layers import from_command_line
from milescli.recipe.sweep import DEFAULT_TRIALS, Sweep, read_sweep

SEARCH = "search: {train.optimizer.lr: {loguniform: [1e-5, 1e-2]}}\n"


def sweep_of(folder: Path, text: str) -> Sweep:
    """The sweep that a file of this text means."""
    file = folder / "mine.yaml"
    file.write_text(text)
    return read_sweep(file, source="mine.yaml")


def test_a_file_means_what_it_says(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        "recipe: quickstart\n"
        "set: {train.steps: 12, eval.every: 4, run.trackers: [tensorboard, wandb],"
        " model.scratch: null}\n"
        "trials: 7\n"
        "search:\n"
        "  train.optimizer.lr: {loguniform: [1e-5, 1e-2]}\n"
        '  train.algorithm: {choice: [grpo, "gspo"]}\n'
        "  rollout.samples_per_prompt: {randint: [2, 9]}\n",
    )
    assert (sweep.name, sweep.num_trials) == ("mine", 7)
    assert sweep.fixed == (
        "train.steps=12",
        "eval.every=4",
        "run.trackers=[tensorboard, wandb]",
        "model.scratch=null",
    )
    rate, algorithm, samples = sweep.dimensions
    assert (rate.low, rate.high, rate.is_range) == (1e-5, 1e-2, True)
    assert (algorithm.values, algorithm.is_range) == (("grpo", "gspo"), False)
    assert (samples.kind, samples.low, samples.high) == ("randint", 2, 9)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("rollout.stop", r'["\n"]', ["\n"]),
        ("rollout.stop", r'["\nUser:", "a, b"]', ["\nUser:", "a, b"]),
        ("rollout.stop", "\n        - a, b\n        - c", ["a, b", "c"]),
        ("rollout.judge.parse", r"'score: (\d+)'", r"score: (\d+)"),
        ("data.system_prompt", "|-\n        Think.\n        Answer.", "Think.\nAnswer."),
        ("data.system_prompt", """'Say "yes" or \\n.'""", 'Say "yes" or \\n.'),
        ("data.system_prompt", '"null"', "null"),
        ("data.system_prompt", "1.10", "1.10"),
        ("data.system_prompt", "null", None),
    ],
)
def test_a_trial_gets_each_text_as_the_file_has_it(
    tmp_path: Path, key: str, written: str, value: object
) -> None:
    fixed = sweep_of(tmp_path, f"recipe: a\nset:\n    {key}: {written}\n{SEARCH}").fixed
    assert from_command_line(fixed, {})[key].value == value


@pytest.mark.parametrize(
    ("written", "value"), [(r'"a\nb"', "a\nb"), (r"'\d'", r"\d"), ("gspo", "gspo"), ("'1'", "1")]
)
def test_a_choice_of_texts_is_read_as_the_file_has_it(
    tmp_path: Path, written: str, value: str
) -> None:
    search = f"search: {{data.system_prompt: {{choice: [{written}]}}}}\n"
    (dimension,) = sweep_of(tmp_path, f"recipe: a\n{search}").dimensions
    words = [f"{dimension.key}={text}" for text in dimension.values]
    assert from_command_line(words, {})[dimension.key].value == value


def test_a_grid_has_every_combination_and_other_searchers_a_default(tmp_path: Path) -> None:
    grid = "search: {train.optimizer.lr: {grid: [1e-4, 1e-3]}, run.seed: {choice: [1, 2, 3]}}\n"
    assert sweep_of(tmp_path, f"recipe: quickstart\nsearcher: grid\n{grid}").num_trials == 6
    assert sweep_of(tmp_path, f"recipe: quickstart\n{grid}").num_trials == DEFAULT_TRIALS


@pytest.mark.parametrize(
    ("text", "what", "told"),
    [
        (
            f"recipe: quickstart\ntrails: 3\n{SEARCH}",
            "`trails`",
            "mine.yaml:2 sets it; the nearest",
        ),
        (f"recipe: quickstart\ntrials: 0\n{SEARCH}", "`trials`", "mine.yaml:2"),
        (f"recipe: quickstart\nsearcher: bohb\n{SEARCH}", "`searcher`", "mine.yaml:2"),
        (SEARCH, "`recipe`", "required"),
        ("recipe: quickstart\n", "searches nothing", "no `search`"),
        ("[1]\n", "is not a sweep", "printf"),
        ("recipe: quickstart\nsearch: 3\n", "is not a mapping", "mine.yaml:2"),
        ("recipe: a\nsearch: {train.lr: {choice: [1]}}\n", "`train.lr`", "train.optimizer.lr"),
        ("recipe: a\nsearch: {train.lora: {choice: [null]}}\n", "section", "`train.lora.rank`"),
        ("recipe: a\nsearch: {run.name: {choice: [a]}}\n", "`run.name`", "names its trials"),
        ("recipe: a\nsearch: {rollout.reward: {choice: [a]}}\n", "`rollout.reward`", "measured"),
        (
            "recipe: a\nsearch: {rollout.judge.scale: {choice: [5]}}\n",
            "`rollout.judge.scale`",
            "measured",
        ),
        ("recipe: a\nsearch: {eval.top_p: {choice: [1]}}\n", "`eval.top_p`", "below `set`"),
        ("recipe: a\nsearch: {run.seed: {chioce: [1]}}\n", "`run.seed`", "nearest is `choice`"),
        ("recipe: a\nsearch: {run.seed: 3}\n", "no valid search space", "exactly one of"),
        ("recipe: a\nsearch: {run.seed: {choice: []}}\n", "`choice`", "different values"),
        ("recipe: a\nsearch: {run.seed: {choice: [1, 1]}}\n", "`choice`", "different values"),
        ("recipe: a\nsearch: {run.seed: {uniform: [1]}}\n", "`uniform`", "two numbers"),
        ("recipe: a\nsearch: {run.seed: {uniform: [a, b]}}\n", "`uniform`", "two numbers"),
        ("recipe: a\nsearch: {run.seed: {uniform: [2, 1]}}\n", "`uniform`", "LOW < HIGH"),
        ("recipe: a\nsearch: {run.seed: {loguniform: [0, 1]}}\n", "`loguniform`", "0 < LOW"),
        ("recipe: a\nsearch: {run.seed: {randint: [0.5, 2]}}\n", "`randint`", "whole numbers"),
        (f"recipe: a\nset: {{train.optimizer.lr: 1}}\n{SEARCH}", "set and searched", "remove one"),
        (f"recipe: a\nsearcher: grid\n{SEARCH}", "a grid cannot", "grid: [A, B, C]"),
        (
            "recipe: a\nsearcher: grid\ntrials: 3\nsearch: {run.seed: {grid: [1, 2]}}\n",
            "2 trials, not 3",
            "remove `trials`",
        ),
        (f"recipe: a\nsearcher: optuna\nscheduler: pbt\n{SEARCH}", "`scheduler: pbt`", "random"),
        (f"recipe: a\ntrials: 1\nscheduler: pbt\n{SEARCH}", "at least two", "trials: 4"),
    ],
)
def test_what_is_refused_names_line_and_remedy(
    tmp_path: Path, text: str, what: str, told: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        sweep_of(tmp_path, text)
    assert what in refused.value.what
    assert told in f"{refused.value.why} {refused.value.fixes}"


def test_a_file_that_is_missing_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no sweep file") as refused:
        read_sweep(tmp_path / "none.yaml")
    command = refused.value.fixes[0].partition("'")[2].partition("'")[0]
    example = command.replace("\\n", "\n")
    assert sweep_of(tmp_path, example).settings.recipe == "quickstart"
