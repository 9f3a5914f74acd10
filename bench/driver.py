"""What a sample costs the driver where other processes collect, with engines that are not there:

    python bench/driver.py [--engines 1024] [--samples 16384] [--tokens 1024] [--steps 3]

Each collecting process has a stand-in for its engines, which answers at once, by the seed; all
else is what a run does: prompts are drawn and ordered, samples scored, groups filtered, a batch
laid out, and its sequences cut for two ranks. HTTP, a trainer and the journal are left out. One
process for each 256 engines, as the plan has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import psutil

from milescli.backends.ray.actor import ActorHandle
from milescli.backends.ray.cluster import Cluster
from milescli.core.events import EventBus
from milescli.core.imports import Origin, run_gc_rarely
from milescli.core.types import EngineAddress, Prompt, StopReason, VersionSpan, WeightVersion
from milescli.data.file_prompts import FilePrompts
from milescli.plan.collectors import ENGINES_PER_COLLECTOR
from milescli.plan.make import make_plan
from milescli.platform.probe import probe
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.collect.collector import Collector
from milescli.runtime.collecting.collectors import Collectors
from milescli.runtime.collecting.process import CollectorProcess
from milescli.runtime.collecting.share import Share
from milescli.runtime.inputs.model_facts import facts_of_recipe
from milescli.runtime.recovery.restarts import Repairs, Restarts
from milescli.train.objectives import load_objective
from milescli.train.objectives.policy import Policy

NOTHING: dict[str, Any] = {
    "policies": {},
    "version": WeightVersion(0),
    "is_paused": False,
    "with_greedy": False,
    "journal": None,
}
"""Of what a run may have, and this has not."""
NOBODY = EngineAddress(url="http://127.0.0.1:9", name="engine 0")


class Digits:
    """Stands for a tokenizer: a response is the number of its tokens, up to 7."""

    def decode(self, ids: list[int]) -> str:
        """Return a digit."""
        return str(len(ids) % 7)


class StandIn:
    """Answers with as many tokens as the seed says, at once."""

    def __init__(self, longest: int) -> None:
        self._ids = list(range(longest))
        self._logprobs = array("f", [-1.0]) * longest

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return half of the longest response to all of it."""
        await asyncio.sleep(0)
        longest = len(self._ids)
        size = longest // 2 + (request.seed or 0) % (longest // 2)
        return Completion(
            response_ids=self._ids[:size],
            logprobs=self._logprobs[:size],
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=size, version=WeightVersion(0))],
        )


class StandInProcess(CollectorProcess):
    """Collects from engines that are not there."""

    def __init__(self, *, longest: int, **others: Any) -> None:
        self._stand_in = StandIn(longest)
        super().__init__(**others)

    @property
    def engine(self) -> Any:
        """The stand-in."""
        return self._stand_in


class Fleet:
    """Stands for the client of the engines in the driver."""

    followers = None
    is_paused = False
    closed = frozenset[str]()
    version = WeightVersion(0)
    engines = (NOBODY,)


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of these processes."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(
    recipe: Recipe, cluster: Cluster, *, count: int, steps: int, longest: int
) -> None:
    """Take some steps, and print what each sample of them cost."""
    pids = list[int]()

    arguments = {
        "recipe": recipe,
        "share": Share(count=count, on_node=count, other_nodes=()),
        "origin": Origin.here(),
        "cluster": cluster,
        "tokenizer": Digits(),
        "vocab_size": longest,
        "longest": longest,
        **NOTHING,
    }

    async def start(number: int, engines: list[EngineAddress]) -> ActorHandle:
        handle = await cluster.spawn(
            f"collector {number}",
            "driver:StandInProcess",
            node=0,
            num_cpus=0.0,
            kwargs={**arguments, "name": str(number), "fleet": {"engines": engines}},
            environment={},
        )
        pids.append(await handle.start(timeout_s=300.0))
        return handle

    collectors = Collectors(
        start,
        cluster.kill,
        count=count,
        recipe=recipe,
        fleet=Fleet(),  # type: ignore[arg-type]
        journal=None,
        repairs=Repairs(bus=EventBus(), restarts=Restarts(limits=recipe.fault)),
        warn=print,
    )
    await collectors.open()
    number = recipe.rollout.prompts_per_step
    prompts = [
        Prompt(index=index, token_ids=[1] * 16, text="", label=str(index % 7))
        for index in range(steps * number)
    ]
    run_gc_rarely()
    collector = Collector(
        FilePrompts(prompts, seed=0, shuffle=False),
        None,  # type: ignore[arg-type]
        recipe=recipe,
        group_sampler=collectors,
    )
    policy = load_objective("policy", recipe)
    assert isinstance(policy, Policy)
    samples = number * recipe.rollout.samples_per_prompt
    for step in range(1, steps + 1):
        began, cpu, others = time.perf_counter(), time.process_time(), cpu_of(pids)
        groups = await collector.take(step, version=WeightVersion(0))
        taken = time.process_time()
        batch = await collectors.batch(
            groups, policy, objective="policy", dp=2, max_tokens_per_microbatch=16 * longest
        )
        collectors.release(groups, before=collector.position)
        packed, wall = time.process_time(), time.perf_counter() - began
        memory = psutil.Process().memory_info().rss / 2**20
        own, pack = 1e6 * (taken - cpu) / samples, 1e6 * (packed - taken) / samples
        size = sum(shard.size_bytes for shard in batch.shards) / 2**20
        print(
            f"step {step}: {samples} samples, {size:.0f} MiB of sequences, in {wall:.1f} s; driver "
            f"{own:.1f} us a sample to take, {pack:.1f} to pack, RSS {memory:.0f} MiB; {count} "
            f"collectors {1e6 * (cpu_of(pids) - others) / samples:.0f} us, the largest "
            f"{max(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20:.0f} MiB",
            flush=True,
        )
        del groups, batch
    await collectors.close()


def main() -> None:
    """Parse, start Ray, measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1024, help="of the longest response")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    sets = [
        f"rollout.prompts_per_step={options.samples // 8}",
        f"rollout.max_response_tokens={options.tokens}",
        f"model.scratch.max_position_embeddings={options.tokens + 512}",
        "machine.gpus=0",
    ]
    here = Path.home()
    recipe = load("quickstart", sets=sets, environ={}, cwd=here, home=here).recipe
    plan = make_plan(recipe, probe(), facts_of_recipe(recipe.model))
    own = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([own, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="mb") as folder:
        cluster = Cluster(address=None, temp_dir=Path(folder), environment={})
        cluster.start(plan)
        try:
            asyncio.run(_measured(recipe, cluster, plan, options))
        finally:
            cluster.stop()


async def _measured(recipe: Recipe, cluster: Cluster, plan: Any, options: Any) -> None:
    await cluster.place(plan, timeout_s=120.0)
    count = -(-options.engines // ENGINES_PER_COLLECTOR)
    await measure(recipe, cluster, count=count, steps=options.steps, longest=options.tokens)


if __name__ == "__main__":
    import driver  # as the processes import it, whose arguments have its classes

    driver.main()
