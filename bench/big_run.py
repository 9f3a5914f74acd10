"""A big run, written as a run writes it, and how long its page takes over it: 10,000 steps and
100,000 kept samples by default. `python bench/big_run.py [--steps 10000] [--folder FOLDER]`. The
peer is TensorBoard's EventAccumulator, reading the same scalars from its own files. Each side is a
process of its own."""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import httpx
import psutil
from pairs import Figures, Machine, Table, command_line, take_turns

from milescli.core.events import (
    EvalDone,
    Event,
    PhaseSeconds,
    PhaseStarted,
    RolloutStats,
    StepDone,
    to_record,
)
from milescli.core.types import StepReport
from milescli.core.units import format_time

NAME = "big-1"
SAMPLES = 10
"""Kept of each step."""
TOKENS = 40
"""Of each of them."""
EVAL_EVERY = 100
BEGAN_S = 1_764_000_000.0
STEP_S = 8.0
FIGURES = (
    *("entropy", "kl", "ratio_mean", "ratio_max", "clip_fraction", "policy_loss", "kl_loss"),
    *(f"reward_part_{number}" for number in range(20)),
)
CHARTS = (
    ("rollout/reward_mean", "eval/accuracy"),
    ("train/loss", "train/grad_norm"),
    ("train/entropy", "train/kl"),
    ("train/logprob_diff_mean", "train/logprob_diff_max"),
    ("time/rollout_s", "time/train_s", "time/publish_s", "time/step_s"),
    ("speed/rollout_tokens_per_s", "speed/train_tokens_per_s"),
)
"""What the page's first view draws."""
WAIT_S = 120.0


