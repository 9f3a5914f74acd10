"""Real engines on a CPU that guess tokens ahead, each beside one of the same model that does not:
equal tokens, log-probs, and weights after a publish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.errors import MismatchError
from milescli.core.types import Guesses, WeightVersion
from milescli.rollout.base import Completion
from tests.backends.megatron.world import run_world
from tests.backends.sglang.conftest import Service, make_qwen3
from tests.backends.sglang.inside.cpu.guessing import (
    DEEPSEEK,
    SAMPLED,
    Named,
    Pair,
    buckets,
    make_mtp,
    noisy,
    requests,
    require_same,
    require_same_experts,
    responses,
    start_guessing,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_rank_trainer")]


@pytest.fixture(scope="module", params=["ngram", "draft", "mtp"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The plain engine of a Qwen3 is the one that all tests of this folder share."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    started = list[Service]()
    try:
        if kind == "mtp":
            named = make_mtp(folder, DEEPSEEK)
            with ThreadPoolExecutor() as threads:
                starting = [
                    threads.submit(start_guessing, folder, each, records=True)
                    for each in ("mtp", None)
                ]
                started += [each.result() for each in starting]
            yield Pair(kind=kind, guessing=started[0], plain=started[1], named=named, folder=folder)
            return
        model, draft = make_qwen3(folder), folder / "draft"
        named = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        if kind == "draft":
            other = make_qwen3(draft)
            other.load_state_dict(noisy(named, scale=0.1), strict=False)
            other.save_pretrained(draft)
        started.append(start_guessing(folder, kind, draft if kind == "draft" else None))
        plain = request.getfixturevalue("service")
        yield Pair(kind=kind, guessing=started[0], plain=plain, named=named, folder=folder)
    finally:
        with ThreadPoolExecutor() as threads:
            for service in started:
                threads.submit(service.engine.stop)


@pytest.fixture
def restored(pair: Pair) -> Iterator[None]:
    """Both hold their weights again afterwards."""
    yield
    pair.publish(pair.named)


def test_tokens_and_logprobs_are_those_of_an_engine_that_guesses_nothing(pair: Pair) -> None:
    guesses = require_same(pair.guessing.run(responses), pair.plain.run(responses))
    assert 0 < guesses.num_right < guesses.num_guessed


def test_the_experts_that_were_chosen_are_those_of_an_engine_that_guesses_nothing(
    pair: Pair,
) -> None:
    if pair.kind != "mtp":
        pytest.skip("its model has no experts; test_draft_records.py has one")
    require_same_experts(pair)


def test_a_pause_in_the_middle_changes_no_token(pair: Pair) -> None:
    async def interrupted(fleet: SglangFleet) -> list[Completion]:
        asked = [asyncio.ensure_future(fleet.generate(each)) for each in requests()]
        for pause_after_s in (0.0, 0.05, 0.05):
            await asyncio.sleep(pause_after_s)
            await fleet.pause()
            await fleet.resume(WeightVersion(0))
        return await asyncio.gather(*asked)

    require_same(
        pair.guessing.run(interrupted),
        pair.plain.run(lambda fleet: asyncio.gather(*map(fleet.generate, requests()))),
    )


def test_new_weights_are_held_to_the_bit_and_sampled_from(restored: None, pair: Pair) -> None:
    newer = noisy(pair.named, scale=0.2)
    pair.publish(newer)
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    channel.verify(buckets(newer))
    require_same(pair.guessing.run(responses), pair.plain.run(responses))
    channel.close()


def test_a_weight_that_was_not_sent_is_named(pair: Pair) -> None:
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    left_out = "model.norm.weight"
    some = {name: tensor for name, tensor in pair.named.items() if name != left_out}
    with pytest.raises(MismatchError, match=r"model\.norm\.weight: \d+ of \d+ values were not"):
        channel.verify(buckets(some))
    channel.verify(buckets(pair.named))
    channel.close()


def test_what_guesses_stays_or_follows(restored: None, pair: Pair) -> None:
    if pair.kind == "ngram":
        pytest.skip("n-grams have no weights")
    before = require_same(pair.guessing.run(responses), pair.plain.run(responses))
    sent = {name: tensor for name, tensor in pair.named.items() if ".layers.3." not in name}
    pair.publish(sent)  # a trainer that does not train the MTP layer
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    channel.verify(buckets(sent))
    channel.close()
    assert require_same(pair.guessing.run(responses), pair.plain.run(responses)) == before
    if pair.kind == "mtp":
        layer = {name: 0 * tensor for name, tensor in pair.named.items() if "eh_proj" in name}
        pair.publish({**pair.named, **layer})
        after = require_same(pair.guessing.run(responses), pair.plain.run(responses))
        assert after.num_right < before.num_right / 2


def test_a_layer_that_was_trained_guesses_better(
    restored: None, pair: Pair, tmp_path: Path
) -> None:
    if pair.kind != "mtp":
        pytest.skip("the trainer trains no other that guesses")
    asked = [request for sampling in SAMPLED for request in requests(**sampling)]
    before = pair.guessing.run(responses)
    case = {
        "name": "learns",
        "call": "layer_learns",
        "model": str(pair.folder),
        "layout": {},
        "rows": [
            [*request.prompt_ids, *made.response_ids]
            for request, made in zip(asked, before, strict=True)
        ],
        "steps": 12,
        "save": str(tmp_path / "published.safetensors"),
    }
    losses = run_world(1, [case], tmp_path / "world")["learns"]
    assert losses[-1] < losses[0] - 0.5
    published = load_file(case["save"])
    moved = [name for name in published if not torch.equal(published[name], pair.named[name])]
    assert moved and all(".layers.3." in name for name in moved)
    pair.publish(published)
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    channel.verify(buckets(published))
    channel.close()
    after = require_same(pair.guessing.run(responses), pair.plain.run(responses))
    assert after.num_right > sum((each.guesses for each in before), Guesses()).num_right


def test_a_draft_model_is_sent_weights_of_its_own(restored: None, pair: Pair) -> None:
    if pair.kind != "draft":
        pytest.skip("no other model guesses")
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])

    async def send(fleet: SglangFleet, named: Named) -> None:
        await fleet.pause()
        await asyncio.to_thread(channel.send_draft, buckets(named))
        await fleet.resume(WeightVersion(2))

    plain = pair.plain.run(responses)
    before = require_same(pair.guessing.run(responses), plain)
    pair.guessing.run(lambda fleet: send(fleet, pair.named))  # those of the model itself
    channel.verify(buckets(pair.named))
    after = require_same(pair.guessing.run(responses), plain)
    assert after.num_right > 1.2 * before.num_right
    zeros = {name: 0 * tensor for name, tensor in pair.named.items()}
    pair.guessing.run(lambda fleet: send(fleet, zeros))
    blind = require_same(pair.guessing.run(responses), plain)
    assert blind.num_right < before.num_right / 2, "and the model keeps its own"
    channel.close()
