"""Models whose vocabulary is most of them: a step by `miles launch`, within 24 GiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.real_models.settings import SAMPLED, words
from tests.end_to_end.runs import Workplace

pytestmark = [pytest.mark.ray, pytest.mark.trainer, pytest.mark.thorough]


@pytest.mark.parametrize(
    ("model", "options", "template"),
    [("qwen_coder", ("--lora", "16"), "auto"), ("gemma3", (), "none")],
    ids=["qwen_coder", "gemma3"],
)
def test_a_step_is_taken(
    workplace: Workplace,
    request: pytest.FixtureRequest,
    model: str,
    options: tuple[str, ...],
    template: str,
) -> None:
    folder: Path = request.getfixturevalue(model)
    finished = workplace.miles(
        *("launch", "--recipe", "smollm2-135m", "--name", model, "--steps", "1"),
        *options,
        *words(folder, SAMPLED, {"data.chat_template": template}),
    )
    assert finished.code == 0, finished
    events = workplace.events(model)
    [check] = [event for event in events if event["event"] == "EngineTrainerChecked"]
    assert check["agreement"] == "equal"
    [step] = workplace.steps(model)
    assert 0 < step["report"]["grad_norm"] < float("inf")