def main() -> None:
    """Write the run, measure both sides in turns, print the table."""
    parser = command_line(__doc__, num_pairs=3)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="keep the run there, or take the one there")
    parser.add_argument("--side", choices=("miles", "tensorboard"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="big-run-") as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        if asked.side:
            print(json.dumps(SIDES[asked.side](folder)))
            return
        write(folder, num_steps=asked.steps)
        table = Table(
            peer="TensorBoard's EventAccumulator, all scalars of the same steps, in this process's "
            "Python; ours with a browser's requests over HTTP",
            machine=Machine.read(),
        )
        pairs = take_turns(
            lambda _: measured("miles", folder),
            lambda _: measured("tensorboard", folder),
            num_pairs=asked.pairs,
        )
        for name, what in ROWS.items():
            unit = "MB" if name.endswith("_mb") else "s"
            table.add(pairs, name=name, what=what, unit=unit, better="less")
        print(table)
        if asked.json:
            table.write(asked.json)


ROWS = {
    "open_s": "the first charts of a run that nobody has read yet",
    "read_s": "all its events read (ours), all scalars (peer)",
    "read_cpu_s": "the same in seconds of a core, whatever else the machine does",
    "again_s": "six charts of a run that was read",
    "summary_s": "summary and verdict",
    "narrow_s": "100 steps of one chart",
    "samples_s": "samples of one step",
    "search_s": "a search through samples that finds nothing",
    "live_s": "a step that was written, until the page is told",
    "list_s": "the list of runs",
    "memory_mb": "memory of the process, at its most",
}


def measured(side: str, folder: Path) -> Figures:
    """In a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def of_tensorboard(folder: Path) -> Figures:
    """The peer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    began, cpu = time.perf_counter(), time.process_time()
    read = EventAccumulator(str(folder / NAME / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    read_s, read_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    for names in CHARTS:
        for name in names:
            if name in read.Tags()["scalars"]:
                [(event.step, event.value) for event in read.Scalars(name)]
    return {
        "open_s": time.perf_counter() - began,
        "read_s": read_s,
        "read_cpu_s": read_cpu_s,
        "memory_mb": peak_mb(resource.RUSAGE_SELF),
    }


def of_miles(folder: Path) -> Figures:
    """`miles ui`, asked as a page asks."""
    miles = Path(sys.executable).with_name("miles")
    command = [str(miles), "--json", "ui", str(folder / NAME)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "it was asked for"
            url = json.loads(server.stdout.readline())["url"]
            address, _, key = url.partition("?key=")
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=address, headers=headers, timeout=WAIT_S) as client:
                client.get("api/runs").raise_for_status()
                figures = asked_of(client, folder, psutil.Process(server.pid))
        finally:
            server.terminate()
            server.wait(timeout=10)
    return {**figures, "memory_mb": peak_mb(resource.RUSAGE_CHILDREN)}


def asked_of(client: httpx.Client, folder: Path, server: psutil.Process) -> dict[str, float]:
    """What each request takes, the first of them with all the reading."""
    of_run = f"api/runs/{NAME}"

    def seconds(*paths: str) -> float:
        began = time.perf_counter()
        for path in paths:
            client.get(path).raise_for_status()
        return time.perf_counter() - began

    names = [[("name", name) for name in chart] for chart in CHARTS]
    charts = [f"{of_run}/columns?{urlencode(chart)}" for chart in names]
    figures = {"list_s": seconds("api/runs")}
    before = sum(server.cpu_times()[:2])
    figures["read_s"] = seconds(f"{of_run}/names")
    figures["read_cpu_s"] = sum(server.cpu_times()[:2]) - before
    figures["again_s"] = seconds(*charts)
    figures["open_s"] = figures["read_s"] + figures["again_s"]
    figures["summary_s"] = seconds(f"{of_run}/summary")
    figures["narrow_s"] = seconds(f"{charts[0]}&first=5000&last=5100")
    figures["samples_s"] = seconds(f"{of_run}/samples?step=7")
    figures["search_s"] = seconds(f"{of_run}/find-samples?q=no+such+text")
    figures["live_s"] = told_after(client, of_run, folder)
    return figures


def told_after(client: httpx.Client, of_run: str, folder: Path) -> float:
    """Seconds from writing a step to being told of it."""
    events = folder / NAME / "events.jsonl"
    with client.stream("GET", f"{of_run}/live", timeout=WAIT_S) as stream:
        lines = stream.iter_lines()
        known = next(json.loads(line[6:]) for line in lines if '"step":' in line)
        step = known["step"] + 1
        with events.open("a", encoding="utf-8") as file:
            file.write(line_of(step_done(step, num_steps=step, rng=random.Random(step)), step))
        began = time.perf_counter()
        mark = f'"step":{step},'
        next(line for line in lines if mark in line)
        return time.perf_counter() - began


def peak_mb(who: int) -> float:
    """Of a process or of one that has ended."""
    return round(resource.getrusage(who).ru_maxrss / 1024, 1)


def write(folder: Path, *, num_steps: int) -> None:
    """The run, where it is not there yet: events, samples, TensorBoard's files."""
    run = folder / NAME
    if (run / "recipe.yaml").exists():
        print(f"taking the run of {run}", flush=True)
        return
    from torch.utils.tensorboard import SummaryWriter

    from milescli.core.scalars import scalars_of

    (run / "rollouts").mkdir(parents=True)
    writer = SummaryWriter(str(run / "tensorboard"))
    began, rng = time.perf_counter(), random.Random(0)
    with (run / "events.jsonl").open("w", encoding="utf-8") as file:
        for event, step in events_of(num_steps, rng):
            file.write(line_of(event, step))
            if isinstance(event, StepDone):
                told = scalars_of(event)
                for name, value in (told[1] if told else {}).items():
                    writer.add_scalar(name, value, step)
                samples = "\n".join(json.dumps(one) for one in samples_of(step, rng))
                (run / "rollouts" / f"step_{step}.jsonl").write_text(samples + "\n")
    writer.close()
    (run / "recipe.yaml").write_text("name: big  # bench/big_run.py\n")
    size = (run / "events.jsonl").stat().st_size
    print(
        f"wrote {num_steps} steps, {num_steps * SAMPLES} samples, events.jsonl of "
        f"{size / 1e6:.1f} MB in {time.perf_counter() - began:.0f} s",
        flush=True,
    )


def events_of(num_steps: int, rng: random.Random) -> Iterator[tuple[Event, int]]:
    """In their order, with the steps that were done before."""
    yield PhaseStarted(phase="start", detail="8 trainer ranks, 4 engines"), 0
    yield PhaseStarted(phase="train", detail=f"steps 1 to {num_steps}"), 0
    for step in range(1, num_steps + 1):
        yield step_done(step, num_steps=num_steps, rng=rng), step
        if step % EVAL_EVERY == 0:
            yield evaluation(step, rng), step


def step_done(step: int, *, num_steps: int, rng: random.Random) -> StepDone:
    """With as many figures as a run with several rewards and an agent tells."""

    def noisy(mean: float) -> float:
        return mean * (1 + 0.1 * rng.gauss(0, 1))

    figures = {name: noisy(0.1) for name in FIGURES}
    rollout = RolloutStats(
        num_groups=32,
        num_samples=256,
        reward_mean=noisy(0.5),
        reward_std=noisy(0.3),
        zero_variance_fraction=noisy(0.2),
        truncated_fraction=noisy(0.05),
        response_tokens_mean=noisy(900.0),
        response_tokens_max=4096,
        prompt_tokens_mean=noisy(120.0),
        staleness_mean=noisy(1.0),
        staleness_max=2,
        dropped_groups=3,
        generated_tokens=230_000,
        reward_parts={f"part_{number}": noisy(0.5) for number in range(8)},
        figures={f"figure_{number}": noisy(2.0) for number in range(12)},
    )
    return StepDone(
        step=step,
        num_steps=num_steps,
        report=StepReport(
            loss=noisy(0.01),
            grad_norm=noisy(0.5),
            lr=1e-6,
            logprob_diff_mean=noisy(0.002),
            logprob_diff_max=noisy(0.2),
            logprob_diff_tokens=230_000,
            num_tokens=260_000,
            num_loss_tokens=230_000,
            num_microbatches=16,
            forward_backward_s=noisy(3.0),
            optimizer_s=noisy(0.2),
            figures=figures,
        ),
        rollout=rollout,
        seconds=PhaseSeconds(
            rollout_s=noisy(4.0),
            pack_s=noisy(0.1),
            train_s=noisy(3.2),
            publish_s=noisy(0.5),
            save_s=0.0,
            step_s=STEP_S,
        ),
        version=step,
        rollout_tokens_per_s=noisy(57_000.0),
        train_tokens_per_s=noisy(80_000.0),
    )


def evaluation(step: int, rng: random.Random) -> EvalDone:
    """On held-out prompts."""
    return EvalDone(
        step=step,
        accuracy=rng.random(),
        num_prompts=500,
        truncated_fraction=0.02,
        response_tokens_mean=880.0,
        seconds=30.0,
        path=f"eval/step_{step}.jsonl",
    )


def line_of(event: Event, step: int) -> str:
    """Of events.jsonl."""
    return json.dumps({"time": format_time(BEGAN_S + step * STEP_S), **to_record(event)}) + "\n"


def samples_of(step: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """As a run keeps them, token by token."""
    for number in range(SAMPLES):
        words = [rng.choice(WORDS) for _ in range(TOKENS)]
        text = "".join(words)
        yield {
            "prompt": f"What is {step} plus {number // 5}?",
            "response": text,
            "reward": float(rng.random() > 0.5),
            "stop_reason": "stop",
            "versions": [step],
            "seed": rng.getrandbits(31),
            "prompt_index": step * 2 + number // 5,
            "response_ids": [rng.randrange(150_000) for _ in range(TOKENS)],
            "lines": [
                {
                    "text": text,
                    "lengths": [len(word) for word in words],
                    "mask": [0, TOKENS],
                    "logprobs": [round(-rng.random(), 4) for _ in range(TOKENS)],
                    "versions": [[0, TOKENS, step]],
                }
            ],
        }


WORDS = (
    " the",
    " sum",
    " of",
    " first",
    " we",
    " add",
    " then",
    " 12",
    " carry",
    ".\n",
    " so",
    "=",
)
SIDES: dict[str, Callable[[Path], Figures]] = {"miles": of_miles, "tensorboard": of_tensorboard}

if __name__ == "__main__":
    main()
