"""How fast miles samples on this CPU beside `transformers.generate`, in turns:

    python bench/rollout.py [--pairs 5] [--shape reference --shape quickstart --shape grouped]

Real engines, as many and with as many threads as the plan for this machine has; tiny models with
random weights, of which no response ends early. One run is a burst of all responses at once. The
peer is one batch in a process of its own, with torch's own number of threads. Both sides read the
same model folder and get the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairs import Machine, Table, command_line, report, take_turns
from sides import Orders, Side, parse_as_side

from milescli.models import load_facts, table
from milescli.models.base import CONFIG_NAME
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One benchmark: the model and the burst."""

    model: ScratchModel
    num_prompts: int
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int

    @property
    def num_responses(self) -> int:
        """Of one burst."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def num_tokens(self) -> int:
        """That one burst generates."""
        return self.num_responses * self.response_tokens

    def prompts(self, run: int) -> list[list[int]]:
        """[num_responses] prompts of run `run`, on both sides; those of a group are neighbours."""
        source = random.Random(run)
        prompts = [
            [source.randrange(3, self.model.vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_prompts)
        ]
        return [prompt for prompt in prompts for _ in range(self.samples_per_prompt)]


_REFERENCE = ScratchModel(
    hidden_size=256, num_layers=6, ffn_hidden_size=768, num_heads=4, num_kv_heads=2,
    head_dim=64, vocab_size=1024,
)  # fmt: skip
SHAPES = {
    "reference": Shape(
        model=_REFERENCE, num_prompts=64, samples_per_prompt=1, prompt_tokens=16,
        response_tokens=128,
    ),
    "quickstart": Shape(
        model=ScratchModel(), num_prompts=256, samples_per_prompt=1, prompt_tokens=24,
        response_tokens=32,
    ),
    "grouped": Shape(
        model=ScratchModel(), num_prompts=32, samples_per_prompt=8, prompt_tokens=24,
        response_tokens=32,
    ),
    "tiny": Shape(
        model=ScratchModel(hidden_size=64, num_layers=1, ffn_hidden_size=64), num_prompts=2,
        samples_per_prompt=2, prompt_tokens=4, response_tokens=4,
    ),
}  # fmt: skip
"""tiny: to try the benchmark itself."""
MEASURED = ("reference", "quickstart", "grouped")


def write_model(shape: Shape, folder: Path) -> int:
    """The model with random weights, which never ends a response; returns its number of
    parameters."""
    make_model(shape.model, folder, seed=0)
    for file in (folder / CONFIG_NAME, folder / "generation_config.json"):
        no_end = {"eos_token_id": shape.model.vocab_size + 7}
        file.write_text(json.dumps(json.loads(file.read_text()) | no_end))
    return table(load_facts(folder)).num_parameters


async def serve_miles(options: argparse.Namespace) -> None:
    """The side of miles: engines of a run that is never trained."""
    shape, folder = SHAPES[options.shape[0]], options.folder
    from own_run import open_run

    from milescli.rollout.base import GenerateRequest
    from milescli.runtime.recovery.engines import Engines

    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"prompts": "task:sums"},
        "rollout": {
            "prompts_per_step": max(1, shape.num_responses // 8),
            "samples_per_prompt": min(8, shape.num_responses),
            "max_response_tokens": shape.response_tokens,
            "reward": "gsm8k",
        },
    }
    with open_run(recipe, folder) as (spec, session):
        engines = Engines()

        async def burst(order: dict[str, Any]) -> dict[str, Any]:
            run = order["run"]
            requests = [
                GenerateRequest(
                    prompt_ids=prompt,
                    max_new_tokens=shape.response_tokens,
                    seed=run * 10_000 + index,
                )
                for index, prompt in enumerate(shape.prompts(run))
            ]
            started = time.perf_counter()
            done = await asyncio.gather(*(fleet.generate(request) for request in requests))
            seconds = time.perf_counter() - started
            return {"seconds": seconds, "lengths": sorted({len(c.response_ids) for c in done})}

        try:
            await session.resources.take(timeout_s=spec.recipe.machine.start_timeout_s)
            fleet = await session.builder.start_engines(engines)
            threads = f"{len(engines.heads)} x {engines.heads[0].cpu_threads}"
            await Orders().obey(burst, about=f"engines x threads: {threads}")
        finally:
            await engines.stop()
            await session.resources.release()


async def serve_peer(options: argparse.Namespace) -> None:
    """The side of transformers."""
    shape, folder = SHAPES[options.shape[0]], options.folder
    orders = Orders()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()

    async def burst(order: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(order["run"])
        started = time.perf_counter()
        prompts = torch.tensor(shape.prompts(order["run"]))
        with torch.inference_mode():
            tokens = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=shape.response_tokens,
                pad_token_id=0,
            )
        responses = tokens[:, shape.prompt_tokens :].tolist()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "lengths": sorted({len(ids) for ids in responses})}

    await orders.obey(burst, about=f"threads: {torch.get_num_threads()}")


def measure(name: str, result: Table, *, num_pairs: int) -> None:
    """Start both sides, run the pairs, stop both; adds a row."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder = Path(temporary)
        millions = write_model(shape, folder / "model") / 1e6

        def start(side: str) -> Side:
            command = [sys.executable, __file__, "--side", side, "--shape", name]
            return Side(side, [*command, "--folder", str(folder)], log=folder / f"{side}.log")

        def run(side: Side, number: int) -> dict[str, float]:
            reply = side.ask({"run": number})
            assert reply["lengths"] == [shape.response_tokens], (side.name, reply)
            return {"tokens/s": shape.num_tokens / reply["seconds"]}

        print(f"{name}: starting both sides", flush=True)
        with start("miles") as miles, start("peer") as peer:
            setting = f"{name}: miles {miles.ready()['about']}; peer {peer.ready()['about']}"
            print(setting, flush=True)
            pairs = take_turns(
                lambda number: run(miles, number),
                lambda number: run(peer, number),
                num_pairs=num_pairs,
            )
    count = f"{shape.num_prompts}" + f" x {shape.samples_per_prompt}" * (
        shape.samples_per_prompt > 1
    )
    size = f"{count} x ({shape.prompt_tokens}+{shape.response_tokens})"
    result.add(
        pairs,
        name="tokens/s",
        what=f"{name}, {millions:.1f} M, {size}",
        unit="tokens/s",
        better="more",
    )
    result.notes.append(setting)


def main() -> None:
    """The command line; `--side` is how the benchmark starts its own sides."""
    parser = command_line(__doc__, num_pairs=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    options = parse_as_side(parser, miles=serve_miles, peer=serve_peer)
    if options is None:
        return
    result = Table(
        peer="transformers.generate, one batch, fp32, sdpa, inference_mode", machine=Machine.read()
    )
    for name in options.shape or MEASURED:
        measure(name, result, num_pairs=options.pairs)
    result.notes.append(
        "miles also returns the log-prob of each token and keeps the seed of each response; the "
        "peer does neither"
    )
    report(result, options)


if __name__ == "__main__":
    main()
