"""A run that trains two adapters at once, with real Ray, SGLang and Megatron-Core on a CPU. Each is
the run that trains it alone, bit for bit, also where their ranks are killed on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import scratch
from milescli.recipe.model import ScratchModel
from milescli.recipe.resolved import load_resolved
from milescli.recipe.several import adapter_recipes
from tests.chaos.oracle import OF_ENGINES
from tests.end_to_end.runs import Workplace, actor_of, learned, saved, step_done

RECIPE = """\
model: {path: base}
data: {prompts: task:sums, eval: task:sums-heldout, max_prompt_tokens: 48}
rollout: {prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 16,
          reward: "tests.end_to_end.rewards:variety"}
train:
  {steps: 4, lora: {rank: 4, publish: adapter}, optimizer: {lr: 0.02}, kl_coef: 0.1}
weights: {verify: true}
eval: {num_prompts: 8}
checkpoint: {every: 2, keep: 4}
run: {trackers: []}
machine: {cpu_threads: 1, start_timeout_s: 240, step_timeout_s: 120}
"""
OWN = {
    "first": 'run: {seed: 1}\nrollout: {stop: ["9"]}\n',
    "second": "run: {seed: 2}\ntrain: {steps: 6, kl_coef: 0.0, optimizer: {lr: 0.01}}\n"
    "rollout: {prompts_per_step: 2}\n",
}
LAUNCH = ("launch", "--recipe", "several.yaml", "--adapter", "first=first.yaml")
LAUNCH += ("--adapter", "second=second.yaml")


@pytest.fixture(scope="module")
def several(workplace: Workplace) -> Workplace:
    """Where `both` has run, with its ranks killed in the middle."""
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    folder = workplace.folder / "base"
    make_scratch_tokenizer(["What is 47 + 38? #### 85"] * 3, 300, folder)
    model = ScratchModel(**shape, ffn_hidden_size=128, vocab_size=300)
    scratch.make_model(model, folder, 0)
    (workplace.folder / "several.yaml").write_text(RECIPE)
    for name, text in OWN.items():
        (workplace.folder / f"{name}.yaml").write_text(text)
    process = workplace.start(*LAUNCH, "--name", "both")
    second = "both/adapters/second"
    workplace.wait_for(second, step_done(3), process)
    actor_of(process.pid, "trainer-rank-0.log").send_signal(signal.SIGKILL)
    finished = workplace.finish(process)
    assert finished.code == 0, finished
    return workplace


def _weights(workplace: Workplace, run: str, folder: Path) -> dict[str, torch.Tensor]:
    finished = workplace.miles("export", f"runs/{run}", "--to", str(folder))
    assert finished.code == 0, finished
    return load_file(folder / "adapter_model.safetensors")


def _learned(workplace: Workplace, run: str) -> dict[int, tuple[dict, dict]]:
    """By step: what the last attempt at it sampled and learned; how the engine rounds depends on
    what else it had to do."""
    rounded = OF_ENGINES
    steps = {}
    for event in workplace.steps(run):
        report, rollout = learned(event)
        steps[event["step"]] = ({k: v for k, v in report.items() if k not in rounded}, rollout)
    return steps


@pytest.mark.parametrize("name", ["first", "second"])
def test_each_is_the_run_that_trains_it_alone(
    several: Workplace, tmp_path: Path, name: str
) -> None:
    text = (several.folder / f"{name}.yaml").read_text()
    alone = several.folder / f"alone-{name}.yaml"
    alone.write_text(json.dumps(_merged(RECIPE, text)))
    finished = several.miles("launch", "--recipe", alone.name, "--name", f"alone-{name}")
    assert finished.code == 0, finished
    assert _learned(several, f"both/adapters/{name}") == _learned(several, f"alone-{name}")
    own = _weights(several, f"both/adapters/{name}", tmp_path / "own")
    theirs = _weights(several, f"alone-{name}", tmp_path / "theirs")
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[key], theirs[key]) for key in own)
    assert any(tensor.abs().max() > 0 for key, tensor in own.items() if "lora_B" in key)


def _merged(base: str, own: str) -> dict:
    import yaml

    def put(into: dict, what: dict) -> dict:
        for key, value in what.items():
            into[key] = put(into.get(key, {}), value) if isinstance(value, dict) else value
        return into

    return put(yaml.safe_load(base), yaml.safe_load(own))


def test_neither_processes_that_collect_for_each_nor_waves_change_a_number(
    several: Workplace, tmp_path: Path
) -> None:
    """Not where the driver is killed, nor where such a process dies."""
    collected = ("--name", "waves-of-two", "--set", "machine.collectors=4")
    collected += ("--set", "engines.num=2", "--set", "weights.wave_share=0.5")
    process, second = several.start(*LAUNCH, *collected), "waves-of-two/adapters/second"
    for happened in (saved(2), step_done(2)):
        several.wait_for(second, happened, process)
    process.send_signal(signal.SIGKILL)
    several.finish(process)
    past = len(several.events(second))
    process = several.start("resume", "waves-of-two")
    several.wait_for(second, step_done(4), process, after=past)
    actor_of(process.pid, "collector-1-of-second.log").kill()
    finished = several.finish(process)
    assert finished.code == 0, finished
    for name in OWN:
        ours, theirs = (f"{run}/adapters/{name}" for run in ("waves-of-two", "both"))
        assert _learned(several, ours) == _learned(several, theirs)
        weights = _weights(several, ours, tmp_path / f"ours-{name}")
        others = _weights(several, theirs, tmp_path / f"theirs-{name}")
        assert all(torch.equal(weights[key], others[key]) for key in others)
    events = several.events("waves-of-two")
    assert "collector 1 of second" in [e["worker"] for e in events if "Replaced" in e["event"]]


def test_the_run_tells_of_all(several: Workplace) -> None:
    """Its events are theirs, by name, and what was lost on the way."""
    events = several.events("both")
    done = {(e.get("adapter"), e["step"]) for e in events if e["event"] == "StepDone"}
    assert done == {("first", n) for n in range(1, 5)} | {("second", n) for n in range(1, 7)}
    assert [e["event"] for e in events if e["event"].startswith("Worker")] == [
        "WorkerLost",
        "WorkerReplaced",
    ]
    finished = several.miles("export", "runs/both", "--to", "nothing")
    assert finished.code != 0 and "adapters/first" in finished.err, finished


def test_a_run_that_was_stopped_goes_on_with_each(several: Workplace) -> None:
    """By Ctrl-C; and each can be trained further by itself."""
    process = several.start("resume", "both", "--steps", "9")
    second = "both/adapters/second"
    past = len(several.events(second))
    several.wait_for(second, step_done(7), process, after=past)
    os.kill(process.pid, signal.SIGINT)
    stopped = several.finish(process)
    assert stopped.code == 75 and "miles resume runs/both" in stopped.err, stopped
    recorded = load_resolved(several.folder / "runs/both/recipe.yaml")
    steps = [one.recipe.train.steps for one in adapter_recipes(recorded).values()]
    assert steps == [9, 9], "the next `miles resume runs/both` trains each to the end"
    finished = several.miles("resume", f"runs/{second}", "--steps", "9")
    assert finished.code == 0, finished
    assert [event["step"] for event in several.steps(second)] == list(range(1, 10))
