"""The fleet, on a real engine, which is asked together what is wanted at one moment."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from milescli.backends.sglang.client.batching import ONLY_WHEN_DONE
from milescli.backends.sglang.client.http import EngineRefused
from milescli.backends.sglang.client.reply import PartialResponse, Reply, read_reply
from milescli.core.types import StopReason, VersionSpan
from milescli.rollout.base import GenerateRequest
from tests.backends.sglang.conftest import MOMENTS_S

pytestmark = pytest.mark.engine


def request(
    index: int = 0, *, seed: int | None = 7, tokens: int = 24, **options
) -> GenerateRequest:
    prompt = [3 + (index * 31 + place * 17) % 290 for place in range(8 + index % 5)]
    return GenerateRequest(prompt_ids=prompt, max_new_tokens=tokens, seed=seed, **options)


def reference_logprobs(model, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].double()


def test_logprobs_of_sampled_tokens_are_those_of_transformers_at_the_temperature(service):
    async def use(fleet):
        return await fleet.generate(request(temperature=0.7))

    completion = service.run(use)
    prompt = request().prompt_ids
    expected = reference_logprobs(service.model, [*prompt, *completion.response_ids], 0.7)[
        len(prompt) - 1 :
    ]
    assert torch.allclose(
        torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0
    )


def test_score_equals_transformers(service):
    tokens = [5, 77, 130, 8, 250, 33, 91, 4, 4, 18]
    scores = service.run(lambda fleet: fleet.score(tokens))
    assert len(scores) == len(tokens) - 1
    expected = reference_logprobs(service.model, tokens)
    assert torch.allclose(torch.tensor(scores, dtype=torch.float64), expected, atol=1e-5, rtol=0)


def test_greedy_responses_are_those_of_transformers(service):
    completion = service.run(lambda fleet: fleet.generate(request(temperature=0.0, seed=None)))
    prompt = torch.tensor([request().prompt_ids])
    with torch.no_grad():
        expected = service.model.generate(prompt, max_new_tokens=24, do_sample=False)[
            0, prompt.shape[1] :
        ].tolist()
    assert completion.response_ids == expected


def test_requests_that_are_held_back_get_the_same_tokens_also_over_a_pause(service):
    async def crowd(fleet):
        asked = [fleet.generate(request(index, seed=index)) for index in range(40)]
        return await asyncio.gather(*asked), await fleet.pause()

    async def paused(fleet):
        asked = [
            asyncio.ensure_future(fleet.generate(request(index, seed=index))) for index in range(40)
        ]
        await asked[0]
        stats = await fleet.pause()
        assert stats.num_running < 40 - stats.held_requests + 2
        await fleet.resume(0)
        return await asyncio.gather(*asked), stats

    everything, none = service.run(crowd)
    bounded, some = service.run(crowd, max_running=4)
    interrupted, _ = service.run(paused, max_running=4)
    assert (none.held_requests, some.held_requests) == (0, 28)
    expected = [each.response_ids for each in everything]
    assert [each.response_ids for each in bounded] == expected
    assert [each.response_ids for each in interrupted] == expected


def test_an_engine_says_how_full_it_is(service):
    async def look(fleet):
        return await fleet.http.loads(fleet.engines[0])

    (load,) = service.run(look)
    assert load["num_running_reqs"] == 0 and 0 <= load["token_usage"] < 1


def test_equal_seeds_give_equal_tokens_whatever_the_batch_and_other_seeds_do_not(service):
    async def use(fleet):
        alone = await fleet.generate(request(0, seed=3))
        crowd = await asyncio.gather(
            *(fleet.generate(request(index, seed=3 + index)) for index in range(40))
        )
        other = await fleet.generate(request(0, seed=4))
        assert fleet.num_answers == 42
        return alone, crowd[0], other

    alone, in_crowd, other = service.run(use)
    assert alone.response_ids == in_crowd.response_ids
    assert alone.response_ids != other.response_ids


def test_seeded_tokens_follow_the_distribution_of_the_model(service):
    """The first token over 600 seeds, against its probability: chi-square over the likely
    tokens."""
    number = 600

    async def use(fleet):
        return await asyncio.gather(
            *(fleet.generate(request(seed=1000 + seed, tokens=1)) for seed in range(number))
        )

    first = torch.tensor([completion.response_ids[0] for completion in service.run(use)])
    with torch.no_grad():
        expected = (
            service.model(torch.tensor([request().prompt_ids])).logits[0, -1].softmax(-1) * number
        )
    likely = expected >= 5
    observed = torch.bincount(first, minlength=len(expected)).double()
    observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
    expected = torch.cat([expected[likely], expected[~likely].sum()[None]]).double()
    chi_square = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
    freedom = len(expected) - 1
    assert freedom >= 3
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_a_response_ends_by_length_by_end_token_and_by_stop_string(service):
    async def use(fleet):
        long = await fleet.generate(request(tokens=24))
        third = long.response_ids[2]
        stopped = await fleet.generate(request(tokens=24, stop=[f"t{third}"]))
        ended = await asyncio.gather(
            *(fleet.generate(request(index, seed=index, tokens=400)) for index in range(24))
        )
        return long, third, stopped, ended

    long, third, stopped, ended = service.run(use)
    assert (long.stop_reason, len(long.response_ids)) == (StopReason.LENGTH, 24)
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.response_ids == long.response_ids[: long.response_ids.index(third) + 1]
    by_token = [completion for completion in ended if completion.stop_reason is StopReason.STOP]
    assert by_token
    assert all(
        completion.response_ids[-1] == 1 and 1 not in completion.response_ids[:-1]
        for completion in by_token
    )


def test_a_paused_response_goes_on_with_its_tokens_and_says_which_weights_made_them(service):
    """How long it takes until the first token is there, and until the last is, depends on what else
    the machine does: the pause is tried at several times, until it falls in between."""
    wanted = request(tokens=900, stop=["never"])
    unbroken = service.run(lambda fleet: fleet.generate(wanted))

    async def use(fleet, wait_s):
        await fleet.pause()
        await fleet.resume(2)
        task = asyncio.create_task(fleet.generate(wanted))
        await asyncio.sleep(wait_s)
        await fleet.pause()
        await fleet.pause()
        held_back = not task.done()
        await fleet.resume(5)
        return held_back, await task

    for wait_s in MOMENTS_S:
        held_back, completion = service.run(lambda fleet, wait_s=wait_s: use(fleet, wait_s))
        if held_back and len(completion.version_spans) == 2:
            break
    assert held_back
    assert completion.response_ids == unbroken.response_ids
    assert torch.allclose(
        torch.tensor(completion.logprobs), torch.tensor(unbroken.logprobs), atol=1e-5
    )
    total = len(completion.response_ids)
    cut = completion.version_spans[0].end
    assert 0 < cut < total
    assert completion.version_spans == [
        VersionSpan(start=0, end=cut, version=2),
        VersionSpan(start=cut, end=total, version=5),
    ]


def test_a_stop_string_is_found_though_a_pause_fell_into_it(service):
    async def use(fleet):
        long = await fleet.generate(request(tokens=24))
        begun, ended = long.response_ids[2:4]
        wanted = request(tokens=24, stop=[f"t{begun}t{ended}"])
        paused_at = Reply(
            token_ids=long.response_ids[:3],
            logprobs=long.logprobs[:3],
            stop_reason=StopReason.ABORT,
            spans=long.version_spans,
            routed_experts=None,
        )
        ends = []
        for begins in (None, lambda token_ids: int(token_ids[-1] == begun)):
            response = PartialResponse(request=replace(wanted, num_begun=begins))
            response.extend(paused_at)
            response.drop_begun()
            [engine] = fleet.http.engines
            asked = fleet.http.ask(engine, "/generate", response.body, timeout_s=60)
            response.extend(rest := read_reply(await asked))
            ends.append((rest.stop_reason, response.token_ids))
        return long.response_ids, ends

    whole, (kept, anew) = service.run(use)
    assert kept == (StopReason.LENGTH, whole), "an engine searches only what it samples"
    assert anew == (StopReason.STOP, whole[:4])


def test_a_thousand_responses_in_flight_all_arrive(service):
    async def use(fleet):
        return await asyncio.gather(
            *(fleet.generate(request(index, seed=index, tokens=4)) for index in range(1000))
        )

    completions = service.run(use)
    assert len(completions) == 1000
    assert all(
        len(completion.logprobs) == len(completion.response_ids) > 0 for completion in completions
    )


def test_sleep_and_wake_leave_the_fleet_serving(service):
    async def use(fleet):
        before = await fleet.generate(request())
        await fleet.pause()
        await fleet.sleep()
        await fleet.wake_weights()
        await fleet.wake_cache()
        await fleet.resume(0)
        return before, await fleet.generate(request())

    before, after = service.run(use)
    assert before.response_ids == after.response_ids


def test_samples_of_one_prompt_are_those_of_requests_that_come_alone(service):
    async def use(fleet):
        together = await asyncio.gather(
            *(fleet.generate(request(number // 4, seed=number)) for number in range(12))
        )
        alone = [await fleet.generate(request(number // 4, seed=number)) for number in (0, 5, 11)]
        return together, alone

    together, alone = service.run(use)
    for number, completion in zip((0, 5, 11), alone, strict=True):
        assert together[number].response_ids == completion.response_ids
        assert torch.allclose(
            torch.tensor(together[number].logprobs), torch.tensor(completion.logprobs), atol=1e-5
        )


def test_a_response_that_is_wanted_as_a_whole_is_sent_once(service):
    body = {
        "input_ids": [request(number).prompt_ids for number in range(3)],
        "sampling_params": [{"max_new_tokens": 5, "stream_interval": ONLY_WHEN_DONE}] * 3,
        "stream": True,
    }

    async def use(fleet):
        parts = fleet.http.stream(service.address, "/generate", body, timeout_s=60)
        return [part async for part in parts]

    parts = service.run(use)
    assert sorted(part["index"] for part in parts) == [0, 1, 2]
    assert all(len(part["output_ids"]) == 5 for part in parts)


def test_a_refused_request_says_why_and_the_fleet_goes_on(service):
    async def use(fleet):
        with pytest.raises(EngineRefused, match="rejected"):
            await fleet.generate(request(tokens=5000, temperature=-1.0))
        return await fleet.generate(request())

    assert service.run(use).response_ids
