"""What must hold after a fault: the run is the one that was left alone, and nothing is left. Reads
run directories alone; every function returns what is wrong, a line each."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

SECONDS = ("forward_backward_s", "save_wait_s", "optimizer_s")
OF_ENGINES = ("logprob_diff_mean", "logprob_diff_max", "logprob_diff_tokens")
"""Figures that which requests an engine computes together may change in their last bit."""
OF_CLOCKS = ("environment_s",)
"""Figures of episodes that are seconds."""
NEAR = {"loss": 0.05, "reward_mean": 0.05, "response_tokens_mean": 1.0}
"""How far figures of a step may be from those of another layout: sums in another order change last
bits, and by and by a token."""
MANY = 3
"""Differences that are shown."""


def events_of(run: Path) -> list[dict]:
    """All whole lines of the run's events; a full disk tears some."""
    return intact_records(_lines(run / "events.jsonl"))


def intact_records(lines: Iterable[str | bytes]) -> list[dict]:
    """Of lines in JSON, without those that are torn."""
    records = []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def of_kind(events: Iterable[Mapping], kind: str) -> list[Mapping]:
    """In their order."""
    return [event for event in events if event["event"] == kind]


def compared(hurt: Path, calm: Path, how: str = "all") -> list[str]:
    """What two run directories must have in common; `how`: see `Fault.compared`."""
    told, wanted = events_of(hurt), events_of(calm)
    if how == "close":
        return [*figures_that_are_far(told, wanted), *_samples_that_are_missing(hurt, calm)]
    figures = figures_that_differ(told, wanted)
    if how == "told":
        is_told = [wrong for wrong in figures if not wrong.endswith("is not there")]
        return [*is_told, *_weights_that_differ(hurt, calm)]
    return [*figures, *samples_that_differ(hurt, calm), *_weights_that_differ(hurt, calm)]


def figures_that_are_far(hurt: Iterable[Mapping], calm: Iterable[Mapping]) -> list[str]:
    """All steps are there; until the layout changed they are those of the calm run, and afterwards
    near them."""
    steps, wanted, wrong = dict[str, dict](), dict[str, dict](), []
    for events, into in ((hurt, steps), (calm, wanted)):
        for event in events:
            into |= {name: f for name, f in _figures(event).items() if "StepDone" in name}
    for name in wanted:
        if name not in steps:
            wrong.append(f"{name} is not there")
            continue
        for key, far in NEAR.items():
            there, due = steps[name].get(key), wanted[name].get(key)
            if isinstance(due, float) and not abs(there - due) <= far:
                wrong.append(f"{name}: {key} is {there}, not near {due}")
    wrong += [f"{name} is no step of the calm run" for name in steps if name not in wanted]
    return wrong[:MANY]


def _samples_that_are_missing(hurt: Path, calm: Path) -> list[str]:
    wrong = []
    for file in sorted(calm.glob("rollouts/*.jsonl")):
        name = file.relative_to(calm)
        numbers = [len(_lines(run / name)) for run in (hurt, calm)]
        if numbers[0] != numbers[1]:
            wrong.append(f"{name} has {numbers[0]} samples, not {numbers[1]}")
    return wrong[:MANY]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def figures_that_differ(hurt: Iterable[Mapping], calm: Iterable[Mapping]) -> list[str]:
    """Of warm-up, steps and evaluations. A step that was done again must be the same, too."""
    hurt, wanted, wrong = list(hurt), {}, []
    for event in calm:
        wanted |= _figures(event)
    for event in hurt:
        for name, figures in _figures(event).items():
            if name not in wanted:
                wrong.append(f"{name} is no step of the calm run")
            elif figures != wanted[name]:
                keys = [key for key in figures if figures[key] != wanted[name].get(key)]
                wrong.append(f"{name} differs in {', '.join(keys[:MANY])}")
    there = {name for event in hurt for name in _figures(event)}
    wrong += [f"{name} is not there" for name in wanted if name not in there]
    return wrong[:MANY]


