"""The model gives the log-probs that transformers gives, from the same folder."""

from __future__ import annotations

import json

import pytest

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import TOKEN_ROWS
from tests.forked import run_module


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_scores_equal_those_of_transformers(
    worlds: Worlds, models: dict[str, str], model: str
) -> None:
    said = run_module("tests.backends.megatron.plain_scores", models[model], json.dumps(TOKEN_ROWS))
    expected = json.loads(said.rpartition("ROWS")[2])
    for one, other in zip(expected, worlds.get("one")[f"rows {model}"], strict=True):
        assert other[1:] == pytest.approx(one, abs=5e-6)
