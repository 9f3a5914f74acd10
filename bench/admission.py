"""What it gains to hold requests back until an engine can run them, instead of sending all at once,
in turns and with the same seeds:

    python bench/admission.py [--rounds 5] [--slots 8] [--requests 128] [--cache 8192]

Two engines of this machine, a model with random weights whose responses never end by themselves,
and lengths that are log-normal. A round is a burst of all requests. Prints seconds, the share of
the seconds in which one engine had nothing to do, and how often a full KV cache made an engine
compute a response again. Tokens must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from own_run import open_run
from rollout import SHAPES, write_model
from sides import exit_on_term

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.types import EngineAddress, WeightVersion
from milescli.rollout.base import GenerateRequest
from milescli.runtime.recovery.engines import Engines

LONGEST = 400


def requests(count: int) -> list[GenerateRequest]:
    """The burst: prompts of 16 tokens, 4 to `LONGEST` tokens of response, median 80."""
    draw = random.Random(0)
    return [
        GenerateRequest(
            prompt_ids=[draw.randrange(3, 300) for _ in range(16)],
            max_new_tokens=max(4, min(LONGEST, round(80 * draw.lognormvariate(0.0, 1.0)))),
            seed=index,
        )
        for index in range(count)
    ]


async def burst(
    engines: list[EngineAddress], options: argparse.Namespace, *, slots: int | None
) -> tuple[float, float, int, list[list[int]]]:
    """(seconds, share with an idle engine, responses computed again, tokens)"""
    fleet = SglangFleet(engines=engines, max_running=slots)
    last = dict[str, float]()

    async def one(request: GenerateRequest) -> list[int]:
        done = await fleet.generate(request)
        now = time.perf_counter()
        for engine in engines:
            if fleet.num_waiting(engine.url):
                last[engine.url] = now
        return list(done.response_ids)

    began = time.perf_counter()
    tokens = await asyncio.gather(*(one(request) for request in requests(options.requests)))
    seconds = time.perf_counter() - began
    stats = await fleet.pause()
    await fleet.resume(WeightVersion(0))
    await fleet.close()
    idle = (began + seconds - min(last.values())) / seconds
    return seconds, idle, stats.retractions, tokens


async def rounds(folder: Path, options: argparse.Namespace) -> None:
    """Start the engines, and print a line for each round."""
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"prompts": "task:sums"},
        "rollout": {"max_response_tokens": LONGEST, "reward": "gsm8k"},
        "engines": {
            "num": 2,
            "max_running_requests": options.slots,
            "max_total_tokens": options.cache,
        },
    }
    with open_run(recipe, folder) as (spec, session):
        engines, found = Engines(), list[tuple[float, float]]()
        try:
            await session.resources.take(timeout_s=spec.recipe.machine.start_timeout_s)
            fleet = await session.builder.start_engines(engines)
            addresses = list(fleet.engines)
            for number in range(options.rounds + 1):
                all_at_once = await burst(addresses, options, slots=None)
                held = await burst(addresses, options, slots=options.slots)
                assert held[3] == all_at_once[3], "the tokens differ"
                if number:  # the first warms up
                    found.append((held[0] / all_at_once[0], held[1] - all_at_once[1]))
                    for name, one in (("all at once", all_at_once), ("held back", held)):
                        print(
                            f"{name:12} {one[0]:6.2f} s, an engine idle {one[1]:5.1%}, "
                            f"{one[2]} computed again",
                            flush=True,
                        )
            ratios = [ratio for ratio, _ in found]
            print(
                f"held back / all at once: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        finally:
            await engines.stop()
            await session.resources.release()


def main() -> None:
    """The command line."""
    exit_on_term()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--cache", type=int, default=8192, help="tokens of an engine's KV cache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as temporary:
        folder = Path(temporary)
        write_model(SHAPES["quickstart"], folder / "model")
        asyncio.run(rounds(folder, options))


if __name__ == "__main__":
    main()
