"""Two engines: the shared one, and one with two ranks on two nodes, which are two addresses of this
machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.weights.channels import DistributedChannel, TensorChannel
from milescli.core.errors import WorkerDied
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports
from milescli.rollout.base import GenerateRequest
from tests.backends.sglang.conftest import KEY, Service
from tests.backends.sglang.warm_engines import engine_of
from tests.backends.sglang.weights.sending import TOKENS, expected_scores, weights
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_rank_trainer")]
NODES = ("127.0.0.3", "127.0.0.4")
BOUND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What the tests hold."""

    here: Service
    across: list[EngineServer]
    """One per node; the first is the one to speak to."""

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

    @property
    def is_whole(self) -> bool:
        return all(engine.poll() is None for engine in self.across)

    def run(self, test):
        async def with_fleet():
            fleet = SglangFleet(engines=self.addresses, response_timeout_s=BOUND_S)
            try:
                return await test(fleet)
            finally:
                await fleet.close()

        return asyncio.run(with_fleet())

    def scores_of_both(self) -> list[torch.Tensor]:
        """They are asked in turn."""

        async def score_twice(fleet):
            return [await fleet.score(TOKENS) for _ in self.addresses]

        return [torch.tensor(scores, dtype=torch.float64) for scores in self.run(score_twice)]

    def stop(self) -> None:
        for server in self.across:
            server.stop()


def start_pair(service: Service, logs: Path) -> Pair:
    shared = service.engine.spec
    meet = f"{NODES[0]}:{free_ports(1, host=NODES[0])[0]}"
    across = [
        engine_of(
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
    pair = Pair(here=service, across=across)
    try:
        for engine in across:
            engine.start()
        for engine in across:
            engine.wait_ready(400)
    except BaseException:
        pair.stop()
        raise
    return pair


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Pair]]:
    """Those that were started; the last one is in use."""
    started: list[Pair] = []
    yield started
    for pair in started:
        pair.stop()


@pytest.fixture
def pair(
    service: Service,
    weights_restored: None,
    pairs: list[Pair],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """A living one: another, where a test before has killed an engine of the last."""
    if not pairs or not pairs[-1].is_whole:
        pairs.append(start_pair(service, tmp_path_factory.mktemp("pair")))
    return pairs[-1]


@pytest.mark.parametrize("kind", [TensorChannel, DistributedChannel])
def test_both_take_the_weights_and_hold_what_was_sent(pair, kind):
    model = pair.here.model
    channel = kind(timeout_s=BOUND_S)
    channel.open(pair.addresses)
    channel.send(weights(model, scale=0.9))
    sent = pair.scores_of_both()
    channel.verify(weights(model, scale=0.9))
    channel.close()
    expected = expected_scores(model, 0.9)
    assert [torch.allclose(scores, expected, atol=1e-5, rtol=0) for scores in sent] == [True, True]


def test_both_generate_alike_also_after_sleep(pair):
    request = GenerateRequest(prompt_ids=TOKENS, max_new_tokens=12, temperature=0.0)

    async def sleep_between(fleet):
        before = await asyncio.gather(*(fleet.generate(request) for _ in range(4)))
        await fleet.pause()
        await fleet.sleep()
        await fleet.wake_weights()
        await fleet.wake_cache()
        await fleet.resume(0)
        return [*before, *await asyncio.gather(*(fleet.generate(request) for _ in range(4)))]

    channel = TensorChannel(timeout_s=BOUND_S)
    channel.open(pair.addresses)
    channel.send(weights(pair.here.model))
    channel.close()
    completions = pair.run(sleep_between)
    assert len({tuple(completion.response_ids) for completion in completions}) == 1
    assert all(
        "Prefill batch" in engine.log_path.read_text()
        for engine in (pair.here.engine, pair.across[0])
    )


def test_a_rank_that_dies_on_another_node_in_the_middle_of_a_publish_is_named(pair):
    """Its engine ends of it, on both nodes."""
    rank = next(
        process
        for process in psutil.Process(pair.across[1].pid).children(recursive=True)
        if "scheduler" in " ".join(process.cmdline())
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
    until(lambda: all(engine.poll() is not None for engine in pair.across))
    assert pair.here.engine.poll() is None
