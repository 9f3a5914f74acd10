"""Published figures of asynchronous RL beside the simulator of `miles simulate`:

    python bench/simulate.py [verl] [areal] [marin] [roll] [--json FILE]

For each source: the inputs that it states, those that are guessed, at most two numbers that are
fitted on the rows marked with *, and every other row predicted, with its error. docs/simulate.md
holds what came out. Not validated, since their sources state no inputs: ROLL's 2.24 and 2.72,
marin's 1652.8.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from milescli.simulate.engine import EngineSpeed
from milescli.simulate.lengths import LogNormal
from milescli.simulate.pipeline import Outcome, Settings, Simulation

GOAL = 0.20
SIGMA = 1.0
"""Of the logarithm of a response's tokens: a guess, the same for all sources."""
Predict = Callable[[tuple[float, float], Sequence[str], int], dict[str, float]]
"""(fitted numbers, rows, how many times smaller) -> row -> figure."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one source published, and how it is predicted."""

    title: str
    stated: str
    guessed: str
    names: tuple[str, ...]
    """Of the fitted numbers."""
    start: tuple[float, float]
    published: Mapping[str, float]
    fitted: Sequence[str]
    """Rows on which they are fitted."""
    predict: Predict
    fit_scale: int = 1
    """While numbers are fitted, engines and batch are so many times smaller; the figures that are
    shown are of the full size."""


def fit(source: Source) -> tuple[float, float]:
    """Search the numbers by which the fitted rows come out: steps of a factor, which shrinks."""

    def error(numbers: tuple[float, float]) -> float:
        got = source.predict(numbers, source.fitted, source.fit_scale)
        return sum(math.log(got[row] / source.published[row]) ** 2 for row in source.fitted)

    best, factor = source.start, 1.5
    least = error(best)
    while factor > 1.02 and least > 1e-5:
        moves = [
            (best[0] * factor**i, best[1] * factor**j)
            for i, j in itertools.product((-1, 0, 1), repeat=2)
            if (i or j) and (j == 0 or len(source.names) > 1)
        ]
        tried = min((error(one), one) for one in moves)
        if tried[0] < least:
            least, best = tried
        else:
            factor = math.sqrt(factor)
    return best


def outcome(settings: Settings, lengths: LogNormal, *, steps: int) -> Outcome:
    """Simulate."""
    return Simulation(settings, lengths, steps).run()


