"""What two models must have in common to be compared."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.recipe.schema import Recipe
from milescli.rollout.scratch_tokenizer import make_scratch_tokenizer
from milescli.rollout.tokenizer import load_tokenizer
from milescli.runtime.eval_records import (
    SetResult,
    comparisons,
    kept_result,
    settings_of,
    sha256_of_prompts,
    write_result,
)
from milescli.runtime.eval_sets import EvalWish, load_set, sets_of
from tests.runtime.results import make_result


def test_each_set_is_compared_with_its_like_and_other_settings_are_told() -> None:
    ours = [make_result(set=name, model="a", rewards=[1.0] * 9) for name in ("x", "y")]
    settings = {"eval.temperature": 0.7}
    theirs = [
        make_result(set=name, model="b", rewards=[0.0] * 9, settings=settings)
        for name in ("y", "x")
    ]
    told = comparisons(ours, theirs)
    assert [(one.set, one.a, one.b) for one in told] == [("x", "a", "b"), ("y", "a", "b")]
    assert told[0].sentence.startswith("a is better than b")
    assert told[0].other_settings == ["eval.temperature"]


def test_the_newest_result_is_taken_or_that_of_a_step(tmp_path: Path) -> None:
    for step in (3, 20):
        write_result(make_result(step=step), [], folder=tmp_path)
    found = [kept_result(tmp_path, "few", step=step) for step in (None, 3, 4)]
    assert [one and one.step for one in found] == [20, 3, None]


def _asked(folder: Path, against: SetResult) -> Any:
    make_scratch_tokenizer(["few words"], 300, folder / "model")
    inputs: Any = SimpleNamespace(tokenizer=load_tokenizer(folder / "model"), prompts=None)
    (folder / "few.jsonl").write_text(json.dumps({"prompt": "1?", "label": "1"}))
    (one,) = sets_of(Recipe(), EvalWish(data=[f"{folder / 'few.jsonl'}"], against=[against]))
    return load_set(one, RunDir(folder), inputs, output=Output(stderr=io.StringIO()))


def test_other_prompts_or_another_reward_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="was asked other prompts"):
        _asked(tmp_path, make_result())
    data = sha256_of_prompts([Prompt(index=0, token_ids=[], text="1?", label="1")])
    with pytest.raises(DataError, match="was scored by another reward") as refused:
        _asked(tmp_path, make_result(data=data, settings={"rollout.reward": "gsm8k"}))
    assert refused.value.fixes == ["--set rollout.reward=gsm8k"]
    assert _asked(tmp_path, make_result(data=data, settings=settings_of(Recipe()))).prompts
    with pytest.raises(DataError, match="was not asked the set `few`"):
        _asked(tmp_path, make_result(set="other"))
