"""Mixtures of experts on real engines: log-probs, the record of chosen experts and how many bytes
it takes, and that record across pauses, retractions, turns and new weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.errors import MismatchError
from milescli.core.types import Prompt
from milescli.rollout.base import GenerateRequest
from milescli.rollout.episode.session import RecordingSession
from tests.backends.sglang.conftest import (
    MOMENTS_S,
    Service,
    make_qwen3_moe,
    start_service,
    write_tokenizer,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LAYERS, TOPK = 2, 2
SHAPE = (LAYERS, TOPK)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from serving(tmp_path_factory.mktemp("qwen3_moe"), {})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Of more experts than a byte can tell apart. SGLang retracts requests every now and then, as
    it does where its cache is full: it begins them anew when there is room."""
    folder = tmp_path_factory.mktemp("wide_moe")
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
    yield from serving(folder, retract, num_experts=300, moe_intermediate_size=16)


def serving(folder: Path, extra_env: Mapping[str, str], **sizes: int) -> Iterator[Service]:
    model = make_qwen3_moe(folder, num_hidden_layers=LAYERS, num_experts_per_tok=TOPK, **sizes)
    write_tokenizer(folder)
    running = start_service(folder, model, return_routed_experts=True, extra_env=extra_env)
    yield running
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
    dtype = {1: numpy.uint8, 2: numpy.uint16}[record.bytes_per_number]
    return numpy.sort(numpy.frombuffer(record.indices, dtype=dtype).reshape(shape), axis=-1)


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

    for seed, completion in enumerate(moe.run(use, routing_shape=SHAPE)):
        tokens = [*wanted(seed, 24).prompt_ids, *completion.response_ids]
        with torch.no_grad():
            logprobs = moe.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[
            -len(completion.response_ids) :, 0
        ]
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-5)
        assert numpy.array_equal(routing(completion), routing_of_transformers(moe.model, tokens))
        assert completion.routed_experts.bytes_per_number == 1


def test_rows_that_are_known_do_not_come_again_and_no_record_where_none_is_wanted(moe):
    requests = [
        wanted(0, 24),
        replace(wanted(0, 24), num_known_routes=5),
        replace(wanted(0, 24), want_routed_experts=False),
        replace(wanted(0, 24), num_known_routes=8),
    ]

    async def use(fleet):
        return await asyncio.gather(*map(fleet.generate, requests))

    whole, later, without, last = moe.run(use, routing_shape=SHAPE)
    assert later.response_ids == without.response_ids == last.response_ids == whole.response_ids
    assert without.routed_experts is None
    assert numpy.array_equal(routing(later), routing(whole)[5:])
    assert numpy.array_equal(routing(last), routing(whole)[8:])
    cells = LAYERS * TOPK
    assert len(whole.routed_experts.indices) - len(later.routed_experts.indices) == 5 * cells


def test_a_conversation_is_sent_each_row_once(moe):
    received = []

    async def use(fleet):
        ask = fleet.generate

        async def generate(request):
            completion = await ask(request)
            received.append(completion.routed_experts.num_tokens)
            return completion

        fleet.generate = generate
        session = RecordingSession(
            fleet,
            prompt=Prompt(index=0, token_ids=[], text=""),
            seed=3,
            settings=replace(wanted(0, 12), prompt_ids=()),
            max_tokens=512,
            decode=lambda ids: "",
        )
        tokens = list(wanted(4, 1).prompt_ids)
        for _ in range(4):
            turn = await session.generate(tokens)
            tokens = [*turn.prompt_ids, *turn.response_ids, 7, 8]
        return session.trajectories()

    (line,) = moe.run(use, routing_shape=SHAPE)
    expected = routing_of_transformers(moe.model, line.token_ids.tolist())
    assert numpy.array_equal(routing(line), expected)
    assert sum(received) == line.num_tokens - 1


def test_requests_that_are_retracted_have_the_whole_record_of_two_bytes_a_number(wide):
    async def use(fleet):
        return await asyncio.gather(*(fleet.generate(wanted(seed, 120)) for seed in range(12)))

    responses = wide.run(use, routing_shape=SHAPE)
    assert "#retracted_reqs" in wide.engine.spec.log_path.read_text()
    for seed, completion in enumerate(responses):
        tokens = [*wanted(seed, 120).prompt_ids, *completion.response_ids]
        expected = routing_of_transformers(wide.model, tokens)
        assert expected.max() > 255 and completion.routed_experts.bytes_per_number == 2
        assert numpy.array_equal(routing(completion), expected)


def test_the_record_of_a_paused_response_covers_every_token_once(moe):
    async def use(fleet, wait_s):
        whole = await fleet.generate(wanted(3, 200))
        task = asyncio.create_task(fleet.generate(wanted(3, 200)))
        await asyncio.sleep(wait_s)
        await fleet.pause()
        was_cut = not task.done()
        await fleet.resume(0)
        return whole, await task, was_cut

    for wait_s in MOMENTS_S:
        whole, paused, was_cut = moe.run(lambda fleet, s=wait_s: use(fleet, s), routing_shape=SHAPE)
        assert paused.response_ids == whole.response_ids
        assert numpy.array_equal(routing(paused), routing(whole))
        if was_cut:
            break
    assert was_cut


def test_what_old_weights_sampled_keeps_their_routes_under_new_ones(moe):
    channel = TensorChannel(timeout_s=60)
    channel.open([moe.address])
    old = expert_by_expert(moe.model.state_dict())
    generator = torch.Generator().manual_seed(5)
    new = [
        (name, tensor + 0.3 * torch.randn(tensor.shape, generator=generator))
        if name.endswith("mlp.gate.weight")
        else (name, tensor)
        for name, tensor in old
    ]

    async def use(fleet, wait_s):
        task = asyncio.create_task(fleet.generate(wanted(3, 200)))
        await asyncio.sleep(wait_s)
        await fleet.pause()
        await asyncio.to_thread(channel.send, iter([new]))
        await fleet.resume(1)
        return await task

    for wait_s in MOMENTS_S:
        try:
            made = moe.run(lambda fleet, s=wait_s: use(fleet, s), routing_shape=SHAPE)
        finally:
            moe.publish(channel, iter([old]), version=0)
        if len(made.version_spans) == 2:
            break
    channel.close()
    first, second = made.version_spans
    assert (first.version, second.version) == (0, 1)
    tokens = [*wanted(3, 200).prompt_ids, *made.response_ids]
    num_old = len(wanted(3, 200).prompt_ids) + first.end - 1
    of_old = routing_of_transformers(moe.model, tokens)
    changed = copy.deepcopy(moe.model)
    changed.load_state_dict(
        {name: tensor for name, tensor in new if name.endswith("mlp.gate.weight")}, strict=False
    )
    of_new = routing_of_transformers(changed, tokens)
    assert numpy.array_equal(routing(made)[:num_old], of_old[:num_old])
    assert numpy.array_equal(routing(made)[num_old:], of_new[num_old:])
    assert (of_old[:num_old] != of_new[:num_old]).any(), "the new weights route alike"


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
