"""A run that trains a LoRA adapter, with real Ray, SGLang and Megatron-Core on a CPU: it goes on
where it was stopped, keeps the adapter alone, and exports what PEFT reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.runs import TINY, Workplace

SETS = (
    *("--lora", "4"),
    *("--set", "train.optimizer.lr=0.02"),
    *("--set", "train.kl_coef=0.1"),
    *("--set", "weights.verify=true"),
    *("--set", "checkpoint.every=2"),
    *("--steps", "4"),
)


@pytest.fixture(scope="module")
def whole(workplace: Workplace) -> str:
    """The name of a run of four steps without a break."""
    (workplace.folder / "tiny.yaml").write_text(TINY)
    launch = ("launch", "--recipe", "tiny.yaml", "--name", "adapter", *SETS)
    finished = workplace.miles(*launch)
    assert finished.code == 0, finished
    return "adapter"


def _steps(workplace: Workplace, name: str) -> dict[int, tuple]:
    return {
        event["step"]: (event["report"]["loss"], event["report"]["grad_norm"], event["rollout"])
        for event in workplace.events(name)
        if event["event"] == "StepDone"
    }


def test_engine_and_trainer_agree_while_the_adapter_learns(
    workplace: Workplace, whole: str
) -> None:
    done = workplace.steps(whole)
    assert max(event["report"]["logprob_diff_max"] for event in done) < 1e-4
    assert done[-1]["report"]["figures"]["kl"] > 0, "the reference is the base"


def test_a_resumed_run_is_the_run_that_was_not_stopped(workplace: Workplace, whole: str) -> None:
    again = workplace.resume_without(whole, step=4)
    assert _steps(workplace, again) == _steps(workplace, whole)


def test_a_checkpoint_holds_the_adapter_alone(workplace: Workplace, whole: str) -> None:
    run = workplace.run(whole)
    manifest = json.loads((run / "checkpoints" / "step_4" / "manifest.json").read_text())
    model = (run / "model" / "model.safetensors").stat().st_size
    assert manifest["size_bytes"] < model
    assert "adapter.json" in manifest["files"]


def test_an_export_is_what_peft_puts_beside_the_base(
    workplace: Workplace, whole: str, tmp_path: Path
) -> None:
    """And merged, what transformers computes with it."""
    import transformers
    from peft import PeftModel

    for name, options in (("adapter", ()), ("merged", ("--merge",))):
        finished = workplace.miles("export", whole, "--to", str(tmp_path / name), *options)
        assert finished.code == 0, finished
    base = transformers.AutoModelForCausalLM.from_pretrained(
        workplace.run(whole) / "model", dtype=torch.float32
    )
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        plain = base(ids).logits.clone()
        beside = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32
        )(ids).logits
    assert torch.allclose(beside, merged, atol=1e-5)
    assert (plain - merged).abs().max() > 1e-2


def test_an_evaluation_asks_the_merged_model(workplace: Workplace, whole: str) -> None:
    finished = workplace.miles("eval", whole)
    assert finished.code == 0, finished
    before = [event for event in workplace.events(whole) if event["event"] == "EvalDone"]
    assert f"{100 * before[-1]['accuracy']:.1f}%" in finished.out, finished
