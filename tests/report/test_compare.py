"""Two runs held against each other: what differs, and what is called a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import open_run
from milescli.report.compare import ONE_EACH, RunsCompared, compare, compare_figures
from milescli.report.markdown import compare_markdown
from milescli.report.subject import read_subject
from tests.insight.planted import line, saturating
from tests.report.run_folders import (
    make_planted,
    make_run,
    make_several,
    row_events,
    write_evaluation,
)


def compared(a: Path, b: Path) -> RunsCompared:
    """Of two directories."""
    return compare(read_subject(open_run(a)), read_subject(open_run(b)))


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that learns more, with a lower rate."""
    folder = tmp_path_factory.mktemp("runs")
    better = {"reward": (saturating(0.2, 0.9), 0.03)}
    slower = {"train_s": (line(10.0, 10.0), 0.2)}
    runs = (
        make_planted(folder / "better", seed=1, courses=better, lr=1e-6),
        make_planted(folder / "worse", seed=2, courses=slower, lr=5e-6),
    )
    for run, share, seed in zip(runs, (0.8, 0.55), (3, 4), strict=True):
        write_evaluation(run, 70, 0.5, seed=seed)
        write_evaluation(run, 80, share, seed=seed)
    return runs


def test_a_planted_difference_is_found_and_said_in_figures(unequal: tuple[Path, Path]) -> None:
    told = compared(*unequal)
    assert told.headline == (
        "Held-out prompts at step 80: the two runs differ: better scores higher. "
        "Reward: the two runs differ: better is higher."
    )
    held, curve = told.held_out[0], told.curve
    assert held.difference.num_prompts == 200 and held.difference.p_value < 1e-3
    assert curve.difference.low > 0 and curve.a_area > curve.b_area
    assert curve.a_reached < curve.b_reached
    assert told.speed.high < 1 and "interval" in told.speed.sentence
    assert ONE_EACH in told.notes


def test_the_other_way_round_everything_is_the_other_way_round(
    unequal: tuple[Path, Path],
) -> None:
    told, back = compared(*unequal), compared(*reversed(unequal))
    assert back.curve.difference.value == pytest.approx(-told.curve.difference.value)
    assert back.curve.difference.p_value == pytest.approx(told.curve.difference.p_value)
    assert back.held_out[0].difference.num_a_better == told.held_out[0].difference.num_b_better
    assert back.speed.ratio == pytest.approx(1 / told.speed.ratio)
    assert back.headline == told.headline


def test_what_differs_is_named_with_both_values(unequal: tuple[Path, Path]) -> None:
    told = compared(*unequal)
    assert [(one.what, one.name, one.a, one.b) for one in told.differing] == [
        ("recipe", "train.optimizer.lr", "1e-06", "5e-06")
    ]


def test_equal_runs_show_no_difference(tmp_path: Path) -> None:
    a, b = (make_planted(tmp_path / name, seed=seed) for name, seed in (("a", 5), ("b", 6)))
    write_evaluation(a, 80, 0.6, seed=1)
    write_evaluation(b, 80, 0.6, seed=2)
    told = compared(a, b)
    assert told.headline.count("no difference that the data can show") == 2
    assert not told.is_significant and "no difference" in told.speed.sentence
    assert told.differing == []


def test_rewards_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    a, b = (make_planted(tmp_path / name) for name in ("a", "b"))
    file = b / "recipe.yaml"
    file.write_text(file.read_text().replace("rollout:\n", 'rollout:\n  reward: "x:y"  # --set\n'))
    told = compared(a, b)
    assert told.curve is None and told.held_out == []
    assert "scored differently, by rollout.reward" in told.headline


def test_prompts_that_only_one_was_asked_are_counted_and_left_out(tmp_path: Path) -> None:
    a, b = (make_planted(tmp_path / name) for name in ("a", "b"))
    for run in (a, b):
        write_evaluation(run, 0, 0.5, seed=1)
    write_evaluation(a, 40, 0.5, seed=1, num=100)
    write_evaluation(b, 60, 0.5, seed=1, num=150)
    held = compared(a, b).held_out[0]
    assert (held.a_step, held.b_step) == (40, 60) and "steps 40 and 60" in held.short
    assert (held.difference.num_prompts, held.num_other) == (100, 50)


