"""What new weights do to responses that are running, on a real engine that keeps prefixes: whatever
is done, each token is of the weights that its version says, and of no KV of others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.errors import WaitTimeout
from milescli.core.events import PublishStats
from milescli.core.types import WeightVersion
from milescli.rollout.base import Completion, GenerateRequest
from tests.backends.sglang.conftest import MOMENTS_S, Service
from tests.backends.sglang.weights.sending import weights

pytestmark = pytest.mark.engine
SCALES = {2: 1.0, 5: 1.05}
"""Version -> what the model's weights are multiplied by."""
PROMPT = list(range(3, 103))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came of a publish in the middle of a response."""

    publish: PublishStats
    cut: Completion
    """The response that was running."""
    later: Completion
    """Of a request that was made while the publish was under way."""
    follow_up: Completion
    """Of the first response and what it was a response to, as a prompt."""
    anew: Completion
    """Of the same request, afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waved:
    """What came of publishes to one engine after the other."""

    said: dict[tuple[int, ...], Completion]
    """By prompt."""
    stats: list[PublishStats]
    """Of each wave."""


def _request(prompt: list[int], *, tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt, max_new_tokens=tokens, seed=11, stop=["never"])


async def _publish(fleet: SglangFleet, service: Service, version: int) -> PublishStats:
    channel = TensorChannel(timeout_s=60)
    channel.open([service.address])
    stats = await fleet.pause()
    send = weights(service.model, scale=SCALES[version])
    await asyncio.to_thread(channel.send, send)
    await fleet.resume(WeightVersion(version))
    channel.close()
    return stats


async def _interrupt(fleet: SglangFleet, service: Service, wait_s: float) -> Told:
    await _publish(fleet, service, 2)
    wanted = _request(PROMPT, tokens=400)
    running = asyncio.ensure_future(fleet.generate(wanted))
    await asyncio.sleep(wait_s)
    publishing = asyncio.ensure_future(_publish(fleet, service, 5))
    await asyncio.sleep(0)
    later = asyncio.ensure_future(fleet.generate(_request([*PROMPT, 7], tokens=4)))
    publish, cut = await publishing, await running
    line = [*PROMPT, *cut.response_ids]
    return Told(
        publish=publish,
        cut=cut,
        later=await later,
        follow_up=await fleet.generate(_request(line, tokens=4)),
        anew=await fleet.generate(wanted),
    )


def _told(service: Service, on_update: str) -> Told:
    """Where the response was running, and had tokens."""
    for wait_s in MOMENTS_S:
        told = service.run(
            lambda fleet, wait_s=wait_s: _interrupt(fleet, service, wait_s), on_update=on_update
        )
        has_tokens = on_update == "drain" or told.publish.discarded_tokens
        if told.publish.num_running and (has_tokens or len(told.cut.version_spans) == 2):
            return told
    raise AssertionError(f"no publish fell into a response; the last: {told}")


def _require_of_its_version(service: Service, prompt: list[int], said: Completion) -> None:
    """Each log-prob is that of transformers, with the weights of the token's version."""
    line = [*prompt, *said.response_ids]
    for span in said.version_spans:
        scale = SCALES[span.version]
        scaled = {n: p.detach() * scale for n, p in service.model.named_parameters()}
        with torch.no_grad():
            logits = torch.func.functional_call(
                service.model, scaled, (torch.tensor([line]),)
            ).logits
        rows = logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(line[1:])[:, None])[:, 0]
        expected = rows[len(prompt) - 1 :][span.start : span.end]
        actual = torch.tensor(said.logprobs[span.start : span.end])
        assert torch.allclose(actual, expected, atol=1e-4, rtol=0), f"of version {span.version}"


