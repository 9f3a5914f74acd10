"""Several seeds of two recipes: which is better, and what weakens the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import open_run
from milescli.core.errors import MilesError
from milescli.report.sides import SidesCompared, compare_sides, rows
from milescli.report.subject import read_subject
from tests.insight.planted import line, saturating
from tests.report.run_folders import make_planted, make_run


def side(folder: Path, ends: list[float], *, lr: float = 1e-6, first_seed: int = 0) -> list[Path]:
    """Runs whose rewards end at these heights, each with a seed of its own."""
    runs = []
    for number, end in enumerate(ends):
        course = {"reward": (saturating(0.2, end), 0.01), "accuracy": (line(end, end), 0.0)}
        run = make_planted(folder / f"r{number}", seed=first_seed + number, courses=course, lr=lr)
        with (run / "recipe.yaml").open("a") as file:
            file.write(f"run:\n  seed: {number}  # --seed {number}\n")
        runs.append(run)
    return runs


def sides(a: list[Path], b: list[Path]) -> SidesCompared:
    """Of directories."""
    return compare_sides(*([read_subject(open_run(run)) for run in one] for one in (a, b)))


def test_a_recipe_that_is_better_with_all_seeds_is_called_better(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.85, 0.9, 0.95], lr=5e-6)
    b = side(tmp_path / "b", [0.5, 0.55, 0.6], first_seed=7)
    held, reward, _ = sides(a, b).measures
    assert held.sentence == "held-out accuracy, step 80: A is better"
    assert reward.sentence == "mean reward of 80 steps: A is better" and reward.p_value < 0.01
    assert 0 < reward.difference.low < reward.difference.value < reward.difference.high
    back = sides(b, a).measures[1]
    assert back.sentence.endswith("B is better")
    assert back.p_value == pytest.approx(reward.p_value)
    assert sides(a, b).notes == []


@pytest.mark.parametrize("named", ["held.jsonl", "task:sums-heldout"])
def test_different_held_out_files_are_not_compared_but_seeds_of_one_task_are(
    tmp_path: Path, named: str
) -> None:
    a = side(tmp_path / "a", [0.85, 0.9, 0.95])
    b = side(tmp_path / "b", [0.5, 0.55, 0.6], first_seed=7)
    for run in (*a, *b):
        file = run / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["data"] = {"eval": {"path": "held.jsonl", "sha256": run.parent.name}}
        file.write_text(json.dumps(manifest))
        with (run / "recipe.yaml").open("a") as recipe:
            recipe.write(f"data:\n  eval: {named}  # recipe\n")
    is_compared = named.startswith("task:")
    assert any("held-out" in one.sentence for one in sides(a, b).measures) == is_compared
    note = "held-out prompts were not compared: different files"
    assert (note in sides(a, b).notes) == (not is_compared)


def test_seeds_that_differ_as_much_as_the_sides_show_nothing(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.7, 0.9])
    b = side(tmp_path / "b", [0.55, 0.6, 0.9], first_seed=7)
    compared = sides(a, b)
    assert [one.sentence for one in compared.measures] == [
        f"{name}: no difference that these seeds can show" for name, *_ in rows(compared)
    ]


def test_what_weakens_a_comparison_is_said(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6])
    b = side(tmp_path / "b", [0.5, 0.6], first_seed=7)
    (b[1] / "recipe.yaml").write_text((a[0] / "recipe.yaml").read_text().replace("1e-06", "2e-06"))
    notes = " ".join(sides(a, b).notes)
    assert "runs of B have equal seeds" in notes
    assert "runs of B differ in more than the seed: train.optimizer.lr" in notes
    empty = [make_run(tmp_path / "empty" / str(number)) for number in range(2)]
    assert sides(a, empty).measures == []


def test_the_last_common_evaluation_counts_however_many_there_are(tmp_path: Path) -> None:
    courses = {"accuracy": (line(2.0, 2.5), 0.0)}
    a, b = (
        [
            make_planted(tmp_path / f"{name}{seed}", steps=steps, eval_every=2, courses=courses)
            for seed in range(2)
        ]
        for name, steps in (("a", 80), ("b", 78))
    )
    compared = sides(a, b)
    assert compared.measures[0].name == "held-out accuracy, step 78"
    assert "points" not in rows(compared)[0][3], "a reward is not a share"


def test_one_run_of_a_side_and_one_on_both_sides_are_refused(tmp_path: Path) -> None:
    a, b = side(tmp_path / "a", [0.5, 0.6]), side(tmp_path / "b", [0.5, 0.6])
    with pytest.raises(MilesError, match="only 1 run after"):
        sides(a, b[:1])
    with pytest.raises(MilesError, match="the same run on both sides"):
        sides(a, [b[0], a[1]])
