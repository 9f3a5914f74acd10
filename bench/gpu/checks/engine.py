"""One engine: does it start, does it say what the trainer says, and how fast is it beside the same
SGLang without what a run adds (deterministic inference, memory saver, our pieces)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from lines import Bound, Line
from planning import size_of_weight, time_model, work_of
from rig import (
    Burst,
    engine,
    engine_layout,
    fleet_of,
    generate,
    precision,
    started,
    vocab_size,
)
from shapes import write_model

from checks import Visit
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.command import engine_command, engine_environment
from milescli.backends.sglang.launch.process import ManagedProcess
from milescli.backends.sglang.launch.server import EngineServer
from milescli.doctor.tiny_trainer import score, start_trainer
from milescli.models.base import WeightTable
from milescli.platform.ports import free_ports
from milescli.rollout.base import Completion, GenerateRequest
from milescli.train.agreement import judge

SHAPE = "qwen3-0.6b"
SIZES = (1, 64, 512)
"""Requests at once; at most 8 on a CPU."""
STOCK_SHARE = 0.7
"""Of stock SGLang's tokens a second that a run's engine should reach at least: deterministic
kernels cost some."""


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    folder, weights = write_model(SHAPE, visit)
    ours = engine(visit, folder)
    with started(ours) as start_s:
        yield Line(
            name="start",
            measured=start_s,
            unit="s",
            bound=Bound(kind="at most", value=240, anywhere=False),
            note="to the first 200 of /health, kernels compiled and graphs captured",
        )
        completions, requests = asyncio.run(_sample(ours, _agreement(visit), folder))
        greedy, greedy_requests = asyncio.run(_sample(ours, _agreement(visit, 0.0), folder))
        speeds = asyncio.run(_speeds(fleet_of(ours), visit, folder))
        prefill_s = asyncio.run(_prefill(ours, visit, folder))
    yield from _agree(visit, folder, completions, requests, greedy, greedy_requests)
    for num_requests, step_s in speeds.items():
        yield _speed(visit, weights, num_requests, step_s)
    yield _prefill_line(visit, weights, prefill_s)
    stock = stock_engine(visit, ours)
    with started(stock) as start_s:
        for file in _load_files(stock.pid):
            file.unlink()
        stock_speeds = asyncio.run(_speeds(fleet_of(stock), visit, folder))
    for num_requests, step_s in stock_speeds.items():
        ratio = step_s / speeds[num_requests]
        yield Line(
            name=f"beside_stock_{num_requests}",
            measured=ratio,
            unit="x stock SGLang's tokens/s",
            bound=Bound(kind="at least", value=STOCK_SHARE, anywhere=False),
            note=f"same requests; stock was ready after {start_s:.0f} s",
            figures={"stock_tokens_per_s": _at_once(visit, num_requests) / step_s},
        )


def _agreement(visit: Visit, temperature: float = 1.0) -> Burst:
    length = 64 if visit.on_device else 12
    return Burst(num_requests=8, prompt_tokens=length, new_tokens=length, temperature=temperature)


def _at_once(visit: Visit, num_requests: int) -> int:
    return num_requests if visit.on_device else min(num_requests, 8)


async def _sample(
    ours: EngineServer, burst: Burst, folder: Path
) -> tuple[list[Completion], list[GenerateRequest]]:
    fleet = fleet_of(ours)
    try:
        requests = burst.requests(vocab_size(folder), seed=1)
        return (await generate(fleet, requests))[0], requests
    finally:
        await fleet.close()


async def _speeds(fleet: SglangFleet, visit: Visit, folder: Path) -> dict[int, float]:
    """Requests at once -> seconds of one token of each: the second of two bursts."""
    seconds = {}
    try:
        for num_requests in SIZES:
            burst = Burst(
                num_requests=_at_once(visit, num_requests),
                prompt_tokens=128 if visit.on_device else 8,
                new_tokens=256 if visit.on_device else 8,
            )
            for seed in (2, 3):
                requests = burst.requests(vocab_size(folder), seed=seed)
                _, taken = await generate(fleet, requests)
            seconds[num_requests] = taken / burst.new_tokens
    finally:
        await fleet.close()
    return seconds


def _long_prompts(visit: Visit) -> Burst:
    return Burst(
        num_requests=32 if visit.on_device else 2,
        prompt_tokens=2048 if visit.on_device else 64,
        new_tokens=1,
    )


async def _prefill(ours: EngineServer, visit: Visit, folder: Path) -> float:
    """Seconds of the second of two bursts of long prompts."""
    fleet = fleet_of(ours)
    try:
        for seed in (4, 5):
            requests = _long_prompts(visit).requests(vocab_size(folder), seed=seed)
            _, taken = await generate(fleet, requests)
        return taken
    finally:
        await fleet.close()


def _prefill_line(visit: Visit, weights: WeightTable, seconds: float) -> Line:
    burst, times = _long_prompts(visit), time_model(weights)
    work = work_of(
        visit, num_samples=burst.num_requests, prompt_tokens=burst.prompt_tokens, response_tokens=1
    )
    planned_s = times.rollout(engine_layout(visit), work, cache_bytes=2**33).prefill
    tokens = burst.num_requests * burst.prompt_tokens
    return Line(
        name="prefill",
        measured=tokens / seconds,
        predicted=tokens / planned_s,
        unit="prompt tokens/s",
        note=f"{burst.num_requests} prompts of {burst.prompt_tokens} tokens, one new token each",
        figures={"prefill_share": times.efficiency.prefill_share * planned_s / seconds},
    )


def _agree(
    visit: Visit,
    folder: Path,
    completions: list[Completion],
    requests: list[GenerateRequest],
    greedy: list[Completion],
    greedy_requests: list[GenerateRequest],
) -> Iterator[Line]:
    """The trainer's say on what the engine sampled, in the precision of a run."""
    trainer = start_trainer(folder, visit.device)
    try:
        ours, rounded = (
            [
                logprob
                for completion, request in zip(completions, requests, strict=True)
                for logprob in score(
                    trainer,
                    list(request.prompt_ids),
                    completion.response_ids,
                    with_other_rounding=otherwise,
                )
            ]
            for otherwise in (False, True)
        )
        theirs = [logprob for completion in completions for logprob in completion.logprobs]
        found = judge(*map(np.array, (theirs, ours, rounded)), has_experts=False)
        equal = _greedy_share(trainer, folder, greedy, greedy_requests)
    finally:
        trainer.close()
    kind = precision(visit)
    yield Line(
        name="greedy",
        measured=equal,
        unit="of the engine's greedy tokens are the trainer's most likely ones",
        bound=Bound(kind="at least", value=0.9 if visit.on_device else 1.0),
        note=f"{kind}; random weights have more ties than trained ones",
    )
    yield Line(
        name="logprob_difference",
        measured=found.times,
        unit=f"times what rounding does to the trainer, {kind}",
        bound=Bound(kind="at most", value=found.most_times),
        note=found.text,
    )
    yield Line(
        name="logprob_difference_mean",
        measured=found.gap.mean,
        unit=f"|engine - trainer|, {kind}",
        note=f"{found.gap.num_tokens} sampled tokens",
    )


