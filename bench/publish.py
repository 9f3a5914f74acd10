"""How new weights reach real engines on this machine, in pieces beside whole tensors:

    python bench/publish.py [--quick] [--layout tp2] [--channel distributed] [--publishes 5]

Two trainer ranks (one, with layout `one`) and one engine of two ranks; a model with random weights.
`pieces`: each rank sends what it holds, and each engine rank takes its own cut. `whole`: every rank
gathers the model, and each engine rank is given all of it, as a format of one's own still does.
Prints the median seconds of a publish, the bytes that the ranks send, those that the plan predicts
(pieces alone), and by how much a rank's memory peaks above what it has before a publish (the larger
of the two).
--quick: a model of a few thousand weights, to try the benchmark itself. `--channel rdma` needs
Mooncake, and MC_FORCE_TCP=1 where there is no RDMA device; `--channel store` is a folder, or the
URL in MILES_BENCH_STORE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from own_run import open_run
from sides import ORDER_TIMEOUT_S, SideDied, exit_on_term, side_environment

from milescli.core.plug_points import CHANNELS
from milescli.core.types import WeightVersion
from milescli.core.units import MIB
from milescli.models.scratch import make_model
from milescli.plan.choices import WEIGHT_BYTES
from milescli.plan.memory import memory_of
from milescli.plan.transport import PIECE_LOCATIONS, transfer
from milescli.recipe.model import ScratchModel
from milescli.runtime.recovery.engines import Engines

LAYOUTS = {
    "one": {"dp": 1},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
}
WAYS = {"pieces": "hf", "whole": "milescli.weights.formats:hf"}
"""Name -> weights.format; one that is named by its path is any plug-in's, and sent whole."""


def shape_of(layout: str, *, is_quick: bool) -> ScratchModel:
    """The model: with experts where the layout parts them."""
    size = 1 if is_quick else 8
    experts = {
        "family": "qwen3_moe",
        "num_experts": 8,
        "moe_ffn_hidden_size": 96 * size,
        "topk": 2,
        "tie_embeddings": False,
    }
    return ScratchModel(
        hidden_size=96 * size,
        num_layers=2 if is_quick else 8,
        ffn_hidden_size=256 * size,
        num_heads=8,
        num_kv_heads=4,
        head_dim=12 * size,
        vocab_size=1024 * size,
        **(experts if "ep" in layout else {}),
    )


async def publishes(
    folder: Path, layout: str, channel: str, way: str, *, num: int
) -> tuple[float, int, int, float]:
    """(median seconds, bytes, predicted bytes, MiB of the peak)"""
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"prompts": "task:sums"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "reward": "gsm8k"},
        "parallel": LAYOUTS[layout],
        "engines": {"num": 1, "tp": 2},
        "weights": {"channel": channel, "format": WAYS[way]},
    }
    if channel == "store":
        url = os.environ.get("MILES_BENCH_STORE", (folder / "objects").absolute().as_uri())
        recipe["weights"]["store"] = url
    with open_run(recipe, folder) as (spec, session):
        engines = Engines()
        try:
            await session.resources.take(timeout_s=spec.recipe.machine.start_timeout_s)
            trainer = await session.builder.start_trainer(with_teachers=False)
            fleet = await session.builder.start_engines(engines)
            await trainer.connect_engines(session.builder.engine_addresses(engines))
            seconds, peaks, sent = [], [], 0
            for number in range(num + 1):
                await fleet.pause()
                before = [reset_peak_memory(pid) for pid in trainer.pids]
                started = time.perf_counter()
                sent = await trainer.publish(WeightVersion(number + 1))
                seconds.append(time.perf_counter() - started)
                peaks.append(
                    max(peak(pid) - at for pid, at in zip(trainer.pids, before, strict=True))
                )
                await fleet.resume(WeightVersion(number + 1))
            # the first one plans, and asks the engines what they take
            predicted = transfer(
                memory_of(spec.recipe, spec.inputs.facts),
                spec.plan.trainer,
                spec.plan.engines,
                size=WEIGHT_BYTES[spec.plan.precision],
                shared=channel in PIECE_LOCATIONS,
                passed_on=channel != "store",
            ).sent
            return statistics.median(seconds[1:]), sent, predicted, max(peaks[1:]) / MIB
        finally:
            await engines.stop()
            await session.resources.release()


def reset_peak_memory(pid: int) -> int:
    """Let the kernel count the peak of a process anew; the bytes that it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS:")


def peak(pid: int) -> int:
    """Bytes that the process had at most since then."""
    return _status(pid, "VmHWM:")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024


def in_a_process(
    folder: Path, layout: str, channel: str, way: str, *, num: int
) -> tuple[float, int, int, float]:
    """`publishes` in a process of its own: one has one cluster."""
    words = ["--folder", str(folder), "--layout", layout, "--channel", channel, "--way", way]
    done = subprocess.run(
        [sys.executable, __file__, *words, "--publishes", str(num)],
        env=side_environment(),
        capture_output=True,
        text=True,
        timeout=ORDER_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise SideDied(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command line; `--way` is how the benchmark starts itself for one row."""
    exit_on_term()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--channel", choices=CHANNELS.builtin, action="append")
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        (layout,), (channel,) = options.layout, options.channel
        one = publishes(options.folder, layout, channel, options.way, num=options.publishes)
        print(json.dumps(asyncio.run(one)))
        return
    print("layout   channel      way       seconds   MiB sent  predicted   peak MiB")
    for layout in options.layout or LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
            folder = Path(temporary)
            make_model(shape_of(layout, is_quick=options.quick), folder / "model", seed=0)
            for channel in options.channel or ("tensor", "distributed"):
                medians = {}
                for way in WAYS:
                    medians[way], sent, predicted, most = in_a_process(
                        folder, layout, channel, way, num=options.publishes
                    )
                    print(
                        f"{layout:8} {channel:12} {way:8} {medians[way]:8.3f} "
                        f"{sent / MIB:10.2f} "
                        f"{f'{predicted / MIB:.2f}' if way == 'pieces' else '':>10} {most:10.1f}",
                        flush=True,
                    )
                ratio = medians["pieces"] / medians["whole"]
                print(f"{layout:8} {channel:12} ratio    {ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