@pytest.mark.parametrize("on_update", ["continue", "drain", "abort"])
def test_each_token_is_of_the_weights_that_its_version_says(
    keeping: Service, on_update: str
) -> None:
    told = _told(keeping, on_update)
    versions = [span.version for span in told.cut.version_spans]
    assert versions == {"continue": [2, 5], "drain": [2], "abort": [5]}[on_update]
    assert (told.publish.discarded_tokens > 0) == (on_update == "abort")
    assert [span.version for span in told.later.version_spans] == [5]
    _require_of_its_version(keeping, PROMPT, told.cut)
    _require_of_its_version(keeping, [*PROMPT, 7], told.later)
    _require_of_its_version(keeping, [*PROMPT, *told.cut.response_ids], told.follow_up)
    if on_update == "abort":
        assert told.anew.response_ids == told.cut.response_ids, "another seed"


async def _send(service: Service, version: int) -> None:
    channel = TensorChannel(timeout_s=60)
    channel.open([service.address])
    send = weights(service.model, scale=SCALES[version])
    await asyncio.to_thread(channel.send, send)
    channel.close()


async def _in_waves(both: tuple[Service, Service], *, on_update: str, wait_s: float) -> Waved:
    """Twelve responses, while one engine after the other is given new weights."""
    fleet = SglangFleet(
        engines=[service.address for service in both],
        on_update=on_update,  # type: ignore[arg-type]
    )
    try:
        await fleet.pause()
        for service in both:
            await _send(service, 2)
        await fleet.resume(WeightVersion(2))
        prompts = [[*PROMPT, number] for number in range(3, 15)]
        running = [
            asyncio.ensure_future(fleet.generate(_request(prompt, tokens=800)))
            for prompt in prompts
        ]
        await asyncio.sleep(wait_s)
        stats = []
        for service in both:
            stats.append(await fleet.pause_some([service.address.url]))
            assert not fleet.num_waiting(service.address.url)
            await _send(service, 5)
            await fleet.resume_some([service.address.url], WeightVersion(5))
        await fleet.hold(WeightVersion(5))
        said = await asyncio.gather(*running)
        return Waved(said=dict(zip(map(tuple, prompts), said, strict=True)), stats=stats)
    finally:
        await fleet.close()


@pytest.mark.usefixtures("weights_restored")
@pytest.mark.parametrize("on_update", ["continue", "drain", "abort"])
def test_engines_that_are_updated_in_waves_say_the_version_of_each_token(
    service: Service, keeping: Service, on_update: str
) -> None:
    both = service, keeping
    for wait_s in MOMENTS_S:
        waved = asyncio.run(_in_waves(both, on_update=on_update, wait_s=wait_s))
        versions = {tuple(s.version for s in one.version_spans) for one in waved.said.values()}
        new = {number for each in versions for number in each if number == 5}
        if all(one.num_running for one in waved.stats) and (new or on_update == "drain"):
            break
    for prompt, said in waved.said.items():
        _require_of_its_version(service, [*prompt], said)
    cut = {(2, 5)} if on_update == "continue" else set()
    assert versions <= {(2,), (5,), *cut}, versions
    if on_update != "drain":
        assert new, "none was interrupted"


def test_tokens_of_a_response_that_nobody_wants_any_more_are_counted(keeping: Service) -> None:
    async def use(fleet: SglangFleet, wait_s: float) -> int:
        running = asyncio.ensure_future(fleet.generate(_request(PROMPT, tokens=400)))
        await asyncio.sleep(wait_s)
        first = await fleet.pause()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        second = await fleet.pause()
        await fleet.resume(WeightVersion(2))
        assert (first.discarded_tokens, second.num_running) == (0, 0)
        return second.discarded_tokens

    assert any(keeping.run(lambda fleet, s=wait_s: use(fleet, s)) for wait_s in MOMENTS_S)


def test_a_drain_that_does_not_end_says_who_waited_for_what(keeping: Service) -> None:
    async def use(fleet: SglangFleet) -> None:
        async with fleet._slot(deadline=1e12):  # a response that never ends
            fleet._response_timeout_s = 0.1
            with pytest.raises(WaitTimeout, match="timed out waiting for 1 running responses"):
                await fleet.pause()

    keeping.run(use, on_update="drain")