def _greedy_share(
    trainer, folder: Path, greedy: list[Completion], requests: list[GenerateRequest]
) -> float:
    from milescli.backends.megatron.logits import logits

    rows = [
        [*request.prompt_ids, *completion.response_ids]
        for request, completion in zip(requests, greedy, strict=True)
    ]
    ours = logits(folder, rows, dtype=trainer.dtype, checkpoint=None, mesh=trainer.mesh)
    equal = total = 0
    for row, request, completion in zip(ours, requests, greedy, strict=True):
        first = len(request.prompt_ids) - 1
        chosen = row[first : first + len(completion.response_ids)].argmax(-1)
        equal += int((chosen == torch.tensor(completion.response_ids)).sum())
        total += len(completion.response_ids)
    return equal / total


def _speed(visit: Visit, weights: WeightTable, num_requests: int, step_s: float) -> Line:
    at_once = _at_once(visit, num_requests)
    times, layout, size = time_model(weights), engine_layout(visit), size_of_weight(visit)
    memory = times.memory
    tokens = (128, 256) if visit.on_device else (8, 8)
    work = work_of(visit, num_samples=at_once, prompt_tokens=tokens[0], response_tokens=tokens[1])
    planned = times.rollout(layout, work, cache_bytes=2**33)
    cache = memory.cache_bytes(
        layout, size=size, tokens=at_once * (tokens[0] + tokens[1] // 2), sequences=at_once
    )
    return Line(
        name=f"decode_{num_requests}",
        measured=at_once / step_s,
        predicted=at_once * tokens[1] / planned.total,
        unit="tokens/s",
        note=f"{at_once} requests of {tokens[0]} + {tokens[1]} tokens; predicted: the planner's",
        figures={
            "step_s": step_s,
            "bytes_per_step": memory.engine_weights(layout, size=size) + cache,
            "sheet_bytes_per_s": times.device.memory_bandwidth,
        },
    )


def _load_files(pid: int) -> set[Path]:
    """What a stock SGLang has mapped in shared memory, and never removes; it keeps what it has."""
    leader = psutil.Process(pid)
    mapped = {
        Path(file.path)
        for process in (leader, *leader.children(recursive=True))
        for file in process.memory_maps()
    }
    return {path for path in mapped if path.match("/dev/shm/sglang_loads_*")}


def stock_engine(visit: Visit, ours: EngineServer) -> ManagedProcess:
    """The same SGLang with its own defaults, on the same model, cache and requests; with what
    makes it run on a CPU at all, and attention kernels that are there."""
    own = {
        "--enable-deterministic-inference",
        "--enable-memory-saver",
        "--disable-radix-cache",
        "--disable-prefill-cuda-graph",
    }
    command = [word for word in engine_command(ours.spec) if word not in own]
    port, ranks_port = free_ports(2)
    command[command.index("--port") + 1] = str(port)
    # what it chooses itself, long before it listens there, may be another's by then
    command += ["--nccl-port", str(ranks_port)]
    env = engine_environment(ours.spec)
    for name in [name for name in env if name.startswith("MILES_")]:
        del env[name]
    assert command[0] == sys.executable
    return ManagedProcess(
        name="stock SGLang",
        command=command,
        env=env,
        log_path=visit.folder / "stock.log",
        url=f"http://127.0.0.1:{port}",
    )
