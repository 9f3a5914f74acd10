"""Trials of the real parts, each the smallest that proves it: Ray starts, two processes add numbers, an engine answers and takes
weights. Run as `python -m milescli.doctor.trials NAME FOLDER DEVICE` by `trial`; writes findings as JSON lines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

from milescli.core.errors import MilesError
from milescli.core.types import WeightVersion
from milescli.doctor.finding import Finding, fail, ok

Kind = Literal["cuda", "rocm", "cpu"]
WORLD_SIZE = 2
ANSWER_TOKENS = 8
PROMPT_IDS = list(range(10, 26))


def try_ray(folder: Path, kind: Kind) -> list[Finding]:
    """A session on loopback with one bundle and one actor-free placement group."""
    from milescli.backends.ray.cluster import Cluster
    from milescli.plan.types import BatchPlan, EngineLayout, Plan, Slot, TrainerLayout

    batch = BatchPlan(
        prompts_per_step=1,
        samples_per_prompt=1,
        num_samples=1,
        updates_per_step=1,
        max_tokens_per_microbatch=1,
        max_sequence_tokens=2,
    )
    plan = Plan(
        device_kind="cpu",
        collective="gloo",
        precision="fp32",
        trainer=TrainerLayout(),
        engines=EngineLayout(),
        colocated=True,
        channel="tensor",
        slots=[Slot(node=0, device=0)],
        batch=batch,
        cpu_threads=1,
        max_staleness=0,
        steps=1,
        warmup_steps=0,
        old_logprobs="trainer",
    )
    start = time.monotonic()
    cluster = Cluster(address=None, temp_dir=folder, log_dir=folder, environment={})
    cluster.start(plan)
    try:
        asyncio.run(cluster.place(plan, timeout_s=60.0))
    finally:
        cluster.stop()
    return ok("ray", f"a session started, placed a bundle and ended in {time.monotonic() - start:.1f} s")


def try_collective(folder: Path, kind: Kind) -> list[Finding]:
    """An all-reduce between two processes over the backend that runs would use."""
    import torch

    backend = "gloo" if kind == "cpu" else "nccl"
    world_size = WORLD_SIZE if kind == "cpu" else min(WORLD_SIZE, torch.cuda.device_count())
    start = time.monotonic()
    arguments = (world_size, backend, str(folder / "rendezvous"))
    torch.multiprocessing.spawn(add_ranks, args=arguments, nprocs=world_size, join=True)
    name = "rccl" if kind == "rocm" else backend
    return ok("collective", f"{name} added numbers over {world_size} processes in {time.monotonic() - start:.1f} s")


def add_ranks(rank: int, world_size: int, backend: str, rendezvous: str) -> None:
    """One process of `try_collective`."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    value = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(value)
    expected = world_size * (world_size + 1) / 2
    assert bool((value == expected).all()), f"{backend} added to {value[0].item()} instead of {expected}"
    dist.destroy_process_group()


def try_engine(folder: Path, kind: Kind) -> list[Finding]:
    """A tiny model is served, answers twice the same for the same seed, takes new weights and holds them bit for bit."""
    from milescli.backends.sglang.server import EngineServer, EngineSpec
    from milescli.recipe.schema import ScratchModel
    from milescli.runtime.build import free_ports
    from milescli.runtime.scratch import make_model

    model_dir = folder / "model"
    make_model(ScratchModel(num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_hidden_size=64), model_dir, seed=0)
    engine = EngineServer(
        EngineSpec(
            model_dir=model_dir,
            tokenizer_dir=None,
            device_kind=kind,
            precision="fp32" if kind == "cpu" else "bf16",
            port=free_ports(1)[0],
            log_path=folder / "engine.log",
            max_running_requests=4,
            max_total_tokens=4096,
            memory_fraction=0.3,
            context_length=512,
        )
    )
    engine.start()
    try:
        seconds = engine.wait_ready(300.0)
        return asyncio.run(_exercise(engine.spec.url, engine.spec.log_path, model_dir, folder, kind, seconds))
    finally:
        engine.stop()


async def _exercise(url: str, log_path: Path, model_dir: Path, folder: Path, kind: Kind, start_s: float) -> list[Finding]:
    from milescli.backends.sglang.client import SglangFleet
    from milescli.backends.sglang.http import EngineHandle
    from milescli.rollout.base import GenerateRequest

    fleet = SglangFleet(
        router_url=url, engines=[EngineHandle(name="engine 0", url=url, log_path=log_path)], answer_timeout_s=120.0
    )
    try:
        request = GenerateRequest(prompt_ids=PROMPT_IDS, max_new_tokens=ANSWER_TOKENS, seed=7)
        first, second = await fleet.generate(request), await fleet.generate(request)
        if first.response_ids != second.response_ids:
            answered = fail(
                "engine",
                "the engine does not repeat itself",
                why=f"the same seed gave {first.response_ids} and {second.response_ids}",
                fix="report this: a resumed run could not be exact",
            )
        else:
            answered = ok("engine", f"SGLang was ready after {start_s:.0f} s, answered, and repeats itself for equal seeds")
        before = await fleet.score(PROMPT_IDS)
        await fleet.pause()
        await asyncio.to_thread(_send_weights, url, model_dir, folder, kind)
        await fleet.set_version(WeightVersion(1))
        await fleet.resume()
        changed = list(before) != list(await fleet.score(PROMPT_IDS))
    finally:
        await fleet.close()
    if not changed:
        why = "log-probs are the same after all weights were changed"
        return answered + fail("weights", "the engine ignores new weights", why=why, fix="report this with the engine's log")
    return answered + ok("weights", "new weights arrived over the tensor channel, equal bit for bit, and the answers changed")


def _send_weights(url: str, model_dir: Path, folder: Path, kind: Kind) -> None:
    """Every tensor of the model, changed, as one bucket; then the engine compares what it holds with what is sent again."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from milescli.backends.sglang.channels import TensorChannel
    from milescli.weights.base import EngineAddress

    dist.init_process_group("gloo", init_method=f"file://{folder / 'sender'}", rank=0, world_size=1)
    device, dtype = ("cpu", torch.float32) if kind == "cpu" else ("cuda:0", torch.bfloat16)
    bucket = [(name, (1.25 * each).to(device, dtype)) for name, each in load_file(model_dir / "model.safetensors").items()]
    channel = TensorChannel(timeout_s=120.0)
    channel.open([EngineAddress(url=url, tp=1, sharing_ranks=[0])])
    try:
        channel.send(iter([bucket]), WeightVersion(1))
        channel.verify(iter([bucket]))
    finally:
        channel.close()
        dist.destroy_process_group()


TRIALS: dict[str, Callable[[Path, Kind], list[Finding]]] = {"ray": try_ray, "collective": try_collective, "engine": try_engine}


def main(arguments: list[str]) -> None:
    """Run the trial and write its findings; a MilesError is a finding, anything else a traceback in the log."""
    name, folder, kind = arguments
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print belongs into the log
    try:
        found = TRIALS[name](Path(folder), cast(Kind, kind))
    except MilesError as error:
        found = fail(name, error.what, why=error.why, fix=error.fixes)
    for finding in found:
        print(json.dumps(asdict(finding)), file=reply, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
