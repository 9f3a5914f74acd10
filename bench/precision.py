"""What number formats do to learning:

    python bench/precision.py learn [--recipe quickstart-moe] [--precision mxfp8] [--seed 1]
        [--folder DIR]

Runs a recipe as it is with each `train.precision` and seed, one run at a time, and prints greedy
accuracy on all held-out prompts beside that of fp32 at the same seed. Runs that DIR holds are taken
as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from learn import miles
from sides import exit_on_term

PRECISIONS = ("fp32", "fp8_block", "mxfp8", "int4_qat", "nvfp4")
NUM_HELD_OUT = 256
"""All prompts of `task:sums-heldout`."""


def run(folder: Path, recipe: str, precision: str, seed: int) -> Path:
    """The events of the recipe's run with this precision and seed; it is run where it is not
    there."""
    name = f"{recipe}-{precision}-{seed}"
    events = folder / "runs" / name / "events.jsonl"
    if not events.exists() or '"outcome": "done"' not in events.read_text(encoding="utf-8"):
        began = time.monotonic()
        shutil.rmtree(events.parent, ignore_errors=True)  # of a run that was cut short
        sets = [
            *(f"train.precision={precision}", f"run.dir={folder}/runs", "eval.every=0"),
            *("checkpoint.every=0", f"eval.num_prompts={NUM_HELD_OUT}"),
        ]
        words = [word for text in sets for word in ("--set", text)]
        own = ["--recipe", recipe, "--seed", str(seed), "--name", name, "--quiet"]
        miles("launch", *own, *words, log=folder / f"{name}.log")
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    return events


def accuracies(events: Path) -> tuple[float, float]:
    """Held-out accuracy before the first RL step, and after the last."""
    rows = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    found = {row["step"]: row["accuracy"] for row in rows if row["event"] == "EvalDone"}
    return found[0], found[max(found)]


def learn(options: argparse.Namespace, folder: Path) -> int:
    """One line a recipe and precision. Returns 1 where a run did not end."""
    failed = 0
    seeds = options.seed or range(3)
    for recipe in options.recipe or ("quickstart", "quickstart-moe"):
        plain = dict[int, float]()
        for precision in options.precision or PRECISIONS:
            ends = dict[int, float]()
            for seed in seeds:
                try:
                    _, ends[seed] = accuracies(run(folder, recipe, precision, seed))
                except subprocess.CalledProcessError:
                    failed = 1
            if precision == "fp32":
                plain = ends
            print(f"{recipe:15} {precision:10} {_line(ends, plain)}", flush=True)
    return failed


def _line(ends: dict[int, float], plain: dict[int, float]) -> str:
    """Accuracy of each seed, their mean, and its difference to fp32's over the same seeds."""
    if not ends:
        return "no run ended"
    each = " ".join(f"{accuracy:6.1%}" for accuracy in ends.values())
    text = f"{each}   mean {statistics.mean(ends.values()):.1%}"
    apart = [accuracy - plain[seed] for seed, accuracy in ends.items() if seed in plain]
    if apart and ends is not plain:
        text += f"   beside fp32 {100 * statistics.mean(apart):+.1f} points"
    return text


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["learn"])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--seed", action="append", type=int, help="0, 1 and 2 where none is named")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    options = parser.parse_args()
    exit_on_term()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="miles-precision-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs in {folder}", flush=True)
    return learn(options, folder)


if __name__ == "__main__":
    sys.exit(main())
