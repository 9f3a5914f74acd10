"""How each algorithm learns the quickstart's task:

    python bench/learn.py [--only gspo --only dapo] [--seeds 3] [--folder DIR]

For each seed the quickstart's model is made and warmed up once; each algorithm then takes the
quickstart's RL steps from those weights, with nothing set but `train.algorithm`. Greedy accuracy on
its held-out prompts before and after goes to `templates/algorithms.json`, from which `miles
algorithms` and docs/algorithms.md tell it. Runs that FOLDER holds are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import ROOT, side_environment

from milescli.listings.algorithms import MEASURED_FILE
from milescli.recipe.algorithms import ALGORITHMS
from milescli.recipe.templates import templates_dir

RUN_TIMEOUT_S = 1800.0
"""Bound on one run."""
BAR = 0.9
"""Accuracy that an algorithm should reach on the quickstart's task."""


def miles(*words: str, log: Path) -> None:
    """`miles WORDS` of this checkout. Raises CalledProcessError with the log's name printed."""
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-m", "milescli", *words],
            cwd=ROOT,
            env=side_environment(),
            stdout=output,
            stderr=output,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        print(f"  ended with {done.returncode}: {log}", flush=True)
        done.check_returncode()


def warmed_up(folder: Path, seed: int, *, recipe: str = "quickstart") -> Path:
    """The Hugging Face folder of a recipe's model after its warm-up."""
    of_which = f"{seed}" if recipe == "quickstart" else f"{recipe}-{seed}"
    model = folder / f"model-{of_which}"
    if not (model / "config.json").exists():
        print(f"{recipe}, seed {seed}: warming the model up", flush=True)
        name = f"warm-up-{of_which}"
        log = folder / f"{name}.log"
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)
        own = ["--name", name, "--set", f"run.dir={folder}/runs", "--quiet"]
        miles(
            *("launch", "--recipe", recipe, "--seed", str(seed), "--steps", "1", *own),
            log=log,
        )
        miles("export", f"{folder}/runs/{name}", "--step", "0", "--to", str(model), log=log)
    return model


def learn(folder: Path, algorithm: str, seed: int) -> tuple[float, float, int]:
    """Accuracy before and after, and the steps between."""
    name = f"{algorithm}-{seed}"
    events = folder / "runs" / name / "events.jsonl"
    if not events.exists() or '"outcome": "done"' not in events.read_text(encoding="utf-8"):
        model, began = warmed_up(folder, seed), time.monotonic()
        shutil.rmtree(events.parent, ignore_errors=True)  # of a run that was cut short
        sets = [
            *("model.scratch=null", f"model.path={model}", "warmup.steps=0", "eval.every=0"),
            *("data.demonstrations=null", "checkpoint.every=0", f"run.dir={folder}/runs"),
            f"train.algorithm={algorithm}",
        ]
        words = [word for text in sets for word in ("--set", text)]
        own = ["--recipe", "quickstart", "--seed", str(seed), "--name", name, "--quiet"]
        miles("launch", *own, *words, log=folder / f"{name}.log")
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    rows = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    accuracies = {row["step"]: row["accuracy"] for row in rows if row["event"] == "EvalDone"}
    last = max(accuracies)
    return accuracies[0], accuracies[last], last


def main() -> int:
    """One line an algorithm; 1 where one did not end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(ALGORITHMS), default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep models and runs here")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="miles-learn-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"models and runs in {folder}", flush=True)
    file, failed = templates_dir() / MEASURED_FILE, 0
    for algorithm in options.only or ALGORITHMS:
        try:
            seen = [learn(folder, algorithm, seed) for seed in range(options.seeds)]
        except subprocess.CalledProcessError:
            failed += 1
            continue
        before, after, steps = zip(*seen, strict=True)
        measured = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        measured[algorithm] = {
            "before": list(before),
            "after": list(after),
            "steps": max(steps),
        }
        ordered = {name: measured[name] for name in ALGORITHMS if name in measured}
        file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        mark = "" if min(after) >= BAR else f"   below {BAR:.0%}"
        told = ", ".join(f"{first:.1%} -> {last:.1%}" for first, last, _ in seen)
        print(f"{algorithm:22} {told}{mark}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
