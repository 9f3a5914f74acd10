"""Weights from this process, as a one-rank trainer, into the real engine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from milescli.backends.sglang.channels import DistributedChannel, TensorChannel
from milescli.backends.sglang.http import EngineHttp
from milescli.backends.sglang.ports import free_ports
from milescli.core.errors import MismatchError, WorkerDied
from milescli.core.types import EngineAddress
from milescli.rollout.base import GenerateRequest
from tests.buckets import into_buckets

pytestmark = pytest.mark.engine
BOUND_BYTES = 40_000
"""Makes several buckets of the tiny model."""
TOKENS = [5, 77, 130, 8, 250, 33, 91, 4]


@pytest.fixture(scope="module", autouse=True)
def one_rank_trainer():
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{free_ports(1)[0]}", rank=0, world_size=1
        )
    yield
    if made_here:
        dist.destroy_process_group()


@pytest.fixture(params=["tensor", "distributed"])
def channel(request, service):
    made = (
        TensorChannel(timeout_s=60)
        if request.param == "tensor"
        else DistributedChannel(backend="gloo", timeout_s=60)
    )
    made.open([service.address])
    yield made
    made.close()


def weights(model, *, scale: float = 1.0, changed: str | None = None):
    """Named tensors as the trainer sends them; `changed`: one weight that is off by the smallest
    step."""
    named = {name: parameter.detach() * scale for name, parameter in model.named_parameters()}
    if changed is not None:
        off = named[changed].clone()
        off.view(-1)[5] = torch.nextafter(off.view(-1)[5], torch.tensor(9.0))
        named[changed] = off
    return into_buckets(iter(named.items()), BOUND_BYTES)


def scores(service) -> torch.Tensor:
    return torch.tensor(service.run(lambda fleet: fleet.score(TOKENS)), dtype=torch.float64)


def expected_scores(model, scale: float) -> torch.Tensor:
    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
        logprobs = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
        for name, parameter in model.named_parameters():
            parameter.copy_(saved[name])
    return logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].double()


def test_the_engine_answers_with_the_weights_and_the_version_that_were_sent(service, channel):
    assert len(list(weights(service.model))) > 2
    service.publish(channel, weights(service.model, scale=0.9), version=3)
    sent = scores(service)
    answer = service.run(
        lambda fleet: fleet.generate(GenerateRequest(prompt_ids=TOKENS, max_new_tokens=4, seed=1))
    )
    service.publish(channel, weights(service.model), version=4)
    assert torch.allclose(sent, expected_scores(service.model, 0.9), atol=1e-5, rtol=0)
    assert [span.version for span in answer.version_spans] == [3]
    assert torch.allclose(scores(service), expected_scores(service.model, 1.0), atol=1e-5, rtol=0)


def test_a_publish_flushes_the_caches_once_and_says_the_version_once(service, channel, monkeypatch):
    orders: list[str] = []
    plain = EngineHttp.order

    async def order(self, engine, path, body, *, timeout_s):
        orders.append(path.partition("?")[0])
        return await plain(self, engine, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(EngineHttp, "order", order)
    service.publish(channel, weights(service.model), version=5)
    kinds = [path for path in orders if not path.startswith("/update_weights_from")]
    assert kinds == ["/flush_cache", "/update_weight_version"]
    assert len(orders) == len(kinds) + len(list(weights(service.model)))


def test_verify_is_content_with_what_was_sent_and_leaves_it_in_place(service, channel):
    service.publish(channel, weights(service.model), version=1)
    before = scores(service)
    channel.verify(weights(service.model))
    assert torch.equal(before, scores(service))


def test_verify_names_a_weight_that_the_engine_holds_wrongly(service, channel):
    name = "model.layers.1.mlp.down_proj.weight"
    service.publish(channel, weights(service.model, changed=name), version=1)
    with pytest.raises(
        MismatchError,
        match=r"layers\.1\.mlp\.down_proj\.weight: 1 of 8192 values, the first at flat index 5",
    ):
        channel.verify(weights(service.model))
    service.publish(channel, weights(service.model), version=2)
    channel.verify(weights(service.model))


def test_verify_names_a_weight_that_was_not_sent(service, channel):
    def without_norm():
        for bucket in weights(service.model):
            if kept := [(name, tensor) for name, tensor in bucket if name != "model.norm.weight"]:
                yield kept

    with pytest.raises(MismatchError, match=r"model\.norm\.weight: 64 of 64 values were not sent"):
        channel.verify(without_norm())
    channel.verify(weights(service.model))


def test_no_shared_memory_is_left_after_sending(service):
    before = shared_memory()
    channel = TensorChannel(timeout_s=60)
    channel.open([service.address])
    service.publish(channel, weights(service.model), version=1)
    channel.close()
    bound = time.monotonic() + 10
    while shared_memory() - before and time.monotonic() < bound:
        time.sleep(0.05)
        service.run(
            lambda fleet: fleet.score(TOKENS)
        )  # the engine lets go of the last bucket when it next works
    assert shared_memory() - before == set()


def shared_memory() -> set[str]:
    """That this process made."""
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_a_dead_address_is_named_at_once():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    channel = TensorChannel(timeout_s=60)
    channel.open([EngineAddress(url=url, tp=1, sharing_ranks=[0])])
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=url):
        channel.send(iter([[("w", torch.zeros(3))]]))
    assert time.monotonic() - started < 30
    channel.close()
