"""Costs from facts alone, against counts that were made another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli import models
from milescli.models import costs

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"


def _facts(name: str) -> models.ModelFacts:
    file = CONFIGS / f"{name}.json"
    if not file.exists():
        pytest.skip("the published configs are not beside this repository")
    return models.parse_facts(json.loads(file.read_text()))


def test_cache_of_grouped_attention() -> None:
    cost = costs.cache_cost(_facts("Qwen--Qwen3-8B"))
    assert cost.bytes_per_token == 2 * 8 * 128 * 36 * 2 == 147_456
    assert cost.bytes_of(1000) == 147_456_000


def test_flops_of_a_short_sequence_are_twice_the_active_parameters() -> None:
    facts = _facts("Qwen--Qwen3-30B-A3B")
    table = models.table(facts)
    flops = costs.token_flops(table)
    norms_and_lookup = (
        facts.vocab_size * facts.hidden_size
        + facts.num_layers * 2 * (facts.hidden_size + facts.head_dim)
        + facts.hidden_size
    )
    assert flops.matmul == 2 * (table.num_active_parameters - norms_and_lookup)
    assert flops.forward(4096) - flops.matmul == 4096 * 4 * 32 * 128 * 48


def test_mean_over_places_is_the_sum_over_places() -> None:
    flops = costs.TokenFlops(
        matmul=10, attention_per_position=3, window_per_position=5, window=7, recurrence=2
    )
    for length in (1, 3, 7, 8, 40):
        assert flops.forward_mean(length) == pytest.approx(
            sum(flops.forward(place) for place in range(1, length + 1)) / length
        )
