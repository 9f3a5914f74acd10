"""Run directories with what a run writes: events, recipe, manifest, plan, samples, evaluations. Of
runs that are made up step by step; shared by the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from milescli.core.events import Event, to_record
from tests.insight.planted import BEGAN_S, Planted, late
from tests.insight.planted import row_events as row_events

RECIPE = """\
# The whole recipe of this run, with the origin of each value. It loads again: --recipe PATH
name: "sums"  # recipe sums.yaml
description: "Learns <b>sums</b>"  # recipe sums.yaml:1
model:
  path: "/data/alice/models/Qwen3"  # --set model.path=/data/alice/models/Qwen3
train:
  steps: 80  # recipe sums.yaml:3
  optimizer:
    lr: {lr}  # --set train.optimizer.lr={lr}
rollout:
  temperature: 1.0  # default
  mcp: {{"servers": [{{"env": {{"SERVICE_TOKEN": "s3cret-word"}}}}]}}  # recipe sums.yaml:9
eval:
  endpoint:
    api_key: "another-s3cret"  # --set eval.endpoint.api_key=another-s3cret
"""
MANIFEST: Mapping[str, Any] = {
    "commit": "abc123",
    "created": "2026-11-25T22:08:26Z",
    "machine": "CPU of somebody",
    "miles": "0.1.0",
    "packages": {"torch": "2.13.0", "sglang": "0.5.20"},
    "python": "3.11.7",
    "seed": 0,
    "data": {"prompts": {"path": "/data/alice/sums.jsonl", "num_rows": 8192, "sha256": "ab" * 32}},
}
PLAN: Mapping[str, Any] = {
    "device_kind": "cpu",
    "steps": 80,
    "batch": {"updates_per_step": 1, "samples_per_prompt": 4},
    "decisions": [
        {"key": "device", "value": "cpu", "reason": "no GPU is visible to /data/alice/venv"}
    ],
}


def make_run(
    folder: Path,
    events: Iterable[tuple[float, Event]] | None = None,
    *,
    lr: float = 1e-6,
    manifest: Mapping[str, Any] = MANIFEST,
) -> Path:
    """A run's directory; without events it was never started."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(lr=lr))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    if events is not None:
        (folder / "logs" / "attempt_1").mkdir(parents=True)
        with (folder / "events.jsonl").open("w") as file:
            for time_s, event in events:
                when = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
                file.write(json.dumps({"time": when, **to_record(event)}) + "\n")
    return folder


def make_planted(folder: Path, *, lr: float = 1e-6, **planted: Any) -> Path:
    """Of a planted run."""
    return make_run(folder, Planted(**planted).events(), lr=lr)


def make_several(folder: Path, *, names: Sequence[str], steps: int = 12) -> Path:
    """Of several adapters, whose driver is gone."""
    make_run(folder, [])
    with (folder / "events.jsonl").open("w") as file:
        for seed, name in enumerate(names):
            for _, event in Planted(steps=steps, seed=seed, eval_every=0).events():
                record = {"time": "2026-11-25T22:08:27Z", **to_record(event), "adapter": name}
                if record["event"] == "StepDone":
                    file.write(json.dumps(record) + "\n")
    return folder


def write_samples(folder: Path, step: int, rewards: Sequence[float], response: str) -> None:
    """A group of one prompt."""
    (folder / "rollouts").mkdir(exist_ok=True)
    rows = [
        {
            "prompt": "What is 1 + 2?",
            "response": f"{response} ({reward:g})",
            "reward": reward,
            "stop_reason": "stop",
            "prompt_index": 7,
        }
        for reward in rewards
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts" / f"step_{step}.jsonl").write_text(text)


def write_evaluation(folder: Path, step: int, share: float, *, seed: int, num: int = 200) -> None:
    """Held-out prompts, each answered once, right by chance."""
    (folder / "eval").mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    rows = [
        {"index": n, "prompt": f"{n} + 1", "label": str(n + 1), "reward": float(right)}
        for n, right in enumerate(draw.random(num) < share)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "eval" / f"step_{step}.jsonl").write_text(text)


def make_sick(folder: Path) -> Path:
    """One with a finding, a result of `miles eval`, and what its processes held."""
    make_planted(folder, courses={"entropy": (late(0.5, 4.0), 0.05)})
    names, size = {"7": "driver", "8": "engine-0"}, 2**30
    held = {"time": BEGAN_S, "resident_bytes": {"7": size, "8": 2 * size}, "names": names}
    lines = [{**held, "oom_kills": 3}, {"time": BEGAN_S + 1, "oom_kills": 5}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "logs" / "attempt_1" / "memory.jsonl").write_text(text)
    result = {
        "set": "hard <sums>",
        "step": 10,
        "accuracy": 0.5,
        "num_prompts": 4,
        "estimates": {"pass@4": {"value": 0.75, "low": 0.25, "high": 1.0}},
    }
    (folder / "eval" / "hard").mkdir(parents=True)
    (folder / "eval" / "hard" / "step_10.json").write_text(json.dumps(result))
    return folder
