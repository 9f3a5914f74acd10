"""PPO with a critic: as transformers and plain PyTorch have it, under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.score_model import score_model
from tests.backends.megatron import world
from tests.backends.megatron.harness import make_groups
from tests.backends.megatron.ppo_cases import (
    CRITIC_LR,
    LAYOUTS,
    LR,
    NUM_STEPS,
    TRAIN,
    ppo_cases,
)
from tests.forked import run_module

PLAIN_BOUND, LAYOUT_BOUND = 1e-5, 1e-6
VOCAB_SIZE = 131


@pytest.fixture(scope="module")
def pair(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the policy and of a critic of another shape."""
    critic = tmp_path_factory.mktemp("critic") / "model"
    # transformers never trains the row of a token that pads
    score_model(Path(models["tied"]), critic, pad_id=None, seed=0)
    return {"policy": models["dense"], "critic": str(critic)}


def _of_adapter(models: dict[str, str], folder: Path, layout: dict) -> dict:
    """The case of a critic that starts from a policy with an adapter."""
    critic = score_model(Path(models["dense"]), folder / "own", pad_id=None, seed=0)
    folders = {"model": models["dense"], "critic": str(critic)}
    return {"name": "adapter", "call": "critic_of_adapter", "layout": layout, **folders}


@pytest.fixture(scope="module")
def one(
    pair: dict[str, str], models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> world.Results:
    """What one process says."""
    copied = {"name": "copy", "call": "goes_on_from_copy", "layout": {}}
    folders = {"model": pair["policy"], "critic": pair["critic"]}
    root = tmp_path_factory.mktemp("ppo")
    cases = [*ppo_cases("one", **pair), {**copied, **folders}, _of_adapter(models, root, {})]
    return world.run_world(1, cases, root / "one")


@pytest.fixture(scope="module")
def two(
    pair: dict[str, str], models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> world.Results:
    """What two say."""
    root = tmp_path_factory.mktemp("ppo")
    sharded = _of_adapter(models, root, {"tp": 2, "sequence_parallel": True})
    return world.run_world(2, [*ppo_cases("two", **pair), sharded], root / "two")


def _steps() -> list[list[list[dict]]]:
    """[steps][updates] rows."""
    steps = []
    for step in range(NUM_STEPS):
        rows = [
            [
                {
                    "tokens": list(sample.trajectories[0].token_ids),
                    "mask": [bool(bit) for bit in sample.trajectories[0].loss_mask],
                    "reward": sample.reward,
                }
                for sample in group.samples
            ]
            for group in make_groups(step, vocab_size=VOCAB_SIZE)
        ]
        steps.append([[*rows[0], *rows[1]], [*rows[2], *rows[3]]])
    return steps


def test_losses_over_five_steps_are_those_of_plain_pytorch(
    one: world.Results, pair: dict[str, str], tmp_path: Path
) -> None:
    request = {
        **pair,
        **{key: TRAIN[key] for key in ("gamma", "lam", "kl_coef")},
        "value_clip": TRAIN["critic"]["clip"],
        "temperature": 0.9,
        "lr": LR,
        "critic_lr": CRITIC_LR,
        "steps": _steps(),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    module = "tests.backends.megatron.plain_ppo"
    run_module(module, "request.json", "losses.json", folder=tmp_path)
    plain = json.loads((tmp_path / "losses.json").read_text())
    ours = [[report.loss, report.figures["value_loss"]] for report in one["ppo"]]
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs, abs=PLAIN_BOUND)
    for side in range(2):
        assert len({round(losses[side], 4) for losses in ours}) == NUM_STEPS, "it is blind"
    figures = [report.figures for report in one["ppo"]]
    assert any(told["value_clip_fraction"] > 0 for told in figures), "nothing was clipped"


@pytest.mark.parametrize("name", LAYOUTS["two"])
def test_every_layout_learns_what_one_process_does(
    one: world.Results, two: world.Results, name: str
) -> None:
    for alone, many in zip(one["ppo"], two[name], strict=True):
        assert many.loss == pytest.approx(alone.loss, abs=LAYOUT_BOUND)
        assert many.figures == pytest.approx(alone.figures, abs=LAYOUT_BOUND, rel=1e-5)
        assert many.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


def test_a_copy_of_the_state_has_the_critic_too(one: world.Results) -> None:
    told = one["copy"]
    assert told["restored"] == told["went on"]
    assert len(told["sizes"]) == 4, "policy, critic, random numbers, reference"
    assert "value_loss" in told["restored"][0]


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_critic_starts_from_the_policy_with_its_adapter(
    request: pytest.FixtureRequest, which: str
) -> None:
    told = request.getfixturevalue(which)["adapter"]
    assert told["apart"] == ["score.weight"] and not told["differs"]
    layers = {name.partition(".layers.")[2].partition(".")[0] for name in told["changed"]}
    assert len(layers) > 1 and "" not in layers, told["changed"]