def test_prompts_that_were_asked_otherwise_are_told_of(tmp_path: Path) -> None:
    a, b = (make_planted(tmp_path / name) for name in ("a", "b"))
    for run in (a, b):
        write_evaluation(run, 40, 0.5, seed=1)
        settings = {"settings": {"eval.temperature": 0.7 if run is b else 0.0}}
        (run / "eval" / "step_40.json").write_text(json.dumps(settings))
    told = compared(a, b)
    assert told.held_out[0].asked_otherwise == ["eval.temperature"]
    words = "Held-out prompts at step 40: the two were evaluated with different settings: "
    assert told.headline.startswith(words) and "with different" in told.held_out[0].sentence
    for run in (a, b):
        write_evaluation(run, 20, 0.5 if run is a else 0.9, seed=2)
    held = compared(a, b).held_out[0]
    assert held.asked_otherwise == [] and (
        held.short == "Held-out prompts at step 20: the two runs differ: b scores higher."
    )


def test_a_comparison_is_not_signed_with_the_versions_of_the_first(
    unequal: tuple[Path, Path],
) -> None:
    last = compare_markdown(compared(*unequal)).splitlines()[-1]
    assert last.startswith("Made by miles ") and "torch" not in last


def test_few_steps_are_not_tested(tmp_path: Path) -> None:
    a, b = (make_planted(tmp_path / name, steps=12, eval_every=0) for name in ("a", "b"))
    result = compared(a, b)
    assert result.headline == "Reward: too few steps, or too much alike, for a conclusion."
    assert result.sentences[0].startswith(
        "The reward of 12 common steps was not tested: at least 16"
    )
    assert (
        result.sentences[1] == "A step of a takes 1.00 times as long as one of b, by their medians."
    )


def test_what_learns_otherwise_and_prompts_of_others_are_not_compared(tmp_path: Path) -> None:
    rows = make_run(tmp_path / "rows", row_events(line(2.0, 0.5), line(2.0, 0.6)))
    rollouts = make_several(tmp_path / "rollouts", names=("sums",))
    write_evaluation(rows, 10, 0.5, seed=1)
    (rollouts / "eval").mkdir()
    row = {"index": 0, "prompt": "another", "label": "1", "reward": 1.0}
    (rollouts / "eval" / "step_10.jsonl").write_text(json.dumps(row))
    result = compared(rows, rollouts)
    assert result.curve is None and result.held_out == []
    assert "one learns from rows" in result.notes[0] and "adapters/X" in result.notes[1]


def test_runs_over_rows_are_compared_by_their_loss(tmp_path: Path) -> None:
    low = make_run(tmp_path / "low", row_events(line(2.0, 0.5), line(2.0, 0.6), seed=1))
    high = make_run(tmp_path / "high", row_events(line(2.6, 1.1), line(2.6, 1.2), seed=2))
    told = compared(low, high)
    assert told.curve.word == "loss" and told.headline == "Loss: the two runs differ: low is lower."
    assert told.curve.a_reached < told.curve.b_reached


def test_runs_that_have_nothing_in_common_say_so(tmp_path: Path) -> None:
    told = compared(make_planted(tmp_path / "a"), make_run(tmp_path / "empty"))
    assert told.headline.startswith("Nothing can be compared")
    assert told.headline in compare_markdown(told)


def test_the_text_and_the_figures_tell_the_same(unequal: tuple[Path, Path]) -> None:
    told = compared(*unequal)
    text = compare_markdown(told)
    figures = json.loads(json.dumps(compare_figures(told)))
    for words in (told.headline, "train.optimizer.lr", "5e-06", "EWC"):
        assert words in text
    assert figures["curve"]["difference"]["p_value"] < 0.05
    assert figures["held_out"][0]["set"] == "heldout"
