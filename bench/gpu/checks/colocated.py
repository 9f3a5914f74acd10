"""Whole runs on one device, trainer and engine taking turns: the quickstart, and a model of the
0.6B shape with random weights on word problems. Seconds of each phase beside the planner's
forecast."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from launching import Runs, write_problems
from lines import Bound, Line
from planning import size_of_weight, time_model, work_of
from shapes import write_model

from checks import Visit
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models.base import WeightTable
from milescli.plan.static_memory import static_bytes
from milescli.plan.types import Plan

ACCURACY_ON_CPU = 0.975
"""The least of the three seeds of docs/figures.md, in float32."""
SMALL = ("warmup.steps=2", "train.steps=2", "eval.num_prompts=4", "rollout.prompts_per_step=4")


def quickstart(visit: Visit, recipe: str) -> Iterator[Line]:
    """As `make quickstart` runs it, in the precision of the device."""
    runs = Runs(folder=visit.folder)
    sets = [] if visit.on_device else [word for text in SMALL for word in ("--set", text)]
    seconds = runs.run("launch", "--recipe", recipe, "--name", "quickstart", *sets)
    yield Line(
        name="run", measured=seconds, unit="s", note="the whole command, start of Ray included"
    )
    accuracies = runs.metrics("quickstart", "eval/accuracy")
    yield Line(
        name="accuracy",
        measured=accuracies[-1],
        predicted=ACCURACY_ON_CPU,
        unit="of held-out sums",
        bound=Bound(kind="at least", value=0.9, anywhere=False),
        note="predicted: the least that three seeds reached on a CPU in float32",
        figures={"before": accuracies[0]},
    )
    steps = runs.metrics("quickstart", "time/step_s")
    yield Line(name="step", measured=mean(steps[1:] or steps), unit="s, mean of all but the first")
    differences = runs.metrics("quickstart", "train/logprob_diff_mean")
    yield Line(
        name="logprob_difference_mean",
        measured=max(differences),
        unit="|engine - trainer|, the worst step's mean",
    )


def random_model(visit: Visit, shape: str) -> Iterator[Line]:
    """Five steps; no response ends before it is full, so that the work is known."""
    runs, on_device = Runs(folder=visit.folder), visit.on_device
    folder, weights = write_model(shape, visit)
    problems = visit.folder / "problems.jsonl"
    texts = write_problems(problems, count=256)
    make_scratch_tokenizer(texts, 512, folder)
    length = 512 if on_device else 16
    sections = {
        "model": {"path": str(folder)},
        "data": {"prompts": str(problems), "max_prompt_tokens": 256},
        "rollout": {
            "prompts_per_step": 32 if on_device else 2,
            "samples_per_prompt": 8 if on_device else 2,
            "max_response_tokens": length,
            "reward": "launching:variety",
        },
        "train": {"steps": 5 if on_device else 2, "optimizer": {"lr": 1e-6}},
        "run": {"trackers": []},
        "machine": {"start_timeout_s": 240.0, "step_timeout_s": 240.0},
    }
    seconds = runs.run("launch", "--recipe", runs.recipe("random", sections), "--name", "random")
    yield Line(name="run", measured=seconds, unit="s", note="the whole command")
    planned = _planned(visit, runs, weights, response_tokens=length)
    for name, key in (
        ("rollout", "time/rollout_s"),
        ("train", "time/train_s"),
        ("publish", "time/publish_s"),
        ("step", "time/step_s"),
    ):
        values = runs.metrics("random", key)
        yield Line(
            name=name,
            measured=mean(values[1:] or values),
            predicted=planned[name],
            unit="s, mean of all but the first",
            note="predicted: the planner's, for the lengths that the run had",
        )
    generated = runs.metrics("random", "rollout/generated_tokens")
    steps = runs.metrics("random", "time/step_s")
    yield Line(
        name="tokens_per_s",
        measured=sum(generated[1:]) / sum(steps[1:]),
        unit="generated and learnt tokens/s of a whole step",
    )


def _planned(
    visit: Visit, runs: Runs, weights: WeightTable, *, response_tokens: int
) -> dict[str, float]:
    """Seconds by the planner's time model, under the plan that the run had."""
    plan = Plan.from_json((runs.folder / "runs/random/plan.json").read_text())
    times, trainer = time_model(weights), plan.trainer
    work = work_of(
        visit,
        num_samples=plan.batch.num_samples,
        prompt_tokens=mean(runs.metrics("random", "rollout/prompt_tokens_mean")),
        response_tokens=response_tokens,
    )
    parts = plan.forecast.rollout if plan.forecast else []
    cache = next((part.size_bytes for part in parts if part.name == "KV cache"), 2**30)
    rollout = times.rollout(plan.engines, work, cache_bytes=cache).total
    train = times.train(trainer, work, cap=plan.batch.max_tokens_per_microbatch).total
    held = times.memory.counter.fullest(trainer)
    kept, _, moments = static_bytes(held, trainer, size=size_of_weight(visit))
    publish = times.publish_seconds(trainer, plan.engines, work, shared=True)
    turns = times.turns(kept + moments) if visit.on_device else 0.0
    return {
        "rollout": rollout,
        "train": train,
        "publish": publish + turns,
        "step": rollout + train + publish + turns,
    }
