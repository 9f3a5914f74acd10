"""A real pretrained model through the life of a run: its engine is held to its own rounding, it
takes steps, is saved and exported, and transformers reads what comes out. Tiny models
from a seed show none of what a vocabulary of 49,152 does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.hugging_face import greedy
from tests.end_to_end.runs import Workplace

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.trainer]


def test_it_is_checked_trained_saved_and_exported(workplace: Workplace, smollm2: Path) -> None:
    settings = {
        "model.path": smollm2,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "rollout.max_response_tokens": 12,
        "eval.num_prompts": 4,
        "checkpoint.every": 2,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    finished = workplace.miles(
        "launch", "--recipe", "smollm2-135m", "--name", "real", "--steps", "2", *sets
    )
    assert finished.code == 0, finished
    events = workplace.events("real")
    checks = [event for event in events if event["event"] == "EngineTrainerChecked"]
    assert [check["agreement"] for check in checks] == ["equal"]
    assert all(check["floor_max"] > 0 for check in checks)
    steps = [event for event in events if event["event"] == "StepDone"]
    assert [step["step"] for step in steps] == [1, 2]
    exported = workplace.export("real", step=2)
    prompt = [[1, 4093, 198, 19556]]
    assert greedy(exported, prompt, max_new_tokens=4) and greedy(smollm2, prompt, max_new_tokens=4)
