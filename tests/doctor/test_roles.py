"""The models beside the policy are looked at before a launch: there or not, and without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.checkpoint.score_model import score_model
from milescli.doctor.disk import check_checkpoints
from milescli.doctor.finding import Status
from milescli.doctor.hub_access import wanted_repos
from milescli.models import scratch
from milescli.platform.machine import parse_machine
from milescli.recipe.model import ScratchModel
from tests.doctor.small_model import SMALL, checked, small_recipe

ROWS = {"train": "task:sums-worked", "prompts": None, "max_row_tokens": 96}


@pytest.fixture
def held(tmp_path: Path) -> dict[str, Path]:
    """Folders of a teacher and of a reward model."""
    shape = ScratchModel.model_validate(SMALL)
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    scratch.make_model(shape, teacher, 0)
    return {"teacher": teacher, "judge": score_model(teacher, tmp_path / "judge", pad_id=0, seed=0)}


def test_each_is_told_by_its_shape(held: dict[str, Path]) -> None:
    recipe = small_recipe(
        rollout={"reward": "reward_model", "reward_model": {"path": str(held["judge"])}},
        train={
            "credit": "gae",
            "kl_coef": 0.1,
            "distill": {"teachers": [{"path": str(held["teacher"])}]},
        },
    )
    findings = checked(recipe)
    assert {finding.status for finding in findings.values()} == {Status.OK}
    told = findings["roles"].what
    for role in ("reference: ", "critic: of the policy", "teacher: ", "reward model: "):
        assert role in told
    assert told.count(f"layers, width {SMALL['hidden_size']}") == 3


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"train": {"distill": {"teachers": [{"path": "runs/none/gone"}]}}},
            "teacher runs/none/gone",
        ),
        (
            {"rollout": {"reward": "reward_model", "reward_model": {"path": "runs/none/gone"}}},
            "reward model runs/none/gone",
        ),
    ],
)
def test_one_that_is_not_there_is_one_fail_and_the_data_is_looked_at(
    sections: dict[str, object], told: str
) -> None:
    findings = checked(small_recipe(**sections))
    assert findings["roles"].status is Status.FAIL and told in findings["roles"].what
    assert findings["plan"].status is Status.SKIP and findings["data"].status is Status.OK


@pytest.mark.parametrize("objective", ["supervised", "reward_model"])
def test_rows_to_learn_from_are_counted(objective: str) -> None:
    rows = ROWS if objective == "supervised" else {**ROWS, "train": "task:sums-mistakes"}
    finding = checked(small_recipe(rows, train={"objective": objective}))["data"]
    assert finding.status is Status.OK
    assert "rows to learn from" in finding.what and "tokens are learned" in finding.what


def test_a_critic_is_saved_too(tmp_path: Path) -> None:
    machine, run = parse_machine("cpu"), {"dir": str(tmp_path)}
    alone, both = (
        check_checkpoints(small_recipe(run=run, train=train), machine, bytes_per_s=1e9)[0].what
        for train in ({}, {"credit": "gae"})
    )
    sizes = [float(what.split()[0]) for what in (alone, both)]
    assert 1.5 * sizes[0] < sizes[1] < 2.1 * sizes[0]


def test_what_is_on_the_hub_is_asked_for(held: dict[str, Path]) -> None:
    teachers = [{"path": "org/big", "sources": None}, {"path": str(held["teacher"])}]
    recipe = small_recipe(
        rollout={"reward": "reward_model", "reward_model": {"path": "org/judge"}},
        train={"distill": {"teachers": teachers}},
    )
    assert wanted_repos(recipe) == [
        ("model", "org/big", "train.distill.teachers"),
        ("model", "org/judge", "rollout.reward_model.path"),
    ]
