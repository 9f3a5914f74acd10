"""What a report of a run costs, beside what a user would write instead: the same figures of
metrics.jsonl by matplotlib (SVG, one file) and by plotly (one HTML file that needs no network, as
`miles report` does).

    python bench/report.py RUN [--peers PYTHON] [--rounds 3]

`--peers`: a Python that has matplotlib and plotly (`pip install matplotlib plotly`); this one where
none is named. Each side is a process of its own, start included; they take turns. Prints seconds,
kB, and the ratios of their medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

FIGURES = (
    "rollout/reward_mean",
    "train/entropy",
    "rollout/zero_variance_fraction",
    "rollout/response_tokens_mean",
    "rollout/response_tokens_max",
    "train/logprob_diff_mean",
    "train/grad_norm",
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "speed/rollout_tokens_per_s",
    "speed/train_tokens_per_s",
)
"""What the report draws of each step of a run of reinforcement learning."""
READ = """
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
def column(name):
    return [row["step"] for row in rows], [row.get(name) for row in rows]
"""
MATPLOTLIB = """
import matplotlib
matplotlib.use("svg")
import matplotlib.pyplot as plt
figure, places = plt.subplots(4, 3, figsize=(15, 14))
for place, name in zip(places.flat, names):
    place.plot(*column(name)); place.set_title(name)
figure.tight_layout(); figure.savefig(sys.argv[2])
"""
PLOTLY = """
import plotly.graph_objects as go
from plotly.subplots import make_subplots
figure = make_subplots(rows=4, cols=3, subplot_titles=names)
for place, name in enumerate(names):
    x, y = column(name)
    figure.add_trace(go.Scatter(x=x, y=y, name=name), row=place // 3 + 1, col=place % 3 + 1)
figure.write_html(sys.argv[2], include_plotlyjs=True)
"""


def sides(run: Path, peers: str, folder: Path) -> dict[str, tuple[list[str], Path]]:
    """Name -> (command, the file that it makes)."""
    metrics, names = str(run / "metrics.jsonl"), f"names = {FIGURES!r}\n"
    miles = str(Path(sys.executable).with_name("miles"))
    html, svg, plotly = folder / "miles.html", folder / "matplotlib.svg", folder / "plotly.html"
    return {
        "miles report": ([miles, "report", str(run), "--to", str(html)], html),
        "matplotlib": ([peers, "-c", READ + names + MATPLOTLIB, metrics, str(svg)], svg),
        "plotly": ([peers, "-c", READ + names + PLOTLY, metrics, str(plotly)], plotly),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = sides(wanted.run, wanted.peers, Path(folder))
        seconds = {name: list[float]() for name in every}
        for number in range(wanted.rounds + 1):
            for name in every if number % 2 else reversed(every):
                command, _ = every[name]
                began = time.perf_counter()
                subprocess.run(command, check=True, timeout=300, capture_output=True)
                if number:  # the first round warms the disk's cache
                    seconds[name].append(time.perf_counter() - began)
        sizes = {name: file.stat().st_size for name, (_, file) in every.items()}
    print(f"{'':14}{'seconds (least to most)':>26}{'kB':>9}{'seconds, ratio':>16}{'kB, ratio':>11}")
    ours, our_size = median(seconds["miles report"]), sizes["miles report"]
    for name, taken in seconds.items():
        spread = f"{median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})"
        print(
            f"{name:14}{spread:>26}{sizes[name] / 1000:9.0f}{ours / median(taken):16.2f}"
            f"{our_size / sizes[name]:11.3f}"
        )


if __name__ == "__main__":
    main()
