"""A real engine with an adapter: what it says is what the merged model says, also after others were
sent in its place; and what it holds is compared bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.weights.channels import DistributedChannel, TensorChannel
from milescli.core.errors import MismatchError
from milescli.core.types import EngineAddress, WeightVersion
from milescli.export.adapter import Adapter, write_adapter, write_merged
from milescli.models import load_facts, table
from milescli.models.adapter import (
    ALL_LINEAR,
    SOLE_ADAPTER,
    LoraShape,
    adapter_table,
    engine_name,
    pairs_of,
    peft_name,
)
from milescli.rollout.base import GenerateRequest
from milescli.weights.base import Bucket, WeightChannel
from tests.backends.sglang.conftest import make_qwen3_moe
from tests.backends.sglang.inside.adapter_engine import adapter_engine

pytestmark = pytest.mark.engine
OTHER = "other"
SHAPE = LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,))
PROMPT = [5, 9, 100, 3, 77, 42, 8, 17, 4, 4, 90, 12]


@dataclass(frozen=True)
class Served:
    """An engine on a tiny model with experts, and a fleet that asks for its adapter."""

    model: Path
    engine: EngineAddress

    def adapter(self, seed: int) -> Adapter:
        """Of random matrices."""
        of_adapter = adapter_table(table(load_facts(self.model)), SHAPE)
        shapes, chance = of_adapter.hf_shapes(), torch.Generator().manual_seed(seed)
        pairs = {
            module: tuple(
                0.1 * torch.randn(shapes[peft_name(module, which)], generator=chance)
                for which in ("lora_A", "lora_B")
            )
            for module in pairs_of(of_adapter)
        }
        return Adapter(pairs=pairs, alpha=SHAPE.alpha, rank=SHAPE.rank)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapter")
    model = folder / "moe"
    # 32, as SGLang pads experts on a CPU; and no token ends a response before all were sampled
    make_qwen3_moe(model, moe_intermediate_size=32, eos_token_id=None)
    blank = Served(model, EngineAddress(url="", name="", tp=1, sharing_ranks=[0])).adapter(0)
    write_adapter(folder / "start", blank)
    names = (SOLE_ADAPTER, OTHER)
    with adapter_engine(folder, model, folder / "start", adapter_names=names) as engine:
        yield Served(model, engine)


def _bucket(adapter: Adapter) -> Bucket:
    return [
        (peft_name(module, which), tensor)
        for module, pair in adapter.pairs.items()
        for which, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    ]


async def _publish(fleet: SglangFleet, channel: WeightChannel, adapter: Adapter) -> None:
    await fleet.pause()
    await asyncio.to_thread(channel.send, iter([_bucket(adapter)]))
    await asyncio.to_thread(channel.verify, iter([_bucket(adapter)]))
    await fleet.resume(WeightVersion(fleet.version + 1))


@pytest.mark.parametrize("kind", [TensorChannel, DistributedChannel])
def test_an_adapter_that_was_sent_is_that_of_the_merged_model(
    served: Served, tmp_path: Path, kind: type
) -> None:
    """Sent twice, in the same place."""

    async def said(adapters: list[Adapter]) -> list[list[float]]:
        fleet = SglangFleet(engines=[served.engine], adapter=SOLE_ADAPTER)
        channel = kind()
        await asyncio.to_thread(channel.open, [served.engine])
        rows = []
        for adapter in adapters:
            await _publish(fleet, channel, adapter)
            rows.append(list(await fleet.score(PROMPT)))
        await asyncio.to_thread(channel.close)
        await fleet.close()
        return rows

    adapters = [served.adapter(seed) for seed in (1, 2)]
    first, second = asyncio.run(said(adapters))
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-2
    if kind is TensorChannel:
        merged = tmp_path / "merged"
        write_merged(merged, adapters[1], base=served.model)
        with adapter_engine(tmp_path, merged, None) as engine:

            async def plain() -> list[float]:
                fleet = SglangFleet(engines=[engine])
                row = list(await fleet.score(PROMPT))
                await fleet.close()
                return row

            assert second == pytest.approx(asyncio.run(plain()), abs=1e-5)


def test_long_prompts_are_read_at_once(served: Served) -> None:
    """Together longer than a tile of SGLang's kernels."""
    prompts = [PROMPT[first:] + PROMPT * 8 for first in range(8)]

    async def said() -> tuple[list[list[float]], list[float]]:
        fleet = SglangFleet(engines=[served.engine], adapter=SOLE_ADAPTER)
        together = await asyncio.gather(*[fleet.score(prompt) for prompt in prompts])
        alone = await fleet.score(prompts[3])
        await fleet.close()
        return [list(row) for row in together], list(alone)

    together, alone = asyncio.run(said())
    assert sum(map(len, prompts)) > 512
    assert together[3] == pytest.approx(alone, abs=1e-5)


