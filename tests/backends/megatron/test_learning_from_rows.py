"""Every layout learns from rows what one process learns, and transformers reads the reward models
that come of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from milescli.checkpoint.score_model import score_model
from milescli.models.score_head import HEAD
from tests.backends.megatron import world
from tests.backends.megatron.layouts import TOKEN_ROWS
from tests.backends.megatron.plain_adamw import plain_losses
from tests.backends.megatron.row_cases import NUM_STEPS, ROW_CASES, SCORED, token_pairs

LOSS_BOUND = 1e-6


@pytest.fixture(scope="module")
def row_models(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name -> Hugging Face folder; `NAME scores` has a score head."""
    root = tmp_path_factory.mktemp("score-models")
    made = {
        f"{name} scores": str(score_model(Path(models[name]), root / name, pad_id=0, seed=0))
        for name in ("dense", "tied", "llama", "moe", "v4")
    }
    return {**models, **made}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trained reward models go, `NAME.safetensors`."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def one(row_models: dict[str, str], saved: Path) -> world.Results:
    """What one process says."""
    scored = [
        {
            "name": f"trained {name}",
            "call": "trained_scores",
            "model": name,
            "layout": {},
            "rows": TOKEN_ROWS,
            "save": str(saved / f"{name}.safetensors"),
        }
        for name in SCORED
    ]
    return _world(1, [*ROW_CASES["one"], *scored], row_models, saved)


@pytest.fixture(scope="module")
def two(row_models: dict[str, str], saved: Path) -> world.Results:
    """What two say."""
    return _world(2, ROW_CASES["two"], row_models, saved)


def _world(size: int, cases: list[dict], models: dict[str, str], root: Path) -> world.Results:
    named = [{**case, "model": models[case["model"]]} for case in cases]
    return world.run_world(size, named, root / f"world-{size}")


@pytest.mark.parametrize("name", [case["name"] for case in ROW_CASES["two"]])
def test_a_layout_learns_what_one_process_does(
    one: world.Results, two: world.Results, name: str
) -> None:
    base = max(
        (case["name"] for case in ROW_CASES["one"] if name.startswith(case["name"])), key=len
    )
    ours, theirs = two[name], one[base]
    steps = zip(
        [*ours["reports"], ours["measured"]], [*theirs["reports"], theirs["measured"]], strict=True
    )
    for many, alone in steps:
        assert many.loss == pytest.approx(alone.loss, abs=LOSS_BOUND)
        assert many.figures == pytest.approx(alone.figures, abs=2 * LOSS_BOUND, rel=1e-6)
        assert (many.num_tokens, many.num_loss_tokens) == (alone.num_tokens, alone.num_loss_tokens)
        assert many.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


@pytest.mark.parametrize("name", [case["name"] for case in ROW_CASES["one"]])
def test_steps_change_the_loss_so_that_the_comparison_means_something(
    one: world.Results, name: str
) -> None:
    reports = one[name]["reports"]
    assert len({round(report.loss, 4) for report in reports}) == NUM_STEPS
    assert all(report.grad_norm > 0 for report in reports)


@pytest.mark.parametrize("name", [case["name"] for case in ROW_CASES["one"]])
def test_measuring_says_what_a_step_would_and_changes_nothing(
    one: world.Results, name: str
) -> None:
    result = one[name]
    assert result["unchanged"]
    assert result["measured"].loss == pytest.approx(result["after"].loss, abs=1e-9)
    assert result["measured"].figures == pytest.approx(result["after"].figures, abs=1e-9)


def test_two_steps_of_dpo_on_deepseek_v4_are_those_of_plain_pytorch(
    one: world.Results, models: dict[str, str], tmp_path: Path
) -> None:
    pairs = [token_pairs(step, 131) for step in range(NUM_STEPS)]
    rule = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.98], "clip_grad": 1.0}
    losses = plain_losses({**rule, "dpo": 0.1, "steps": pairs}, Path(models["v4"]), tmp_path)
    reports = one["rows dpo v4"]["reports"]
    assert [report.loss for report in reports] == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("name", SCORED)
def test_transformers_gives_the_scores_of_a_trained_reward_model(
    one: world.Results, row_models: dict[str, str], saved: Path, tmp_path: Path, name: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    expected = one[f"trained {name}"]
    shutil.copy(Path(row_models[name]) / "config.json", tmp_path)
    shutil.copy(saved / f"{name}.safetensors", tmp_path / "model.safetensors")
    # transformers has no model of DeepSeek-V4 with a score head
    kind = AutoModelForCausalLM if name == "v4 scores" else AutoModelForSequenceClassification
    model, told = kind.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert told["missing_keys"] == ({"lm_head.weight"} if name == "v4 scores" else set())
    assert told["unexpected_keys"] == ({HEAD} if name == "v4 scores" else set())
    if name == "v4 scores":
        head = load_file(tmp_path / "model.safetensors")[HEAD]
        model.lm_head.weight = torch.nn.Parameter(head)
    with torch.no_grad():
        got = [float(model(torch.tensor([row])).logits[..., -1, :]) for row in TOKEN_ROWS]
    assert got == pytest.approx(expected, abs=1e-5)
    assert max(got) - min(got) > 1e-2, "all scores are alike: the comparison is blind"
