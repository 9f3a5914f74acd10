"""Tasks of other packages as rows of a run: both parts are files of the run, and no prompt is on
both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MachineError, RecipeError
from milescli.doctor.recipe_checks import check_reward_of
from milescli.recipe.data import Data
from milescli.recipe.schema import Recipe, Rollout
from milescli.runtime.inputs import data_files
from milescli.runtime.inputs.data_files import with_foreign_tasks

ROLLOUT = Rollout.model_validate({"agent": "verifiers", "verifiers": {"environment": "words"}})


def rows_of(path: str) -> list[dict[str, Any]]:
    """Of a file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_prompt_is_on_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Rollout]()

    def tasks(rollout: Rollout) -> list[dict[str, Any]]:
        asked.append(rollout)
        return [{"prompt": f"Say {number % 64}.", "label": str(number)} for number in range(100)]

    monkeypatch.setattr(data_files, "TASKS", {"verifiers": tasks})
    data = Data(prompts="task:verifiers[0:10]", eval="task:verifiers-heldout", train="mine.jsonl")
    local = with_foreign_tasks(data, ROLLOUT, RunDir(path=tmp_path))
    assert asked == [ROLLOUT] and local.train == "mine.jsonl"
    assert isinstance(local.prompts, str) and isinstance(local.eval, str)
    path, _, part = local.prompts.rpartition("[")
    assert part == "0:10]"
    trained, heldout = rows_of(path), rows_of(local.eval)
    assert len(trained) + len(heldout) == 100
    assert {row["prompt"] for row in heldout} == {"Say 15.", "Say 31.", "Say 47.", "Say 63."}
    assert not {row["prompt"] for row in heldout} & {row["prompt"] for row in trained}


def test_tasks_of_another_agent_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="`task:harbor` needs another agent") as caught:
        with_foreign_tasks(Data(prompts="task:harbor"), ROLLOUT, RunDir(path=tmp_path))
    assert caught.value.fixes == ["--set rollout.agent=harbor"]


def test_a_package_that_lacks_is_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILES_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(MachineError) as caught:
        with_foreign_tasks(Data(prompts="task:verifiers"), ROLLOUT, RunDir(path=tmp_path))
    assert caught.value.fixes == ["miles env install verifiers"]
    with pytest.raises(MachineError) as caught:
        check_reward_of(Recipe(rollout=ROLLOUT))
    assert caught.value.fixes == ["miles env install verifiers"]