def test_an_adapter_other_than_the_one_that_was_sent_is_found(served: Served) -> None:
    channel = TensorChannel()
    channel.open([served.engine])
    channel.send(iter([_bucket(served.adapter(3))]))
    other = _bucket(served.adapter(3))
    other[5][1].view(-1)[7] += 1e-3
    with pytest.raises(MismatchError, match=r"of \w+ in layer 0: 1 of \d+ values"):
        channel.verify(iter([other]))
    channel.close()


@pytest.mark.parametrize("on_update", ["continue", "drain", "abort"])
def test_a_response_that_a_publish_cut_has_the_versions_that_it_should(
    served: Served, on_update: str
) -> None:
    """Where it goes on, tokens are kept, and each span has the version that made it; else it is of
    one adapter."""

    async def main() -> list[int]:
        fleet = SglangFleet(engines=[served.engine], adapter=SOLE_ADAPTER, on_update=on_update)
        channel = TensorChannel()
        channel.open([served.engine])
        await _publish(fleet, channel, served.adapter(4))
        request = GenerateRequest(prompt_ids=PROMPT, max_new_tokens=100, seed=7)
        asked = asyncio.ensure_future(fleet.generate(request))
        await asyncio.sleep(0.3)
        await _publish(fleet, channel, served.adapter(5))
        done = await asked
        channel.close()
        await fleet.close()
        assert len(done.response_ids) == 100
        assert done.version_spans[0].start == 0
        assert done.version_spans[-1].end == 100
        return [int(span.version) for span in done.version_spans]

    versions = asyncio.run(main())
    assert versions == sorted(versions) and versions[-1] == versions[0] + len(versions) - 1
    assert on_update == "continue" or len(versions) == 1


def _shared(served: Served, name: str) -> SglangFleet:
    return SglangFleet(engines=[served.engine], adapter=name, shares_engines=True)


def _named(bucket: Bucket, adapter: str) -> Bucket:
    return [(engine_name(adapter, name), tensor) for name, tensor in bucket]


async def _replaced(
    fleet: SglangFleet, channel: WeightChannel, bucket: Bucket, version: int
) -> None:
    await fleet.pause()
    await asyncio.to_thread(channel.send, iter([bucket]))
    await asyncio.to_thread(channel.verify, iter([bucket]))
    await fleet.resume(WeightVersion(version))


def test_one_of_two_is_replaced_while_the_other_s_response_goes_on(served: Served) -> None:
    """That has the tokens and log-probs of one that nobody disturbed."""
    request = GenerateRequest(prompt_ids=PROMPT, max_new_tokens=400, seed=7)

    async def main() -> tuple[list, list, list, list]:
        fleet, other = _shared(served, SOLE_ADAPTER), _shared(served, OTHER)
        channel = TensorChannel()
        await asyncio.to_thread(channel.open, [served.engine])
        first, second = (_named(_bucket(served.adapter(seed)), OTHER) for seed in (11, 12))
        await _replaced(fleet, channel, _named(_bucket(served.adapter(10)), SOLE_ADAPTER), 3)
        await _replaced(other, channel, first, 5)
        alone = await fleet.generate(request)
        before = await other.score(PROMPT)
        for _ in range(5):  # a busy machine may be too late
            asked = asyncio.ensure_future(fleet.generate(request))
            await asyncio.sleep(0.2)
            await _replaced(other, channel, second, 6)
            in_the_middle = not asked.done()
            done = await asked
            if in_the_middle:
                break
        assert in_the_middle, "the pause waited for it"
        after = await other.score(PROMPT)
        assert [int(span.version) for span in done.version_spans] == [3]
        assert int((await other.generate(request)).version_spans[0].version) == 6
        await asyncio.to_thread(channel.close)
        await fleet.close()
        await other.close()
        assert done.response_ids == alone.response_ids
        return list(alone.logprobs), list(done.logprobs), list(before), list(after)

    alone, done, before, after = asyncio.run(main())
    assert done == pytest.approx(alone, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2


def test_of_two_the_one_that_was_sent_is_verified(served: Served) -> None:
    channel = TensorChannel()
    channel.open([served.engine])
    own = _named(_bucket(served.adapter(13)), OTHER)
    channel.send(iter([own]))
    channel.send(iter([_named(_bucket(served.adapter(14)), SOLE_ADAPTER)]))
    channel.verify(iter([own]))
    with pytest.raises(MismatchError):
        channel.verify(iter([_named(_bucket(served.adapter(14)), OTHER)]))
    channel.verify(iter([own]))
    channel.close()
