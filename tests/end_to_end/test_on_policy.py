"""`train.on_policy: exact`: no log-prob differs between engine and trainer, in any step of a run,
nor after it is resumed under another layout."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import Workplace
from tests.end_to_end.test_layouts import MOE

WIDE = (
    "model.scratch.hidden_size=128",
    "model.scratch.head_dim=32",
    "model.scratch.num_kv_heads=4",
)
"""A width of which FP8's blocks divide attention, and of experts the default does."""
MOE_WIDE = (*(text for text in MOE if "moe_ffn" not in text), *WIDE)
RUNS = {
    "dense": ((), ("parallel.pp=2",)),
    "experts": ((*MOE, "parallel.ep=2"), ("parallel.ep=1", "parallel.pp=2")),
    "experts that are replayed": ((*MOE, "train.routing_replay=true"), ("parallel.ep=2",)),
    "temperature and turns of both kinds": (
        ("rollout.temperature=0.7", "parallel.dp=2", "train.updates_per_step=2"),
        ("parallel.dp=1",),
    ),
    "bf16": (("train.precision=bf16",), ("parallel.pp=2",)),
    "bf16 experts": ((*MOE, "train.precision=bf16", "parallel.ep=2"), ("parallel.ep=1",)),
    "fp8 experts": ((*MOE_WIDE, "train.precision=fp8_block"), ("parallel.ep=2",)),
    "mxfp8": (("train.precision=mxfp8", "rollout.temperature=0.7"), ("parallel.dp=2",)),
    "int4 experts": ((*MOE, "train.precision=int4_qat"), ("parallel.ep=2",)),
    "nvfp4": (("train.precision=nvfp4",), ("parallel.dp=2",)),
}
"""Settings at the start, and changes at the resume."""


def _sets(*pairs: str) -> list[str]:
    return [word for pair in ("train.on_policy=exact", *pairs) for word in ("--set", pair)]


def _require_equal(workplace: Workplace, name: str, *, steps: int) -> None:
    checks = [each for each in workplace.events(name) if each["event"] == "EngineTrainerChecked"]
    assert checks and {check["diff_max"] for check in checks} == {0.0}
    assert {check["bound_max"] for check in checks} == {0.0}
    reports = [event["report"] for event in workplace.steps(name)]
    assert len(reports) == steps and all(report["num_loss_tokens"] > 0 for report in reports)
    apart = [(report["logprob_diff_max"], report["logprob_diff_tokens"]) for report in reports]
    assert set(apart) == {(0.0, 0)}


@pytest.mark.parametrize("kind", RUNS)
def test_no_log_prob_differs_before_and_after_a_resume(workplace: Workplace, kind: str) -> None:
    name = kind.replace(" ", "-")
    first, changes = RUNS[kind]
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", name, *_sets("train.steps=3", *first)
    )
    assert finished.code == 0, finished
    resumed = workplace.miles("resume", name, "--steps", "5", *_sets(*changes))
    assert resumed.code == 0, resumed
    _require_equal(workplace, name, steps=5)


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart-moe"])
def test_no_log_prob_differs_in_a_whole_quickstart(workplace: Workplace, recipe: str) -> None:
    finished = workplace.miles("launch", "--recipe", recipe, "--name", recipe, *_sets())
    assert finished.code == 0, finished
    _require_equal(workplace, recipe, steps=30)
