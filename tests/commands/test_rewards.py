"""`miles rewards` scores what a run kept, without the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from tests.checkpoint.making import make_run
from tests.commands.conftest import Miles
from tests.fake_run import SAMPLE


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of which four samples were kept, two of them right by `gsm8k`."""
    run = make_run(Path("runs") / "kept", model_dir=tmp_path)
    run.rollouts_dir.mkdir()
    texts = ("#### 5", "#### 6", "5", r"\boxed{5}")
    for step in (1, 2):
        lines = [
            json.dumps({**SAMPLE, "label": "5", "response": text, "reward": reward})
            for text, reward in zip(texts, (1.0, 0.0, 0.0, 0.0), strict=True)
        ]
        (run.rollouts_dir / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_a_reward_is_tried_on_kept_samples(miles: Miles, run: RunDir) -> None:
    told = json.loads(miles("rewards", "try", "kept", "--reward", "math", "--json").out)
    assert told["names"] == ["as recorded", "math"] and told["means"] == [0.25, 0.75]
    assert (told["agreement"]["both_right"], told["agreement"]["only_b"]) == (2, 4)
    flips = told["flips"]
    assert {one["response"] for one in flips} == {"5", r"\boxed{5}"}
    assert all(one["advantages"][0] < 0 < one["advantages"][1] for one in flips)


def test_the_texts_of_changed_samples_are_shown(miles: Miles, run: RunDir) -> None:
    said = miles("rewards", "try", "kept", "--reward", "math", "--last", "1", "--show", "1").out
    assert "4 samples of 1 groups" in said and "step 2, prompt 0, sample" in said
    assert "same verdict" in said and "kappa 0.20" in said


def test_two_rewards_are_compared_with_settings(miles: Miles, run: RunDir) -> None:
    said = miles(
        *("rewards", "agree", "gsm8k", "format", "--run", "kept", "--json"),
        *("--set", "rollout.format.answer=mark"),
    )
    told = json.loads(said.out)
    assert told["names"] == ["gsm8k", "format"] and told["means"] == [0.25, 0.5]


def test_what_cannot_be_tried_is_refused(miles: Miles, run: RunDir) -> None:
    assert "there is no reward `maths`" in miles("rewards", "try", "kept", "--reward", "maths").err
    needs_engine = ("--reward", "reward_model", "--set", "rollout.reward_model.path=some")
    assert "starts none" in miles("rewards", "try", "kept", *needs_engine).err
    for file in run.rollouts_dir.iterdir():
        file.unlink()
    none = miles("rewards", "try", "kept", "--reward", "math")
    assert none.code == 6 and "kept no samples" in none.err
