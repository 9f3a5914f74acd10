"""Real engines on a CPU that guess tokens ahead and say which experts they chose: the record is
that of transformers, whose rows of wrong guesses are gone, also of requests that were retracted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
import transformers

from milescli.backends.sglang.launch.speculation import Speculation
from milescli.core.types import Guesses
from milescli.rollout.base import Completion
from tests.backends.sglang.conftest import (
    Service,
    make_qwen3,
    make_qwen3_moe,
    start_service,
    write_tokenizer,
)
from tests.backends.sglang.test_experts import SHAPE, TOPK, routing, routing_of_transformers, wanted

pytestmark = pytest.mark.engine
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "12"}
"""SGLang begins requests anew every now and then, as where its cache is full."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and a draft model that has its embedding and output layer, to which the layers of
    both add little."""
    folder = tmp_path_factory.mktemp("guessing")
    model = make_qwen3_moe(folder, num_hidden_layers=SHAPE[0], num_experts_per_tok=TOPK)
    draft = make_qwen3(folder / "draft", tie_word_embeddings=False)
    with torch.no_grad():
        for each in (model, draft):
            for name, weight in each.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
                    weight *= 0.2
        model.lm_head.weight *= 3
        draft.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
        draft.lm_head.weight.copy_(model.lm_head.weight)
    model.save_pretrained(folder)
    draft.save_pretrained(folder / "draft")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def served(folder: Path, kind: str) -> Iterator[Service]:
    """An engine that guesses: by n-grams in trees of three ways, or by the draft model."""
    speculation = {
        "ngram": Speculation(kind="ngram", num_guesses=5, ngram_breadth=3),
        "draft": Speculation(kind="draft", num_guesses=3, draft_dir=folder / "draft"),
    }[kind]
    service = start_service(
        folder,
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        speculation=speculation,
        return_routed_experts=True,
        extra_env=RETRACTS,
    )
    yield service
    service.engine.stop()


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_the_record_is_of_the_tokens_that_were_taken(served: Service, kind: str) -> None:
    seeds = [0, 0, 1, 1, 2, 3]

    async def use(fleet) -> list[Completion]:
        return await asyncio.gather(*(fleet.generate(wanted(seed, 100)) for seed in seeds))

    total = Guesses()
    for seed, made in zip(seeds, served.run(use, routing_shape=SHAPE), strict=True):
        tokens = [*wanted(seed, 100).prompt_ids, *made.response_ids]
        assert numpy.array_equal(routing(made), routing_of_transformers(served.model, tokens))
        total += made.guesses
    assert 0 < total.num_right < total.num_guessed
    assert "#retracted_reqs" in Path(served.engine.spec.log_path).read_text()
