"""Two engines behind one router: the shared one, and one with two ranks on two nodes, which are two
addresses of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import pytest
import torch

from milescli.backends.sglang.channels import DistributedChannel, TensorChannel
from milescli.backends.sglang.client import SglangFleet
from milescli.backends.sglang.ports import free_ports
from milescli.backends.sglang.server import EngineServer, RouterServer, RouterSpec
from milescli.core.errors import WorkerDied
from milescli.core.types import EngineAddress
from milescli.rollout.base import GenerateRequest
from tests.backends.sglang.conftest import KEY, Service
from tests.backends.sglang.test_channels import TOKENS, expected_scores, one_rank_trainer, weights

pytestmark = pytest.mark.engine
NODES = ("127.0.0.3", "127.0.0.4")
BOUND_S = 60.0
__all__ = ["one_rank_trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What the tests hold."""

    here: Service
    across: list[EngineServer]
    """One per node; the first answers."""
    router: RouterServer

    @property
    def addresses(self) -> list[EngineAddress]:
        spec = self.across[0].spec
        first = EngineAddress(
            url=spec.url,
            name=spec.name,
            tp=2,
            sharing_ranks=[0, 0],
            api_key=KEY,
            log_path=spec.log_path,
        )
        return [self.here.address, first]

    def run(self, ask, *, router_url: str | None = None):
        async def with_fleet():
            fleet = SglangFleet(
                router_url=router_url or self.router.url,
                engines=self.addresses,
                response_timeout_s=BOUND_S,
            )
            try:
                return await ask(fleet)
            finally:
                await fleet.close()

        return asyncio.run(with_fleet())

    def scores_of_each(self) -> list[torch.Tensor]:
        return [
            torch.tensor(
                self.run(lambda fleet: fleet.score(TOKENS), router_url=address.url),
                dtype=torch.float64,
            )
            for address in self.addresses
        ]


@pytest.fixture(scope="module")
def pair(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs, shared = tmp_path_factory.mktemp("pair"), service.engine.spec
    meet = f"{NODES[0]}:{free_ports(1, host=NODES[0])[0]}"
    across = [
        EngineServer(
            replace(
                shared,
                name=f"engine 1, node {rank}",
                host=host,
                port=free_ports(1, host=host)[0],
                log_path=logs / f"{host}.log",
                tp=2,
                num_nodes=2,
                node_rank=rank,
                init_address=meet,
            )
        )
        for rank, host in enumerate(NODES)
    ]
    port, metrics_port = free_ports(2)
    door = RouterSpec(
        worker_urls=(shared.url, across[0].url),
        port=port,
        metrics_port=metrics_port,
        log_path=logs / "router.log",
        api_key=KEY,
        policy="round_robin",
    )
    made = Pair(here=service, across=across, router=RouterServer(door))
    try:
        for engine in across:
            engine.start()
        for engine in across:
            engine.wait_ready(240)
        made.router.start()
        made.router.wait_ready(60)
        yield made
    finally:
        for each in (made.router, *across):
            each.stop()


@pytest.mark.parametrize("kind", [TensorChannel, DistributedChannel])
def test_both_take_the_weights_and_hold_what_was_sent(pair, kind):
    model = pair.here.model
    channel = kind(timeout_s=BOUND_S)
    channel.open(pair.addresses)
    channel.send(weights(model, scale=0.9))
    sent = pair.scores_of_each()
    channel.verify(weights(model, scale=0.9))
    channel.send(weights(model))
    channel.close()
    expected = expected_scores(model, 0.9)
    assert [torch.allclose(scores, expected, atol=1e-5, rtol=0) for scores in sent] == [True, True]


def test_both_answer_behind_the_router_also_after_sleep(pair):
    request = GenerateRequest(prompt_ids=TOKENS, max_new_tokens=12, temperature=0.0)

    async def ask(fleet):
        before = await asyncio.gather(*(fleet.generate(request) for _ in range(4)))
        await fleet.pause()
        await fleet.sleep()
        await fleet.wake_weights()
        await fleet.wake_cache()
        await fleet.resume(0)
        return [*before, *await asyncio.gather(*(fleet.generate(request) for _ in range(4)))]

    answers = pair.run(ask)
    assert all(answer.response_ids == answers[0].response_ids for answer in answers)
    assert all(
        "Prefill batch" in engine.log_path.read_text()
        for engine in (pair.here.engine, pair.across[0])
    )


def test_a_rank_that_dies_on_another_node_in_the_middle_of_a_publish_is_named(pair):
    """Last: the engine ends of it, on both nodes."""
    rank = next(
        each
        for each in psutil.Process(pair.across[1].pid).children(recursive=True)
        if "scheduler" in " ".join(each.cmdline())
    )

    def cut_short():
        for index, bucket in enumerate(weights(pair.here.model)):
            if index == 1:
                rank.kill()
            yield bucket

    channel = DistributedChannel(timeout_s=BOUND_S)
    channel.open(pair.addresses)
    with pytest.raises(WorkerDied, match=pair.across[0].url):
        channel.send(cut_short())
    channel.close()
    deadline = time.monotonic() + BOUND_S
    while any(engine.poll() is None for engine in pair.across) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(engine.poll() is not None for engine in pair.across)
    assert pair.here.engine.poll() is None
