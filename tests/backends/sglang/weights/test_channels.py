"""Weights from this process, as a one-rank trainer, into the real engine."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
import torch

from milescli.backends.sglang.client.http import EngineHttp
from milescli.backends.sglang.weights.channels import DistributedChannel, TensorChannel
from milescli.core.errors import MismatchError, WorkerDied
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports
from milescli.rollout.base import GenerateRequest
from milescli.weights.shards import Part, Shard, whole
from tests.backends.sglang.weights.sending import TOKENS, expected_scores, weights

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_rank_trainer")]


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


def scores(service) -> torch.Tensor:
    return torch.tensor(service.run(lambda fleet: fleet.score(TOKENS)), dtype=torch.float64)


def test_the_engine_generates_with_the_weights_and_the_version_that_were_sent(
    weights_restored, service, channel
):
    assert len(list(weights(service.model))) > 2
    for version, scale in ((3, 0.9), (4, 1.0)):
        service.publish(channel, weights(service.model, scale=scale), version=version)
        request = GenerateRequest(prompt_ids=TOKENS, max_new_tokens=4, seed=1)
        completion = service.run(lambda fleet: fleet.generate(request))  # noqa: B023
        assert [span.version for span in completion.version_spans] == [version]
        expected = expected_scores(service.model, scale)
        assert torch.allclose(scores(service), expected, atol=1e-5, rtol=0)


def test_a_publish_flushes_the_caches_once_and_says_the_version_once(
    weights_restored, service, channel, monkeypatch
):
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


def test_verify_is_content_with_what_was_sent_and_leaves_it_in_place(
    weights_restored, service, channel
):
    service.publish(channel, weights(service.model), version=1)
    before = scores(service)
    channel.verify(weights(service.model))
    assert torch.equal(before, scores(service))


def test_verify_names_a_weight_that_the_engine_holds_wrongly(weights_restored, service, channel):
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


def test_a_trainer_of_one_rank_sends_what_changed(weights_restored, service):
    def pieces(changed: str | None = None):
        for bucket in weights(service.model, changed=changed):
            yield [
                Shard(
                    part=Part(
                        name=name,
                        shape=tuple(tensor.shape),
                        dtype=tensor.dtype,
                        box=whole(tensor.shape),
                        owners=(0,),
                    ),
                    senders=(0,),
                    tensor=tensor,
                )
                for name, tensor in bucket
            ]

    channel, name = DistributedChannel(timeout_s=60), "model.layers.1.mlp.down_proj.weight"
    channel.full_every = 4
    channel.open([service.address])
    assert channel.groups == [[0]]
    sent = list[int]()
    for changed in (None, name, name):
        before = channel.sent_bytes
        service.publish(channel, pieces(changed), version=1)
        sent.append(channel.sent_bytes - before)
        channel.verify(pieces(changed))
    with pytest.raises(MismatchError, match=r"down_proj\.weight: 1 of 8192 values"):
        channel.verify(pieces())
    channel.close()
    assert sent[0] > 300_000 and max(sent[1:]) < 100


def test_no_shared_memory_is_left_after_sending(weights_restored, service):
    channel = TensorChannel(timeout_s=60)
    channel.open([service.address])
    service.publish(channel, weights(service.model), version=1)
    assert shared_memory() == set(), "though the channel is open"
    channel.close()


def test_an_engine_that_is_held_in_the_middle_of_a_publish_reads_when_it_goes_on(
    weights_restored, service
):
    """Nobody has to answer meanwhile: torch's own sharing by name gave up after a second."""
    (scheduler,) = map(psutil.Process, service.engine._computing_pids())

    def buckets():
        """The second is written while the engine is held, which was sent the first."""
        for index, bucket in enumerate(weights(service.model, scale=0.9)):
            if index == 0:
                scheduler.suspend()
            elif index == 1:
                assert len(shared_memory()) == 1
                threading.Timer(3.0, scheduler.resume).start()
            yield bucket

    channel = TensorChannel(timeout_s=60)
    channel.open([service.address])
    try:
        service.publish(channel, buckets(), version=6)
    finally:
        scheduler.resume()
    channel.close()
    assert torch.allclose(scores(service), expected_scores(service.model, 0.9), atol=1e-5, rtol=0)
    started = {child.name() for child in psutil.Process().children(recursive=True)}
    assert not any(name.startswith("torch_shm") for name in started)


def shared_memory() -> set[str]:
    """That this process made."""
    return {path.name for path in Path("/dev/shm").glob(f"miles_{os.getpid()}_*")}


@pytest.mark.timeout(600)  # far below the bound of the channel: nobody waits for who is not there
def test_a_dead_address_is_named_at_once():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    channel = TensorChannel(timeout_s=3600)
    channel.open([EngineAddress(url=url, tp=1, sharing_ranks=[0])])
    with pytest.raises(WorkerDied, match=url):
        channel.send(iter([[("w", torch.zeros(3))]]))
    channel.close()
