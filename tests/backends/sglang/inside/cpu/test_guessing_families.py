"""Families whose MTP layers, and n-grams, guess on a CPU in ways of their own: tokens are those of
an engine that guesses nothing, also after new weights.

One family here; `MILES_GUESSED=mimo,qwen3_5_text pytest ...` tries those, and `MILES_GUESSED=` all
of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.models import load_facts, parse_facts
from tests.backends.megatron.mtp_models import MODELS
from tests.backends.sglang.conftest import Service
from tests.backends.sglang.inside.cpu.guessing import (
    Pair,
    buckets,
    make_mtp,
    noisy,
    require_same,
    require_same_experts,
    responses,
    start_guessing,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_rank_trainer")]
_MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
"""As SGLang wants them: full attention at one interval."""
FAMILIES = {
    "qwen3_next": {**MODELS["mtpnext"], **_MIXED},
    "mimo": MODELS["mtpmimo"],
    "qwen3_5_text": {**MODELS["mtp35"], **_MIXED},
    "qwen3_5_moe_text": {**MODELS["mtp35moe"], **_MIXED},
    "glm4_moe_lite": MODELS["mtplite"],
}
_WITH_NGRAMS = ("qwen3_next",)
"""Whose layers keep a state; they are tried on trees of guesses, too."""


def _has_experts(family: str) -> bool:
    return bool(parse_facts(dict(FAMILIES[family])).num_experts)


def wanted() -> list[str]:
    chosen = os.environ.get("MILES_GUESSED", "qwen3_next")
    return [name for name in FAMILIES if name in chosen.split(",") or not chosen]


@pytest.fixture(scope="module", params=wanted())
def pairs(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    """One of each kind, with the plain engine in common."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    named, started = make_mtp(folder, FAMILIES[family], adds=0.2), list[Service]()
    kinds = [None, "mtp", *(["ngram"] if family in _WITH_NGRAMS else [])]
    try:
        with ThreadPoolExecutor() as threads:
            starting = [
                threads.submit(start_guessing, folder, kind, records=_has_experts(family))
                for kind in kinds
            ]
            started += [each.result() for each in starting]
        plain, *guessing = started
        yield [
            Pair(kind=str(kind), guessing=service, plain=plain, named=named, folder=folder)
            for kind, service in zip(kinds[1:], guessing, strict=True)
        ]
    finally:
        with ThreadPoolExecutor() as threads:
            for service in started:
                threads.submit(service.engine.stop)


def test_tokens_are_those_of_an_engine_that_guesses_nothing(pairs: list[Pair]) -> None:
    plain = pairs[0].plain.run(responses)
    for pair in pairs:
        guesses = require_same(pair.guessing.run(responses), plain)
        assert 0 < guesses.num_right < guesses.num_guessed, pair.kind


def test_experts_are_those_that_an_engine_that_guesses_nothing_chose(pairs: list[Pair]) -> None:
    if not load_facts(pairs[0].folder).num_experts:
        pytest.skip("it has none")
    for pair in pairs:
        require_same_experts(pair)


def test_new_weights_reach_the_model_and_its_layer(pairs: list[Pair]) -> None:
    mtp, newer = pairs[0], noisy(pairs[0].named, scale=0.2)
    mtp.publish(newer)
    channel = TensorChannel(timeout_s=60)
    channel.open([mtp.guessing.address])
    channel.verify(buckets(newer))
    channel.close()
    plain = mtp.plain.run(responses)
    before = require_same(mtp.guessing.run(responses), plain)
    blind = ("eh_proj", "mtp.fc", "input_proj")
    layer = {
        name: 0 * tensor for name, tensor in newer.items() if any(part in name for part in blind)
    }
    assert layer
    mtp.publish({**newer, **layer})
    assert require_same(mtp.guessing.run(responses), plain).num_right < before.num_right / 2
