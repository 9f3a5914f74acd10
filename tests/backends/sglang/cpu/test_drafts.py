"""Real engines on a CPU that guess tokens ahead, each beside one of the same model that does not:
equal tokens, log-probs, and weights after a publish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.backends.sglang.channels import TensorChannel
from milescli.backends.sglang.client import SglangFleet
from milescli.backends.sglang.speculation import Speculation
from milescli.core.errors import MismatchError
from milescli.core.types import Guesses, WeightVersion
from milescli.models import load_facts, parse_facts, table
from milescli.rollout.base import Completion, GenerateRequest
from tests.backends.megatron.world import run_world
from tests.backends.sglang.conftest import (
    EOS,
    VOCAB,
    Service,
    make_qwen3,
    start_service,
    write_tokenizer,
)
from tests.backends.sglang.sending import BOUND_BYTES
from tests.buckets import into_buckets
from tests.families.cases import ALL
from tests.families.making import randomise

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_rank_trainer")]
SAMPLED = [
    {"temperature": 0.0, "seed": None},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
]
Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two engines of the same weights."""

    kind: str
    guessing: Service
    plain: Service
    named: Named
    """Their weights, as the trainer sends them; of an MTP layer, too."""
    folder: Path

    def publish(self, named: Named) -> None:
        """To both."""
        for service in (self.guessing, self.plain):
            channel = TensorChannel(timeout_s=60)
            channel.open([service.address])
            service.publish(channel, _buckets(named), version=1)
            channel.close()


def _buckets(named: Named):
    return into_buckets(iter(named.items()), BOUND_BYTES)


