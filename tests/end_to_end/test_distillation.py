"""Learning from teachers, in runs that are stopped, resumed and laid out otherwise: on the policy's
own samples, and on rows."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import Workplace

pytestmark = pytest.mark.timeout(900)
ON_POLICY = [
    "train.distill.teachers=[{path: runs/teacher}]",
    "rollout.reward=none",
    "checkpoint.every=1",
    "eval.num_prompts=4",
]
OF_ROWS = [
    "train.distill.teachers=[{path: runs/teacher}]",
    "train.distill.kl=forward",
    "train.distill.top_k=8",
    "train.objective=distillation",
    "train.batch_size=8",
    "warmup.steps=0",
    "data.prompts=null",
    "data.eval=null",
    "data.train=task:sums-worked",
    "data.validation=task:sums-worked-heldout",
    "data.max_row_tokens=128",
    "checkpoint.every=1",
]


def _launch(workplace: Workplace, name: str, sets: list[str], *, steps: int) -> None:
    words = [word for setting in sets for word in ("--set", setting)]
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", name, "--steps", str(steps), *words
    )
    assert finished.code == 0, finished


def _reports(workplace: Workplace, name: str, event: str) -> list[dict]:
    kept = ("loss", "grad_norm", "figures", "num_tokens")
    return [
        {key: entry["report"][key] for key in kept}
        for entry in workplace.events(name)
        if entry["event"] == event
    ]


@pytest.fixture(scope="module")
def teacher(workplace: Workplace) -> Workplace:
    """Where the run `teacher` is: a model with one more layer than the policy."""
    _launch(workplace, "teacher", ["model.scratch.num_layers=3", "warmup.steps=40"], steps=1)
    return workplace


@pytest.mark.parametrize("kl", ["sampled", "reverse"])
def test_a_run_that_learns_from_a_teacher_is_resumed_bit_for_bit(
    teacher: Workplace, kl: str
) -> None:
    sets = [*ON_POLICY, f"train.distill.kl={kl}"]
    _launch(teacher, f"taught-{kl}", sets, steps=3)
    whole = _reports(teacher, f"taught-{kl}", "StepDone")
    assert len(whole) == 3
    assert all(report["figures"]["teacher_kl"] > 0.01 for report in whole)
    assert all(report["grad_norm"] > 0 for report in whole), "no reward, and yet it learns"
    _launch(teacher, f"taught-{kl}-stopped", sets, steps=2)
    finished = teacher.miles("resume", f"taught-{kl}-stopped", "--steps", "3")
    assert finished.code == 0, finished
    assert _reports(teacher, f"taught-{kl}-stopped", "StepDone") == whole


def test_rows_are_put_before_the_teacher_once(teacher: Workplace) -> None:
    _launch(teacher, "rows", OF_ROWS, steps=3)
    whole = _reports(teacher, "rows", "RowStepDone")
    assert whole[2]["figures"]["teacher_kl"] < whole[0]["figures"]["teacher_kl"]
    _launch(teacher, "rows-live", [*OF_ROWS, "train.distill.cache=false"], steps=3)
    assert _reports(teacher, "rows-live", "RowStepDone") == whole

    _launch(teacher, "rows-stopped", OF_ROWS, steps=2)
    finished = teacher.miles("resume", "rows-stopped", "--steps", "3")
    assert finished.code == 0, finished
    assert _reports(teacher, "rows-stopped", "RowStepDone") == whole
    asked = [
        event["detail"].split()[0]
        for event in teacher.events("rows-stopped")
        if event["event"] == "PhaseStarted" and event["phase"] == "teacher"
    ]
    assert asked == ["24", "8"], "what was kept is not asked again"


def test_a_teacher_with_another_tokenizer_is_refused_and_nothing_is_left(
    teacher: Workplace,
) -> None:
    finished = teacher.miles(
        *("launch", "--recipe", "tiny.yaml", "--name", "other-tokens"),
        *("--set", "train.distill.teachers=[{path: runs/teacher}]"),
        *("--set", "data.demonstrations=task:sums-worked"),
    )
    assert finished.code == 3, finished
    assert "the teacher runs/teacher has another tokenizer" in finished.err
    assert not teacher.run("other-tokens").exists()