def verl() -> Source:
    """docs/advance/fully_async.md of verl."""
    updates = {"0": 98.77, "0.1": 109.12, "0.3": 103.22, "0.5": 113.16}
    small = {"32:32": (32, 156.98), "16:16": (16, 313.81)}
    bandwidth = 4.0e12 * 0.70
    speed = EngineSpeed(
        step_s=15.2e9 / bandwidth + 2e-3,
        context_s=57_344 / bandwidth,
        prefill_s=15.2e9 / (148e12 * 0.45),
    )

    def predict(numbers: tuple[float, float], rows: Sequence[str], scale: int) -> dict[str, float]:
        lengths = LogNormal(mean=numbers[0], sigma=numbers[1], longest=28_672)
        tokens = 8192 // scale * (lengths.mean + 300)
        base = Settings(
            num_engines=64 // scale,
            speed=speed,
            train_token_s=0.0,
            publish_s=4.0,
            prompts_per_step=512 // scale,
            samples_per_prompt=16,
            prompt_tokens=300,
            order="done",
            stale_groups="keep",
            parts=4,
        )
        got = {}
        for row in rows:
            if row == "colocated, rollout":
                own = replace(base, num_engines=128 // scale, publish_s=0.0, parts=1)
                got[row] = outcome(own, lengths, steps=4).step_s
                continue
            engines, train_s = small.get(row, (64, updates.get(row, 0.0)))
            own = replace(
                base,
                num_engines=engines // scale,
                train_token_s=train_s / tokens,
                staleness=float(row) if row in updates else 0.5,
            )
            got[row] = outcome(own, lengths, steps=8).step_s
        return got

    return Source(
        title="verl, fully asynchronous, Qwen2.5-Math-7B on 128 H20, seconds of a step",
        stated="512 prompts x 16, at most 28k tokens, engines:trainer, 4 updates a publish, "
        "partial rollout, seconds of each row's updates; H20: 4.0 TB/s, 148 TFLOP/s",
        guessed="one engine a device; 70 % of the bandwidth, 45 % of the FLOP/s, 2 ms a decode "
        "step; prompts of 300 tokens; 4 s a publish",
        names=("mean tokens of a response", "sigma of their logarithm"),
        start=(3000, SIGMA),
        published={
            "0": 231.34,
            "0.1": 171.30,
            "0.3": 146.11,
            "0.5": 150.63,
            "32:32": 189.26,
            "16:16": 294.77,
            "colocated, rollout": 177.85,
        },
        fitted=("0", "0.3"),
        predict=predict,
    )


def areal() -> Source:
    """arXiv 2505.24298, figure 5c and table 1."""
    tokens = 41.0 * 3600 / 250 * 128.7e3
    lengths = LogNormal(mean=tokens / 8192, sigma=SIGMA, longest=27_648)

    def predict(numbers: tuple[float, float], rows: Sequence[str], scale: int) -> dict[str, float]:
        got = {}
        for row in rows:
            eta = 20 if row == "unbounded" else int(row)
            settings = Settings(
                num_engines=96 // scale,
                speed=EngineSpeed(step_s=numbers[0], context_s=28_672 / (3.35e12 * 0.70)),
                train_token_s=numbers[1] / (8192 // scale * lengths.mean),
                publish_s=0.0,
                prompts_per_step=512 // scale,
                samples_per_prompt=16,
                prompt_tokens=0,
                staleness=eta,
                order="done",
                stale_groups="keep",
                max_open=96 // scale * 256,
            )
            steps = 6 + round(1.5 * eta)
            got[row] = outcome(settings, lengths, steps=steps).tokens_per_s * scale / 1e3
        return got

    return Source(
        title="AReaL, 1.5B on 128 H800, thousand tokens a second by eta",
        stated="512 prompts x 16, at most 27,648 tokens, 3:1 engines to trainer, interruptible; "
        "41.0 h / 250 steps at 128.7k tokens/s are 76 M tokens a step, so 9.3k a sample",
        guessed=f"sigma {SIGMA:g}; one engine a device, 256 requests each; no time to publish",
        names=("seconds of a decode step", "seconds of training a step"),
        start=(0.008, 190),
        published={
            "0": 128.7,
            "1": 269.3,
            "4": 356.6,
            "8": 371.7,
            "16": 382.4,
            "unbounded": 396.8,
        },
        fitted=("0", "unbounded"),
        predict=predict,
        fit_scale=8,
    )


def marin() -> Source:
    """marin#8955: 100 updates."""
    lengths = LogNormal(mean=1100, sigma=SIGMA, longest=4096)

    def predict(numbers: tuple[float, float], rows: Sequence[str], scale: int) -> dict[str, float]:
        got = {}
        for row in rows:
            settings = Settings(
                num_engines=8,
                speed=EngineSpeed(step_s=numbers[0]),
                train_token_s=numbers[1] / (128 * lengths.mean),
                publish_s=3.0,
                prompts_per_step=32,
                samples_per_prompt=4,
                prompt_tokens=0,
                staleness=int(row),
            )
            got[row] = 100 * outcome(settings, lengths, steps=60).step_s
        return got

    return Source(
        title="marin #8955, 67B-A2B on 32 + 8 H100, seconds of 100 updates by staleness",
        stated="32 prompts x 4, at most 4,096 tokens, about 1,100 tokens a response (of a run like "
        "it), about 3 s a weight sync",
        guessed=f"sigma {SIGMA:g}; 8 engines; groups in the order of their prompts",
        names=("seconds of a decode step", "seconds of training a step"),
        start=(0.008, 20),
        published={"0": 6235, "1": 4360, "2": 3544, "3": 3142, "4": 2942},
        fitted=("0", "4"),
        predict=predict,
    )


def roll() -> Source:
    """ROLL Flash's study of environments, from summaries of the paper."""

    def predict(numbers: tuple[float, float], rows: Sequence[str], scale: int) -> dict[str, float]:
        turns = max(1, round(numbers[0]))
        waits = np.maximum(np.random.default_rng(0).normal(10, 10, (40, 256, turns)), 0)
        settings = Settings(
            num_engines=1,
            speed=EngineSpeed(step_s=1e-6),
            train_token_s=0.0,
            publish_s=0.0,
            prompts_per_step=256,
            samples_per_prompt=1,
            prompt_tokens=1,
            turns=(turns, 10.0, 10.0),
        )
        lengths = LogNormal(mean=turns, sigma=0.0, longest=turns + 1)
        got = {"all wait for the slowest in each turn": float(waits.max(1).sum(1).mean())}
        if "each by itself" in rows:
            got["each by itself"] = outcome(settings, lengths, steps=12).step_s
        return got

    return Source(
        title="ROLL Flash, environments with a latency of N(10, 10) s, seconds of a step",
        stated="the latency, and that it is the study's largest",
        guessed="256 environments; the model takes no time",
        names=("turns",),
        start=(25, 1),
        published={"all wait for the slowest in each turn": 892, "each by itself": 362},
        fitted=("all wait for the slowest in each turn",),
        predict=predict,
    )


SOURCES = {"verl": verl, "areal": areal, "marin": marin, "roll": roll}


def main(argv: Sequence[str]) -> None:
    """Fit, predict, and print each row beside what was published."""
    file = argv[argv.index("--json") + 1] if "--json" in argv else None
    results: dict[str, object] = {}
    for name in [word for word in argv if word in SOURCES] or SOURCES:
        source = SOURCES[name]()
        numbers = fit(source)
        got = source.predict(numbers, list(source.published), 1)
        print(f"\n{source.title}\n  stated: {source.stated}\n  guessed: {source.guessed}")
        fitted = dict(zip(source.names, numbers, strict=False))
        print("  fitted on *:", ", ".join(f"{key} {value:.4g}" for key, value in fitted.items()))
        rows = {}
        for row, wanted in source.published.items():
            error = got[row] / wanted - 1
            is_fitted = row in source.fitted
            verdict = "fitted" if is_fitted else "met" if abs(error) <= GOAL else "missed"
            rows[row] = {"published": wanted, "simulated": got[row], "verdict": verdict}
            print(
                f"  {row + '*' * is_fitted:40}{wanted:9.1f}{got[row]:9.1f}{error:+8.0%}  {verdict}"
            )
        results[name] = {"fitted": fitted, "rows": rows}
    if file:
        Path(file).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