def _noisy(named: Named, *, scale: float, seed: int = 3) -> Named:
    """The same with some noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1
        else tensor
        for name, tensor in named.items()
    }


def make_mtp(folder: Path) -> Named:
    """A tiny DeepSeek-V3 whose layers add little to the embedding, so that its MTP layer, which
    takes the embedding, often guesses what the model says."""
    config = {
        **ALL["deepseek-v3"].config,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "bos_token_id": 0,
        "max_position_embeddings": 2048,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = table(parse_facts(config)).hf_shapes()
    named = {
        name: (torch.ones if "norm" in name else torch.zeros)(shape)
        for name, shape in shapes.items()
    }
    randomise(list(named.items()))
    for name, tensor in named.items():
        if "embed_tokens" in name or "lm_head" in name:
            tensor.mul_(6.0)
        elif name.endswith("eh_proj.weight"):
            tensor[:, : len(tensor)] += torch.eye(len(tensor))
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return named


def _started(
    folder: Path, kind: str | None, draft: Path | None = None, *, records: bool = False
) -> Service:
    guessing = None
    if kind is not None:
        guesses, breadth = (5, 3) if kind == "ngram" else (3, 1)
        guessing = Speculation(
            kind=kind, num_guesses=guesses, draft_dir=draft, ngram_breadth=breadth
        )
    target = folder / f"engine-{kind}"
    target.mkdir()
    return start_service(
        folder,
        torch.nn.Module(),
        log_dir=target,
        speculation=guessing,
        return_routed_experts=records,
    )


@pytest.fixture(scope="module", params=["ngram", "draft", "mtp"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The plain engine of a Qwen3 is the one that all tests of this folder share."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    started = list[Service]()
    try:
        if kind == "mtp":
            named = make_mtp(folder)
            with ThreadPoolExecutor() as threads:
                starting = [
                    threads.submit(_started, folder, each, records=True) for each in ("mtp", None)
                ]
                started += [each.result() for each in starting]
            yield Pair(kind=kind, guessing=started[0], plain=started[1], named=named, folder=folder)
            return
        model, draft = make_qwen3(folder), folder / "draft"
        named = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        if kind == "draft":
            other = make_qwen3(draft)
            other.load_state_dict(_noisy(named, scale=0.1), strict=False)
            other.save_pretrained(draft)
        started.append(_started(folder, kind, draft if kind == "draft" else None))
        plain = request.getfixturevalue("service")
        yield Pair(kind=kind, guessing=started[0], plain=plain, named=named, folder=folder)
    finally:
        with ThreadPoolExecutor() as threads:
            for service in started:
                threads.submit(service.router.stop)
                threads.submit(service.engine.stop)


@pytest.fixture
def restored(pair: Pair) -> Iterator[None]:
    """Both hold their weights again afterwards."""
    yield
    pair.publish(pair.named)


def _requests(**sampling: object) -> list[GenerateRequest]:
    """Two of each prompt; some end by their end-of-sequence token."""
    return [
        GenerateRequest(
            prompt_ids=[5 + number // 2, 6, 7, 8] * 4,
            max_new_tokens=64,
            **{"seed": 100 + number, **sampling},
        )
        for number in range(12)
    ]


async def _all(fleet: SglangFleet) -> list[Completion]:
    asked = [request for sampling in SAMPLED for request in _requests(**sampling)]
    return await asyncio.gather(*map(fleet.generate, asked))


def _require_same(guessed: list[Completion], plain: list[Completion]) -> Guesses:
    """What was guessed, where all the rest is equal."""
    total = Guesses()
    for one, other in zip(guessed, plain, strict=True):
        assert one.response_ids == other.response_ids
        assert one.stop_reason is other.stop_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert other.guesses == Guesses()
        total += one.guesses
    return total


def test_tokens_and_logprobs_are_those_of_an_engine_that_guesses_nothing(pair: Pair) -> None:
    guesses = _require_same(pair.guessing.run(_all), pair.plain.run(_all))
    assert 0 < guesses.num_right < guesses.num_guessed


def test_the_experts_that_were_chosen_are_those_of_an_engine_that_guesses_nothing(
    pair: Pair,
) -> None:
    if pair.kind != "mtp":
        pytest.skip("its model has no experts; test_draft_records.py has one")
    facts = load_facts(pair.folder)
    shape = (facts.num_layers, facts.topk)

    async def recorded(fleet: SglangFleet) -> list[Completion]:
        asked = [replace(each, want_routed_experts=True) for each in _requests()]
        return await asyncio.gather(*map(fleet.generate, asked))

    guessed = pair.guessing.run(recorded, routing_shape=shape)
    for one, other in zip(guessed, pair.plain.run(recorded, routing_shape=shape), strict=True):
        assert one.routed_experts.num_tokens == 16 + len(one.response_ids) - 1
        assert one.routed_experts == other.routed_experts
    assert sum(made.guesses.num_right for made in guessed) > 0


def test_a_pause_in_the_middle_changes_no_token(pair: Pair) -> None:
    async def interrupted(fleet: SglangFleet) -> list[Completion]:
        asked = [asyncio.ensure_future(fleet.generate(each)) for each in _requests()]
        for pause_after_s in (0.0, 0.05, 0.05):
            await asyncio.sleep(pause_after_s)
            await fleet.pause()
            await fleet.resume(WeightVersion(0))
        return await asyncio.gather(*asked)

    _require_same(
        pair.guessing.run(interrupted),
        pair.plain.run(lambda fleet: asyncio.gather(*map(fleet.generate, _requests()))),
    )


def test_new_weights_are_held_to_the_bit_and_sampled_from(restored: None, pair: Pair) -> None:
    newer = _noisy(pair.named, scale=0.2)
    pair.publish(newer)
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    channel.verify(_buckets(newer))
    _require_same(pair.guessing.run(_all), pair.plain.run(_all))
    channel.close()


def test_a_weight_that_was_not_sent_is_named(pair: Pair) -> None:
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    left_out = "model.norm.weight"
    some = {name: tensor for name, tensor in pair.named.items() if name != left_out}
    with pytest.raises(MismatchError, match=r"model\.norm\.weight: \d+ of \d+ values were not"):
        channel.verify(_buckets(some))
    channel.verify(_buckets(pair.named))
    channel.close()


def test_what_guesses_stays_or_follows(restored: None, pair: Pair) -> None:
    if pair.kind == "ngram":
        pytest.skip("n-grams have no weights")
    before = _require_same(pair.guessing.run(_all), pair.plain.run(_all))
    sent = {name: tensor for name, tensor in pair.named.items() if ".layers.3." not in name}
    pair.publish(sent)  # a trainer that does not train the MTP layer
    channel = TensorChannel(timeout_s=60)
    channel.open([pair.guessing.address])
    channel.verify(_buckets(sent))
    channel.close()
    assert _require_same(pair.guessing.run(_all), pair.plain.run(_all)) == before
    if pair.kind == "mtp":
        layer = {name: 0 * tensor for name, tensor in pair.named.items() if "eh_proj" in name}
        pair.publish({**pair.named, **layer})
        after = _require_same(pair.guessing.run(_all), pair.plain.run(_all))
        assert after.num_right < before.num_right / 2


def test_a_layer_that_was_trained_guesses_better(
    restored: None, pair: Pair, tmp_path: Path
) -> None:
    if pair.kind != "mtp":
        pytest.skip("the trainer trains no other that guesses")
    asked = [request for sampling in SAMPLED for request in _requests(**sampling)]
    before = pair.guessing.run(_all)
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
    channel.verify(_buckets(published))
    channel.close()
    after = _require_same(pair.guessing.run(_all), pair.plain.run(_all))
    assert after.num_right > sum((each.guesses for each in before), Guesses()).num_right