def _figures(event: Mapping) -> dict[str, dict[str, object]]:
    kind = event["event"]
    if kind in ("StepDone", "WarmupStepDone"):
        report = {k: v for k, v in event["report"].items() if k not in (*SECONDS, *OF_ENGINES)}
        rollout = dict(event.get("rollout", {}))
        if "figures" in rollout:
            rollout["figures"] = _without_clocks(rollout["figures"])
        return {f"{kind} {event['step']}": report | rollout}
    if kind == "EvalDone":
        figures = ("accuracy", "num_prompts", "truncated_fraction", "response_tokens_mean")
        return {f"{kind} {event['step']}": {key: event[key] for key in figures}}
    return {}


def _without_clocks(figures: Mapping) -> dict[str, object]:
    return {name: value for name, value in figures.items() if name not in OF_CLOCKS}


def _without_seconds(line: str) -> str:
    """Of a sample, without figures of clocks, and without the engine's log-probs: which requests it
    computes together changes their last bits; one without either is compared letter by letter."""
    if not any(f'"{name}"' in line for name in (*OF_CLOCKS, "logprobs")):
        return line
    sample = json.loads(line)
    for told in sample.get("lines", ()):
        told.pop("logprobs", None)
    if "episode" in sample:
        sample["episode"] = _without_clocks(sample["episode"])
    return json.dumps(sample)


def samples_that_differ(hurt: Path, calm: Path) -> list[str]:
    """Files of samples, line by line: none is lost, doubled, or another."""
    wrong = []
    for file in sorted((*calm.glob("rollouts/*.jsonl"), *calm.glob("eval/*.jsonl"))):
        name = file.relative_to(calm)
        if not (hurt / name).exists():
            wrong.append(f"{name} is not there")
            continue
        there, wanted = (
            [_without_seconds(line) for line in _lines(f)] for f in (hurt / name, file)
        )
        if len(there) != len(wanted):
            wrong.append(f"{name} has {len(there)} samples, not {len(wanted)}")
        elif there != wanted:
            wrong.append(f"{name} has other samples")
    return wrong[:MANY]


def _weights_that_differ(hurt: Path, calm: Path) -> list[str]:
    newest = max(calm.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:])).name
    folders = [run / "checkpoints" / newest for run in (hurt, calm)]
    if missing := [str(folder) for folder in folders if not (folder / "manifest.json").exists()]:
        return [f"there is no {missing[0]}"]
    there, wanted = (tensors_of(folder) for folder in folders)
    names = sorted(there.keys() | wanted.keys())
    wrong = [name for name in names if there.get(name) != wanted.get(name)]
    if not wrong:
        return []
    return [f"{len(wrong)} of {len(names)} tensors differ: {', '.join(wrong[:MANY])}"]


def tensors_of(checkpoint: Path) -> dict[str, str]:
    """Name -> SHA-256 of each tensor of model and optimizer, whatever the layout."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(checkpoint, file.name)
        tree = torch.load(file.name, weights_only=False)
    hashes: dict[str, str] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            hashes[name] = hashlib.sha256(data).hexdigest()
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{name}/{key}", inner)

    walk("", tree)
    return hashes


def losses_that_differ(events: Iterable[Mapping], *, said: str, within_s: float) -> list[str]:
    """Losses of workers without their replacement within the bound, or of another than the
    victim."""
    lost = dict[str, Mapping]()
    wrong, replaced = [], 0
    for event in events:
        if event["event"] == "WorkerLost":
            lost[event["worker"]] = event
            if said not in f"{event['worker']} {event['what']}":
                wrong.append(f"lost was {event['worker']}: {event['what']}")
        elif event["event"] == "WorkerReplaced":
            lost.pop(event["worker"], None)
            replaced += 1
            if event["seconds"] > within_s:
                wrong.append(f"{event['worker']} was replaced after {event['seconds']:.0f} s")
    wrong += [f"{worker} was never replaced" for worker in lost]
    return wrong if replaced or wrong else ["no worker was lost"]
