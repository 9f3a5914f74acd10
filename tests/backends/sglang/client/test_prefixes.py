"""An engine on a CPU that keeps prefixes: the turns of a chat are what they are without, and are
not computed anew."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.types import WeightVersion
from milescli.rollout.base import Completion, GenerateRequest
from tests.backends.sglang.conftest import KEY, Service

TURNS, NEW, ADDED = 4, 24, 20


async def _talk(fleet: SglangFleet) -> list[list[Completion]]:
    """Conversations at once, each turn on all that was said before."""

    async def one(number: int) -> list[Completion]:
        line, said = [5 + number] * 30, []
        for turn in range(TURNS):
            request = GenerateRequest(
                prompt_ids=line, max_new_tokens=NEW, temperature=1.0, seed=100 * number + turn
            )
            said.append(await fleet.generate(request))
            line = [*line, *said[-1].response_ids, *range(20 + turn, 20 + turn + ADDED)]
        return said

    return await asyncio.gather(*map(one, range(6)))


def test_turns_are_the_same_with_and_without_kept_prefixes(
    keeping: Service, service: Service
) -> None:
    kept, plain = keeping.run(_talk), service.run(_talk)
    for ours, theirs in zip(kept, plain, strict=True):
        assert [turn.response_ids for turn in ours] == [turn.response_ids for turn in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def _cached(service: Service, prompt: list[int]) -> int:
    """Tokens of a prompt that the engine had computed before."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    request = urllib.request.Request(
        f"{service.engine.spec.url}/generate",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=200) as reply:
        return int(json.load(reply)["meta_info"]["cached_tokens"])


def test_a_prefix_is_computed_once_and_forgotten_with_its_weights(keeping: Service) -> None:
    prompt = list(range(3, 103))
    assert _cached(keeping, prompt) == 0
    assert _cached(keeping, [*prompt, 7]) >= len(prompt)

    async def renew(fleet: SglangFleet) -> None:
        await fleet.pause()
        await fleet.resume(WeightVersion(1))

    keeping.run(renew)
    assert _cached(keeping, [*prompt, 7]) == 0


def test_an_engine_that_keeps_none_computes_it_again(service: Service) -> None:
    prompt = list(range(3, 103))
    assert [_cached(service, prompt) for _ in range(2)] == [0, 0]
