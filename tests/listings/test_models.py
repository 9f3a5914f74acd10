"""`miles models`: families with their evidence, one model in numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.core.errors import CheckpointError
from milescli.listings.models import families, numbers
from milescli.models import FAMILIES
from milescli.models.catalogue import RELEASES, evidence


def test_every_family_has_a_line_and_every_line_a_family() -> None:
    spelled = {family.removesuffix("_text") for family in FAMILIES}
    assert spelled == set(RELEASES)
    assert [row.family for row in families()] == list(RELEASES)


def test_no_line_claims_more_than_its_record() -> None:
    known = evidence()
    for row in families():
        assert row.convert == (row.family in known and known[row.family].converted)
        assert not row.train or known[row.family].logits is not None
        assert row.logits is None or row.logits <= 1e-4, row


def test_a_model_in_numbers(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    file.write_text(
        json.dumps(
            config
            | {
                "head_dim": 8,
                "intermediate_size": 48,
                "vocab_size": 101,
                "tie_word_embeddings": True,
            }
        )
    )
    model = numbers(str(file))
    attention, mlp, norms = 32 * 8 * (4 + 2 + 2) + 32 * 32, 3 * 32 * 48, 2 * 32 + 2 * 8
    assert model.num_parameters == 101 * 32 + 2 * (attention + mlp + norms) + 32
    assert model.cache_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert model.layers == {"attention + MLP": 2}
    assert numbers(str(tmp_path)) == model


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        numbers(str(file))
