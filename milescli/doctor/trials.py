"""Trials of the real parts, each the smallest that proves it: torch sees the devices, Ray starts, processes add numbers, an engine
answers, a trainer steps and its weights arrive. Run as `python -m milescli.doctor.trials NAME FOLDER DEVICE` by `trial`; writes findings as JSON lines."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from milescli.core.errors import MilesError
from milescli.core.types import WeightVersion
from milescli.core.units import MIB, format_bytes
from milescli.doctor.finding import Finding, fail, ok, skip
from milescli.doctor.links import judge_bandwidths
from milescli.doctor.tiny_trainer import publish_exactly, start_trainer, take_step, tiny_plan
from milescli.doctor.torch_build import describe_torch

if TYPE_CHECKING:
    import torch

    from milescli.backends.megatron.worker import TrainerRank
    from milescli.backends.sglang.client import SglangFleet

Kind = Literal["cuda", "rocm", "cpu"]
WORLD_SIZE = 2
BANDWIDTHS = "bandwidths.json"
BUFFER_BYTES = {"cpu": 4 * MIB, "cuda": 256 * MIB}
ANSWER_TOKENS = 8
PROMPT_IDS = list(range(10, 26))


def try_ray(folder: Path, kind: Kind) -> list[Finding]:
    """A session on loopback with one bundle and one actor-free placement group."""
    from milescli.backends.ray.cluster import Cluster

    plan = tiny_plan("cpu")
    start = time.monotonic()
    cluster = Cluster(address=None, temp_dir=folder, log_dir=folder, environment={})
    cluster.start(plan)
    try:
        asyncio.run(cluster.place(plan, timeout_s=60.0))
    finally:
        cluster.stop()
    return ok("ray", f"a session started, placed a bundle and ended in {time.monotonic() - start:.1f} s")


def try_torch(folder: Path, kind: Kind) -> list[Finding]:
    """What torch was built for and what it sees, as one line of JSON for `torch_build`."""
    return ok("torch", json.dumps(describe_torch()))


def try_collective(folder: Path, kind: Kind) -> list[Finding]:
    """An all-reduce over all devices (on a CPU: between two processes), then over each pair, by the backend that runs would use."""
    import torch

    backend = "gloo" if kind == "cpu" else "nccl"
    world_size = WORLD_SIZE if kind == "cpu" else torch.cuda.device_count()
    start = time.monotonic()
    torch.multiprocessing.spawn(add_ranks, args=(world_size, backend, str(folder)), nprocs=world_size, join=True)
    seconds = time.monotonic() - start
    measured = json.loads((folder / BANDWIDTHS).read_text())
    name = "rccl" if kind == "rocm" else backend
    found = ok("collective", f"{name} added numbers over {world_size} processes in {seconds:.1f} s{_speed(measured['all'])}")
    if kind == "cpu":
        return found + skip("links", "there is no link between devices on a CPU")
    if world_size < 2:
        return found + skip("links", "one device has no link to another")
    pairs = {(a, b): speed for a, b, speed in measured["pairs"]}
    return found + judge_bandwidths(pairs, measured["peers"], device=torch.cuda.get_device_name(0))


def _speed(bytes_per_s: float) -> str:
    return f", {format_bytes(bytes_per_s)}/s of bus bandwidth" if bytes_per_s else ""


def add_ranks(rank: int, world_size: int, backend: str, folder: str) -> None:
    """One process of `try_collective`; the first writes what it measured."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    speed, pairs = _bus_bandwidth(device, None, world_size), []
    for a, b in itertools.combinations(range(world_size), 2):
        group = dist.new_group([a, b])  # collective: every rank makes every group
        if rank in (a, b):
            pairs.append((a, b, _bus_bandwidth(device, group, 2)))
        dist.barrier()
    gathered: list[object] = [None] * world_size
    dist.all_gather_object(gathered, pairs)
    if rank == 0:
        every = sorted({(a, b): speed for own in gathered for a, b, speed in own}.items())  # type: ignore[attr-defined]
        peers = _missing_peers(world_size) if device.type == "cuda" else []
        measured = {"all": speed, "pairs": [(a, b, each) for (a, b), each in every], "peers": peers}
        (Path(folder) / BANDWIDTHS).write_text(json.dumps(measured))
    dist.destroy_process_group()


def _bus_bandwidth(device: torch.device, group: object, size: int) -> float:
    """Bytes per second that one rank sends in an all-reduce of BUFFER_BYTES: 2 (n - 1) / n of the buffer (ring). 0 alone. The sum is
    checked."""
    import torch
    import torch.distributed as dist

    value = torch.ones(BUFFER_BYTES[device.type] // 4, device=device)
    dist.all_reduce(value, group=group)
    assert bool((value == size).all()), f"{device} added to {value[0].item()} instead of {size}"
    value.fill_(0.0)
    rounds = 5
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(rounds):
        dist.all_reduce(value, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.monotonic() - start) / rounds
    return 2 * (size - 1) / size * BUFFER_BYTES[device.type] / seconds


def _missing_peers(world_size: int) -> list[tuple[int, int]]:
    import torch

    pairs = itertools.permutations(range(world_size), 2)
    return [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


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
        trainer = await asyncio.to_thread(start_trainer, model_dir, kind)
        try:
            return answered + await _train_and_publish(fleet, trainer, url, list(before))
        except MilesError as error:
            return answered + fail("weights", error.what, why=error.why, fix=error.fixes)
        finally:
            await asyncio.to_thread(trainer.close)
    finally:
        await fleet.close()


async def _train_and_publish(fleet: SglangFleet, trainer: TrainerRank, url: str, before: list[float]) -> list[Finding]:
    """A real step, then a real publish, then the engine's own weights compared with the trainer's."""
    try:
        stepped = ok("trainer", f"Megatron-Core took a step: {await asyncio.to_thread(take_step, trainer)}")
    except MilesError as error:
        stepped = fail("trainer", error.what, why=error.why, fix=error.fixes)
    await fleet.pause()
    try:
        await asyncio.to_thread(publish_exactly, trainer, url)
    except MilesError as error:
        return stepped + fail("weights", error.what, why=error.why, fix=error.fixes)
    await fleet.set_version(WeightVersion(1))
    await fleet.resume()
    if before == list(await fleet.score(PROMPT_IDS)):
        why = "log-probs are the same after all weights were changed"
        return stepped + fail("weights", "the engine ignores new weights", why=why, fix="report this with the engine's log")
    arrived = "the trainer's new weights arrived over the tensor channel, equal bit for bit, and the answers changed"
    return stepped + ok("weights", arrived)


TRIALS: dict[str, Callable[[Path, Kind], list[Finding]]] = {
    "torch": try_torch,
    "ray": try_ray,
    "collective": try_collective,
    "engine": try_engine,
}


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
