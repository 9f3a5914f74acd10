"""A mixture of experts on a real engine: its log-probs, its record of chosen experts, and that
record across a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy
import pytest
import torch

from milescli.backends.sglang.channels import TensorChannel
from milescli.core.errors import MismatchError
from milescli.rollout.base import GenerateRequest
from tests.backends.sglang.conftest import (
    Service,
    make_qwen3_moe,
    start_service,
    write_tokenizer,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LAYERS, TOPK = 2, 2


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = make_qwen3_moe(folder, num_hidden_layers=LAYERS, num_experts_per_tok=TOPK)
    write_tokenizer(folder)
    running = start_service(folder, model, return_routed_experts=True)
    yield running
    running.router.stop()
    running.engine.stop()


def routing_of_transformers(model, token_ids: list[int]) -> numpy.ndarray:
    """[tokens, layers, topk] sorted within a token, for all tokens but the last."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids[:-1]]), output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(TOPK, dim=-1).indices for layer in logits], dim=1)
    return chosen.sort(-1).values.numpy()


def routing(completion) -> numpy.ndarray:
    record = completion.routed_experts
    shape = (record.num_tokens, record.num_layers, record.topk)
    return numpy.sort(numpy.frombuffer(record.indices, dtype=numpy.int32).reshape(shape), axis=-1)


def wanted(seed: int, tokens: int) -> GenerateRequest:
    prompt = [3 + (seed * 37 + place * 13) % 290 for place in range(9)]
    return GenerateRequest(
        prompt_ids=prompt,
        max_new_tokens=tokens,
        seed=seed,
        want_routed_experts=True,
        stop=["never"],
    )


def test_logprobs_and_chosen_experts_are_those_of_transformers(moe):
    async def use(fleet):
        return await asyncio.gather(*(fleet.generate(wanted(seed, 24)) for seed in range(8)))

    for seed, completion in enumerate(moe.run(use, routing_shape=(LAYERS, TOPK))):
        tokens = [*wanted(seed, 24).prompt_ids, *completion.response_ids]
        with torch.no_grad():
            logprobs = moe.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[
            -len(completion.response_ids) :, 0
        ]
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-5)
        assert numpy.array_equal(routing(completion), routing_of_transformers(moe.model, tokens))


def test_the_record_of_a_paused_response_covers_every_token_once(moe):
    async def use(fleet):
        whole = await fleet.generate(wanted(3, 200))
        task = asyncio.create_task(fleet.generate(wanted(3, 200)))
        await asyncio.sleep(0.2)
        await fleet.pause()
        was_cut = not task.done()
        await fleet.resume(0)
        return whole, await task, was_cut

    whole, paused, was_cut = moe.run(use, routing_shape=(LAYERS, TOPK))
    assert was_cut
    assert paused.response_ids == whole.response_ids
    assert numpy.array_equal(routing(paused), routing(whole))


def test_expert_weights_arrive_and_are_verified_with_the_padding_that_sglang_adds(moe):
    channel = TensorChannel(timeout_s=60)
    channel.open([moe.address])
    named = expert_by_expert(moe.model.state_dict())
    channel.send(iter([named]))
    channel.verify(iter([named]))
    wrong = [
        (name, tensor + 1e-3 if name.endswith("experts.4.up_proj.weight") else tensor)
        for name, tensor in named
    ]
    with pytest.raises(MismatchError, match=r"layers\.0\.mlp\.experts\.w13_weight: 3072 of"):
        channel.verify(iter([wrong]))
    channel.close()


def expert_by_expert(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The names of the file format; transformers holds the experts of a layer in one tensor."""
    named = []
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            block = name.removesuffix(".gate_up_proj")
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                named += [
                    (f"{block}.{expert}.gate_proj.weight", gate),
                    (f"{block}.{expert}.up_proj.weight", up),
                ]
        elif name.endswith("experts.down_proj"):
            block = name.removesuffix(".down_proj")
            named += [
                (f"{block}.{expert}.down_proj.weight", down) for expert, down in enumerate(tensor)
            ]
        else:
            named.append((name, tensor))
    return named
