"""An engine, and a trainer beside it on the same device, as a run would start them: for the checks
that need both. The parts are those of the product; only their sizes are chosen here."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checks import Visit

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.process import ManagedProcess
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.core.types import EngineAddress
from milescli.plan.types import EngineLayout
from milescli.platform.ports import free_ports
from milescli.rollout.base import Completion, GenerateRequest

CONTEXT = 4096
START_S = 280.0
"""The first start compiles kernels."""
LAYOUT = EngineLayout(max_running_requests=512, memory_fraction=0.4, context_length=CONTEXT)
"""On an accelerator: leaves room for a trainer that does not sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Requests that are sent at once."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int
    temperature: float = 1.0

    def requests(self, vocab_size: int, *, seed: int) -> list[GenerateRequest]:
        """Random prompts; equal seeds give equal ones."""
        source = random.Random(seed)
        return [
            GenerateRequest(
                prompt_ids=[source.randrange(vocab_size) for _ in range(self.prompt_tokens)],
                max_new_tokens=self.new_tokens,
                temperature=self.temperature,
                seed=seed * 100_000 + index,
            )
            for index in range(self.num_requests)
        ]


def precision(visit: Visit) -> Literal["bf16", "fp32"]:
    """What a run would take."""
    return "bf16" if visit.on_device else "fp32"


def engine_layout(visit: Visit) -> EngineLayout:
    """Of the checks' engines."""
    if visit.on_device:
        return LAYOUT
    return EngineLayout(
        max_running_requests=8, max_total_tokens=4096, memory_fraction=0.3, context_length=256
    )


@contextmanager
def started(process: ManagedProcess) -> Iterator[float]:
    """Seconds until it was ready; it ends with the block. The log of one that does not start goes
    to this check's own."""
    process.start()
    try:
        yield process.wait_ready(START_S)
    except BaseException:
        print(process.log_path.read_text(errors="replace")[-8000:], flush=True)
        raise
    finally:
        process.stop()


def engine(visit: Visit, model_dir: Path) -> EngineServer:
    """As a run starts it. It does not run yet."""
    layout = engine_layout(visit)
    return EngineServer(
        EngineSpec(
            model_dir=model_dir,
            tokenizer_dir=None,
            device_kind=visit.device,
            precision=precision(visit),
            port=free_ports(1)[0],
            log_path=visit.folder / "engine.log",
            max_running_requests=layout.max_running_requests,
            max_total_tokens=layout.max_total_tokens,
            memory_fraction=layout.memory_fraction,
            context_length=layout.context_length,
        )
    )


def address_of(server: ManagedProcess) -> EngineAddress:
    """For a fleet, and for a trainer of one rank on the same device."""
    return EngineAddress(
        name="engine 0", url=server.url, tp=1, sharing_ranks=[0], log_path=server.log_path
    )


def fleet_of(server: ManagedProcess) -> SglangFleet:
    """Return a client of one engine. Belongs to one event loop."""
    return SglangFleet(engines=[address_of(server)], response_timeout_s=240.0)


async def generate(
    fleet: SglangFleet, requests: Sequence[GenerateRequest]
) -> tuple[list[Completion], float]:
    """All at once, and the seconds that they took together."""
    begun = time.perf_counter()
    completions = await asyncio.gather(*(fleet.generate(request) for request in requests))
    return completions, time.perf_counter() - begun


def vocab_size(model_dir: Path) -> int:
    """Of a model folder."""
    return json.loads((model_dir / "config.json").read_text())["vocab_size"]
