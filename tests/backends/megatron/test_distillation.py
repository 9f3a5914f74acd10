"""What is learned from teachers: as transformers and plain PyTorch have it, under every layout."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.backends.megatron import world
from tests.backends.megatron.distill_cases import (
    KINDS,
    LAYOUTS,
    LR,
    NUM_STEPS,
    SOURCES,
    distill_cases,
    teachers_of,
)
from tests.backends.megatron.harness import make_groups
from tests.forked import run_module

PLAIN_BOUND, LAYOUT_BOUND = 1e-5, 1e-6
VOCAB_SIZE = 131


@pytest.fixture(scope="module")
def one(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> world.Results:
    """What one process says."""
    folder = tmp_path_factory.mktemp("distill") / "one"
    return world.run_world(1, distill_cases("one", models), folder)


@pytest.fixture(scope="module")
def two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> world.Results:
    """What two say."""
    folder = tmp_path_factory.mktemp("distill") / "two"
    return world.run_world(2, distill_cases("two", models), folder)


@pytest.fixture(scope="module")
def plain(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """Kind -> losses by transformers and plain PyTorch."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "request.json").write_text(json.dumps([_request(kind, models) for kind in KINDS]))
    module = "tests.backends.megatron.plain_distillation"
    run_module(module, "request.json", "losses.json", folder=folder)
    return dict(zip(KINDS, json.loads((folder / "losses.json").read_text()), strict=True))


def _request(kind: str, models: dict[str, str]) -> dict:
    of_rows = kind.startswith("rows")
    steps = [_rows(step) if of_rows else _samples(step) for step in range(NUM_STEPS)]
    return {
        "coef": 1.0,
        "reward_weight": 0.0,
        **KINDS[kind],
        "student": models["dense"],
        "teachers": [models[teacher] for teacher in teachers_of(kind)],
        "temperature": 1.0 if of_rows else 0.9,
        "lr": LR,
        "steps": steps,
    }


def _samples(step: int) -> list[dict]:
    rows = []
    for group in make_groups(step, vocab_size=VOCAB_SIZE, sources=SOURCES):
        rewards = group.rewards
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        for sample in group.samples:
            trajectory = sample.trajectories[0]
            rows.append(
                {
                    "tokens": list(trajectory.token_ids),
                    "mask": [bool(bit) for bit in trajectory.loss_mask],
                    "teacher": SOURCES.index(str(group.prompt.source)),
                    "advantage": (sample.reward - mean) / (std + 1e-6),
                }
            )
    return rows


def _rows(step: int) -> list[dict]:
    rows = []
    for group in make_groups(step, vocab_size=VOCAB_SIZE):
        prompt, response = group.prompt.token_ids, group.samples[0].response_ids or [1]
        mask = [False] * len(prompt) + [True] * len(response)
        tokens = [*prompt, *response]
        rows.append({"tokens": tokens, "mask": mask, "teacher": 0, "advantage": 0.0})
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_losses_over_five_steps_are_those_of_plain_pytorch(
    one: world.Results, plain: dict[str, list[float]], kind: str
) -> None:
    losses = [report.loss for report in one[kind]]
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(plain[kind], abs=PLAIN_BOUND)
    assert len({round(loss, 4) for loss in losses}) == NUM_STEPS, "the comparison is blind"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS["two"])
def test_every_layout_learns_from_teachers_what_one_process_does(
    one: world.Results, two: world.Results, kind: str, layout: str
) -> None:
    for alone, many in zip(one[kind], two[kind + layout], strict=True):
        assert many.loss == pytest.approx(alone.loss, abs=LAYOUT_BOUND)
        assert many.figures == pytest.approx(alone.figures, abs=LAYOUT_BOUND, rel=1e-6)
        assert many.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_distance_to_the_teacher_is_a_figure_and_not_nothing(
    one: world.Results, kind: str
) -> None:
    assert all(abs(report.figures["teacher_kl"]) > 1e-2 for report in one[kind])
