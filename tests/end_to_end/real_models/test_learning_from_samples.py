"""SmolLM2-135M learns from samples: it goes on bit for bit where it was stopped, in bf16 its engine
is not refused, and an adapter of it is what PEFT reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.real_models.settings import SAMPLED, words
from tests.end_to_end.runs import Workplace, learned

pytestmark = [pytest.mark.ray, pytest.mark.trainer, pytest.mark.thorough]


def _launch(
    workplace: Workplace, model: Path, name: str, *options: str, **settings: object
) -> list[dict]:
    """A run from its launch to its end: its events."""
    wanted = {key.replace("__", "."): value for key, value in settings.items()}
    launch = ("launch", "--recipe", "smollm2-135m", "--name", name, *options)
    finished = workplace.miles(*launch, *words(model, SAMPLED, wanted))
    assert finished.code == 0, finished
    return workplace.events(name)


def _agreement(events: list[dict]) -> list[str]:
    return [event["agreement"] for event in events if event["event"] == "EngineTrainerChecked"]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("*.safetensors")
    return load_file(file)


def test_a_run_that_was_stopped_is_the_one_that_was_not(
    workplace: Workplace, smollm2: Path
) -> None:
    settings = {"checkpoint__every": 2, "checkpoint__keep": 4, "train__optimizer__lr": 1e-4}
    _launch(workplace, smollm2, "real-whole", "--steps", "4", **settings)
    again = workplace.resume_without("real-whole", step=4)
    whole, resumed = (
        {step["step"]: learned(step) for step in workplace.steps(name)}
        for name in ("real-whole", again)
    )
    assert sorted(whole) == [1, 2, 3, 4]
    assert resumed == whole
    assert all(report["grad_norm"] > 0 for report, _ in whole.values())
    for step in (3, 4):
        assert workplace.samples(again, step) == workplace.samples("real-whole", step)
    theirs, ours = (_weights(workplace.export(name, step=4)) for name in (again, "real-whole"))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    before = _weights(smollm2)
    assert not all(torch.equal(before[name], tensor) for name, tensor in ours.items())


def test_an_engine_in_bf16_is_not_refused(workplace: Workplace, smollm2: Path) -> None:
    events = _launch(workplace, smollm2, "real-bf16", "--steps", "1", train__precision="bf16")
    [agreement] = _agreement(events)
    assert agreement in ("equal", "explained")
    [step] = workplace.steps("real-bf16")
    assert 0 < step["report"]["grad_norm"] < float("inf")


def test_an_adapter_learns_and_is_what_peft_and_transformers_read(
    workplace: Workplace, smollm2: Path, tmp_path: Path
) -> None:
    import transformers
    from peft import PeftModel

    events = _launch(
        workplace,
        smollm2,
        "real-adapter",
        *("--lora", "16", "--steps", "2"),
        weights__verify="true",
        checkpoint__every=2,
        train__optimizer__lr=0.01,
    )
    assert _agreement(events) == ["equal"]
    done = workplace.steps("real-adapter")
    assert [step["step"] for step in done] == [1, 2]
    kept = workplace.run("real-adapter") / "checkpoints" / "step_2"
    size = json.loads((kept / "manifest.json").read_text())["size_bytes"]
    assert size < (smollm2 / "model.safetensors").stat().st_size, "more than the adapter is kept"
    for name, options in (("adapter", ()), ("merged", ("--merge",))):
        to = ("--to", str(tmp_path / name))
        finished = workplace.miles("export", "real-adapter", *to, *options)
        assert finished.code == 0, finished
    [prompt] = [[1, 4093, 198, 19556, 28, 638, 359, 346, 47]]
    ids = torch.tensor([prompt])
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits.clone()
        beside = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32
        )(ids).logits
    learned_logits = (beside - plain).abs().max()
    assert learned_logits > 1e-3
    # the merged weights are kept in the model's own bfloat16
    assert (beside - merged).abs().max() < learned_logits
