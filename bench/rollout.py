"""How fast one SGLang engine samples on this CPU, in the two shapes that matter. Real engine,
router, client; tiny models.

    python bench/rollout.py [--runs 10] [--threads 1] [--shape reference|quickstart]

reference: 4.98M-parameter Qwen3, 64 responses x (16 + 128 tokens), fp32, log-probs, seeds.
quickstart: 0.85M parameters, 256 responses x (24 + 32 tokens). One run is a burst of all responses
at once; one table, one line a run. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.sglang.client import SglangFleet
from milescli.backends.sglang.ports import free_ports
from milescli.backends.sglang.router import RouterServer, RouterSpec
from milescli.backends.sglang.server import EngineServer, EngineSpec
from milescli.core.types import EngineAddress
from milescli.models import load_facts, table
from milescli.models.base import CONFIG_NAME
from milescli.models.scratch import make_model
from milescli.recipe.schema import ScratchModel
from milescli.rollout.base import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One benchmark: the model and the burst."""

    model: ScratchModel
    num_responses: int
    prompt_tokens: int
    response_tokens: int


SHAPES = {
    "reference": Shape(
        model=ScratchModel(
            hidden_size=256, num_layers=6, ffn_hidden_size=768, num_heads=4, num_kv_heads=2,
            head_dim=64, vocab_size=1024,
        ),
        num_responses=64, prompt_tokens=16, response_tokens=128,
    ),
    "quickstart": Shape(
        model=ScratchModel(), num_responses=256, prompt_tokens=24, response_tokens=32
    ),
}  # fmt: skip


def write_model(shape: Shape, folder: Path) -> int:
    """The model with random weights, which never ends a response; returns its number of
    parameters."""
    make_model(shape.model, folder, seed=0)
    for file in (folder / CONFIG_NAME, folder / "generation_config.json"):
        no_end = {"eos_token_id": shape.model.vocab_size + 7}
        file.write_text(json.dumps(json.loads(file.read_text()) | no_end))
    return table(load_facts(folder)).num_parameters


async def burst(fleet: SglangFleet, shape: Shape, *, run: int) -> float:
    """Seconds for all responses of one run."""
    source = random.Random(run)
    requests = [
        GenerateRequest(
            prompt_ids=[
                source.randrange(3, shape.model.vocab_size) for _ in range(shape.prompt_tokens)
            ],
            max_new_tokens=shape.response_tokens,
            seed=run * 10_000 + index,
        )
        for index in range(shape.num_responses)
    ]
    started = time.perf_counter()
    completions = await asyncio.gather(*(fleet.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    assert {len(completion.response_ids) for completion in completions} == {shape.response_tokens}
    return seconds


async def measure(name: str, *, runs: int, threads: int) -> None:
    """Start, one burst to warm up, `runs` bursts, stop; prints as it goes."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        num_parameters = write_model(shape, Path(folder))
        engine_port, router_port, metrics_port = free_ports(3)
        spec = EngineSpec(
            model_dir=Path(folder),
            tokenizer_dir=None,
            device_kind="cpu",
            precision="fp32",
            port=engine_port,
            log_path=Path(folder) / "engine.log",
            context_length=1024,
            cpu_threads=threads,
        )
        engine = EngineServer(spec)
        router = RouterServer(
            RouterSpec(
                worker_urls=(engine.url,),
                port=router_port,
                metrics_port=metrics_port,
                log_path=Path(folder) / "router.log",
            )
        )
        fleet = SglangFleet(
            router_url=router.url,
            engines=[EngineAddress(name=engine.name, url=engine.url, log_path=engine.log_path)],
        )
        try:
            engine.start()
            start_s = engine.wait_ready(180)
            router.start()
            router.wait_ready(60)
            await burst(fleet, shape, run=0)
            speeds = []
            burst_shape = (
                f"{shape.num_responses} x ({shape.prompt_tokens} + {shape.response_tokens}) tokens"
            )
            print(
                f"{name}: {num_parameters / 1e6:.2f}M parameters, {burst_shape}, {threads} "
                "thread(s)"
            )
            print(
                f"engine ready in {start_s:.1f} s; load of the machine before the first run "
                f"{os.getloadavg()[0]:.1f}"
            )
            print(f"{'run':>5} {'seconds':>8} {'tokens/s':>9}")
            for run in range(1, runs + 1):
                seconds = await burst(fleet, shape, run=run)
                speeds.append(shape.num_responses * shape.response_tokens / seconds)
                print(f"{run:>5} {seconds:>8.2f} {speeds[-1]:>9.0f}", flush=True)
            print(
                f"{'min':>5} {'':>8} {min(speeds):>9.0f}\n{'med':>5} {'':>8} "
                f"{statistics.median(speeds):>9.0f}"
            )
        finally:
            await fleet.close()
            router.stop()
            engine.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    options = parser.parse_args()
    for name in options.shape or sorted(SHAPES):
        asyncio.run(measure(name, runs=options.runs, threads=options.threads))


if __name__ == "__main__":
    sys.exit(main())
